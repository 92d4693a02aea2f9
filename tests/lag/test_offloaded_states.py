"""States that wait on the host between steps: the device's memory is free, and training goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.runtime.zero.offload_config import OffloadStateTypeEnum  # type: ignore[import-not-found]
from tests.harness.ranks import run_ranks
from tests.lag import device, group
from tests.lag.test_training import HIDDEN, VOCABULARY, Layers

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

STEPS = 4
IN_THE_WAY = "while states are on the host: call engine.reload_states"


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def engine_of(stage: int, precision: str) -> hf_zero.ZeroEngine:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine = hf_zero.initialize(model=Layers(), config=config)[0]
    hf_zero.ShardedEMA(engine.module)
    return engine


def backward(engine: hf_zero.ZeroEngine, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + engine.global_rank)
    ids = torch.randint(VOCABULARY, (2, HIDDEN), generator=generator).to(engine.device)
    engine.backward(engine(ids, ids))


def trained(stage: int, precision: str, include: list[str] | None, *, offloads: bool) -> dict[str, torch.Tensor]:
    """The weights after some steps, with the states on the host before every micro-batch but the first, or never."""
    device.enable()
    group.register()
    engine = engine_of(stage, precision)
    for number in range(2 * STEPS):
        if offloads and number:  # also within an accumulation window
            engine.offload_states(include)
            engine.reload_states()
        backward(engine, number)
        engine.step()
    weights: dict[str, torch.Tensor] = engine.full_state_dict(keep=True)
    engine.teardown()
    return {name: value.cpu() for name, value in weights.items()}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_goes_on_bit_for_bit(stage: int, precision: str) -> None:
    plain = run_ranks(trained, 2, stage, precision, None, offloads=False, timeout=120)[0]
    moved = run_ranks(trained, 2, stage, precision, None, offloads=True, timeout=120)[0]
    first = {name: value for name, value in Layers().state_dict().items() if name.endswith("weight")}
    assert all(not torch.equal(plain[name].float(), value) for name, value in first.items())
    assert all(torch.equal(plain[name], moved[name]) for name in plain)


def measured(kinds: list[Any] | None) -> dict[str, Any]:
    """Bytes on the device and on the host, and what happens to those who come meanwhile."""
    device.enable()
    group.register()
    engine = engine_of(3, "bf16")
    for number in range(2):
        backward(engine, number)
        engine.step()
    engine.module.zero_grad()
    ids = torch.zeros(2, HIDDEN, dtype=torch.long, device=engine.device)
    engine.eval()
    with torch.no_grad():
        before = engine(ids, ids).item()
    reports, allocated = [engine.memory_report()], [torch.accelerator.memory_allocated()]
    engine.offload_states(kinds)
    engine.offload_states(kinds)  # nothing is left to move
    reports.append(engine.memory_report())
    allocated.append(torch.accelerator.memory_allocated())
    refused = {}
    calls = {
        "forward": lambda: engine(ids, ids).item(),
        "backward": lambda: backward(engine, 2),
        "step": lambda: engine.optimizer.step(),
        "checkpoint": lambda: engine.save_checkpoint("never"),
        "moments": lambda: hf_zero.full_optimizer_state(engine.module.head.weight, "exp_avg"),
        "masters": lambda: hf_zero.full_optimizer_state(engine.module.head.weight, "master"),
        "state_dict": lambda: engine.optimizer.state_dict(),
    }
    with torch.no_grad():
        for name, call in calls.items():
            with torch.set_grad_enabled(name == "backward"):
                try:
                    result = call()
                    refused[name] = result if isinstance(result, float) else "it passed"
                except hf_zero.StateError as error:
                    refused[name] = str(error)
    engine.reload_states()
    reports.append(engine.memory_report())
    allocated.append(torch.accelerator.memory_allocated())
    engine.optimizer.zero_grad()
    backward(engine, 2)
    engine.teardown()
    return {"reports": reports, "allocated": allocated, "refused": refused, "before": before}


def test_the_memory_of_the_device_is_free_meanwhile(tmp_path: Path) -> None:
    for seen in run_ranks(measured, 2, None, timeout=120):
        before, away, after = seen["reports"]
        assert away["device"] == 0 and away["total"] == before["total"] == away["host"]
        assert after == before and before["host"] == 0
        in_use, left, again = seen["allocated"]
        assert in_use - left > 0.9 * before["total"] and abs(again - in_use) < 0.1 * before["total"]
        for call, message in seen["refused"].items():
            assert "on the host: call engine.reload_states() first" in message, call


def test_a_model_without_its_training_states_still_runs() -> None:
    kinds = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params, "lp_grads"]
    for seen in run_ranks(measured, 2, kinds, timeout=120):
        assert seen["refused"].pop("forward") == seen["before"]
        assert "on the host: call engine.reload_states() first" in seen["refused"].pop("masters")
        for call, message in seen["refused"].items():
            assert IN_THE_WAY in message, call
        before, away, _ = seen["reports"]
        assert away["device"] == before["parameters"] and away["host"] == before["total"] - before["parameters"]


def refused_calls() -> list[str]:
    device.enable()
    group.register()
    engine = engine_of(3, "bf16")
    errors = []
    for arguments in ({"include": ["moments"]}, {"device": "nvme"}):
        with pytest.raises(hf_zero.ConfigError) as caught:
            engine.offload_states(**arguments)
        errors.append(str(caught.value))
    engine.teardown()
    return errors


def test_what_cannot_be_moved_is_named() -> None:
    for errors in run_ranks(refused_calls, 2, timeout=120):
        assert "unknown 'moments'; expected some of optim_states, hp_params" in errors[0]
        assert "device='nvme'" in errors[1]
