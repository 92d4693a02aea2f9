"""Masters, gradients and optimizer states in bf16: what one process gives whose model and optimizer are in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero import ConfigError, ZeroConfig
from tests.harness.models import Net
from tests.harness.ranks import run_ranks

BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
STEPS = 4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
}
Weights = dict[str, torch.Tensor]


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (3,), generator=torch.Generator().manual_seed(10 * step + rank))


def reference(kind: str, steps: int = STEPS) -> Weights:
    """Train one process with torch alone, with the mean of the gradients that two ranks would have in bf16."""
    model = build().bfloat16()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer_class, arguments = OPTIMIZERS[kind]
    optimizer = optimizer_class(trained, **arguments)
    for step in range(steps):
        by_rank = [torch.autograd.grad(model(batch(step, rank)), trained) for rank in range(2)]
        for param, *grads in zip(trained, *by_rank, strict=True):
            param.grad = (grads[0] + grads[1]) / 2
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def start(stage: int, kind: str, bf16: dict[str, Any] = BF16, **keys: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0,
        "bf16": bf16,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": kind, "params": OPTIMIZERS[kind][1]},
        **keys,
    }
    return hf_zero.initialize(model=build(), config=config)[0]


def train(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(batch(step, engine.rank)))
        engine.step()


def trained(stage: int, kind: str) -> tuple[Weights, dict[str, int]]:
    engine = start(stage, kind)
    train(engine, 0, STEPS)
    kinds = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",), "Adagrad": ("sum",)}[kind]
    for name in ("master", *kinds):
        state = hf_zero.full_optimizer_state(engine.module.inner.weight, name)
        assert state is not None and state.dtype == torch.bfloat16
    return engine.full_state_dict(keep=True), engine.memory_report()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_update_is_that_of_one_process_in_bf16(stage: int, kind: str) -> None:
    want = reference(kind)
    for found, _ in run_ranks(trained, 2, stage, kind):
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def sizes(stage: int) -> list[dict[str, int]]:
    reports = []
    for bf16 in (BF16, {"enabled": True}):
        engine = start(stage, "AdamW", bf16)
        train(engine, 0, 1)
        reports.append(engine.memory_report())
    return reports


def test_states_take_half_the_memory_and_masters_none() -> None:
    small, large = run_ranks(sizes, 2, 2)[0]
    assert small["optimizer"] * 2 == pytest.approx(large["optimizer"], rel=0.1)
    assert small["gradients"] * 2 == large["gradients"] and large["master"] > 0 == small["master"]


def resumed(stage: int, other: int, folder: str) -> tuple[Weights, Weights]:
    """Save after two steps; go on in bf16 at another stage, and with fp32 masters, which start from bf16 values."""
    engine = start(stage, "AdamW")
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(other, "AdamW")
    engine.load_checkpoint(folder)
    train(engine, 2, STEPS)
    wide = start(other, "AdamW", {"enabled": True})
    wide.load_checkpoint(folder)
    master = hf_zero.full_optimizer_state(wide.module.inner.weight, "master")
    assert master is not None and master.dtype == torch.float32
    train(wide, 2, STEPS)
    return engine.full_state_dict(keep=True), {"inner.weight": master}


@pytest.mark.parametrize(("stage", "other"), [(2, 3), (3, 1)])
def test_a_checkpoint_goes_on_in_bf16_and_in_fp32(stage: int, other: int, tmp_path: Path) -> None:
    found, wide = run_ranks(resumed, 2, stage, other, str(tmp_path))[0]
    for name, value in reference("AdamW").items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    torch.testing.assert_close(wide["inner.weight"], reference("AdamW", 2)["inner.weight"].float(), rtol=0, atol=0)
    saved = hf_zero.load_fp32_state_dict(tmp_path)
    assert saved["inner.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("bf16", "offload", "told"),
    [
        ({"bf16_optimizer_states": True}, "none", r"bf16_optimizer_states = true: it goes with bf16_master_weights"),
        (
            {"bf16_master_weights_and_grads": True},
            "none",
            "true: bf16_optimizer_states is not true",
        ),
        ({**BF16, "lamb": 1}, "none", r"bf16_optimizer_states = true: this optimizer keeps its states in fp32"),
        ({**BF16}, "cpu", r"the native Adam has fp32 masters\.\n.*fp32_optimizer_states = false"),
    ],
)
def test_combinations_that_are_refused(bf16: dict[str, Any], offload: str, told: str) -> None:
    kind = "Lamb" if bf16.pop("lamb", 0) else "AdamW"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": kind},
        "bf16": {"enabled": True, **bf16},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": offload}},
    }
    with pytest.raises(ConfigError, match=told):
        ZeroConfig.load(config).resolve(world_size=2)
