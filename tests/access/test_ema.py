"""The average of the weights equals that of one process at every stage, is saved with the engine, and swapped in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from tests.access.test_local import MEDIA, Net, rows
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.slow  # many short ones

DECAY, STEPS = 0.7, 3
Weights = dict[str, torch.Tensor]


def build(dtype: torch.dtype) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(3)
    model = Net().to(dtype)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def start(stage: int, medium: dict[str, Any], dtype: torch.dtype, **more: Any) -> Any:
    model, optimizer = build(dtype)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **medium}
    return hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": zero, **more})[0]


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return rows(step).to(dtype)


def plain(steps: int = STEPS) -> tuple[Weights, Weights, list[float]]:
    """(averages, weights, losses with the averages after each step) of one process."""
    model, optimizer = build(torch.float64)
    average = copy.deepcopy(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, torch.float64)).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(DECAY).add_(param, alpha=1 - DECAY)
            losses.append(float(average(batch(99, torch.float64))))
    return dict(average.state_dict()), dict(model.state_dict()), losses


def whole_state(engine: Any) -> Weights:
    """Weights and masters."""
    state: Weights = engine.full_state_dict(keep=True)
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            master = hf_zero.full_optimizer_state(param, "master")
            assert master is not None
            state[f"{name}/master"] = master.cpu().clone()
    return state


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def averaged(stage: int, medium: dict[str, Any]) -> dict[str, Any]:
    engine = start(stage, medium, torch.float64)
    ema = hf_zero.ShardedEMA(engine.module, DECAY)
    losses = []
    for step in range(STEPS):
        engine.backward(engine(batch(step, torch.float64)))
        engine.step()
        engine.comm.counts.clear()
        ema.update()
        assert not engine.comm.counts, "an update of the average needs nobody"
        before = whole_state(engine)
        with ema.swapped():
            with torch.no_grad():
                losses.append(float(engine(batch(99, torch.float64))))
            saved = engine.full_state_dict(keep=True)
            with pytest.raises(hf_zero.StateError, match="swapped"):
                engine.optimizer.step()
            with pytest.raises(hf_zero.StateError, match="swapped"):
                engine.save_checkpoint("nowhere")
        assert equal(whole_state(engine), before), "weights and masters are back to the bit"
    with pytest.raises(ValueError, match="mine"), ema.swapped():
        raise ValueError("mine")
    assert equal(whole_state(engine), before)
    own = sum(shard.nbytes for shard in engine.optimizer.attached["ema"].values())
    return {
        "ema": ema.full_state_dict(keep=True),
        "saved": saved,
        "weights": engine.full_state_dict(keep=True),
        "losses": losses,
        "own": own,
    }


@pytest.mark.parametrize(
    ("stage", "world", "medium"),
    [
        (2, 2, "device"),
        (3, 2, "device"),
        (3, 2, "disk"),
        (0, 2, "device"),
        (1, 2, "device"),
        *((3, world, "device") for world in (1, 3)),
        (3, 2, "host"),
        (2, 2, "disk"),
        *(pytest.param(stage, world, "device", marks=pytest.mark.nightly) for stage in range(3) for world in (1, 3)),
        *(pytest.param(stage, 2, "host", marks=pytest.mark.nightly) for stage in (1, 2)),
    ],
)
def test_the_average_is_that_of_one_process(stage: int, world: int, medium: str, tmp_path: Path) -> None:
    blocks = {name: {**block, "nvme_path": str(tmp_path)} for name, block in MEDIA[medium].items()}
    if stage < 3:
        blocks.pop("offload_param", None)
    want, weights, losses = plain()
    assert not torch.allclose(want["layers.0.weight"], weights["layers.0.weight"], rtol=1e-3), "vacuous"
    for got in run_ranks(averaged, world, stage, blocks, timeout=60):
        assert got["losses"] == pytest.approx(losses, rel=1e-9)
        assert "frozen" not in got["ema"] and "frozen" in got["saved"]
        for name, value in want.items():
            for which in (got["saved"], got["ema"]) if name != "frozen" else (got["saved"],):
                assert torch.allclose(which[name], value, rtol=1e-9, atol=1e-14), name
            assert torch.allclose(got["weights"][name], weights[name], rtol=1e-9, atol=1e-14), name
        whole = sum(value.nbytes for value in got["ema"].values())
        assert got["own"] <= (whole / world + 1000 if stage else whole + 1000)


def bf16(stage: int) -> None:
    engine = start(stage, {}, torch.float32, bf16={"enabled": True})
    ema = hf_zero.ShardedEMA(engine.module, 0.9)
    engine.backward(engine(batch(0, torch.float32)))
    engine.step()
    ema.update()
    average = ema.full_state_dict(keep=True)
    before = whole_state(engine)
    with ema.swapped():
        for name, param in engine.module.named_parameters():
            got = hf_zero.full_param(param)
            if param.requires_grad:
                assert average[name].dtype == torch.float32
                assert torch.equal(got, average[name].bfloat16()), name
            else:
                assert torch.equal(got, before[name])
    assert not torch.equal(average["layers.0.weight"].bfloat16(), before["layers.0.weight"]), "vacuous"
    assert equal(whole_state(engine), before)


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in range(3))])
def test_16_bit_weights_show_the_average_and_masters_stay(stage: int) -> None:
    run_ranks(bf16, 2, stage)


def save(stage: int, folder: str) -> None:
    engine = start(stage, {}, torch.float64)
    ema = hf_zero.ShardedEMA(engine.module, DECAY)
    for step in range(2):
        engine.backward(engine(batch(step, torch.float64)))
        engine.step()
        ema.update()
    engine.save_checkpoint(folder)


def resume(stage: int, folder: str, how: str) -> tuple[Weights, Weights]:
    engine = start(stage, {}, torch.float64)
    if how == "before":
        ema = hf_zero.ShardedEMA(engine.module, DECAY)
        engine.load_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        ema = hf_zero.ShardedEMA(engine.module, DECAY)
        ema.load_checkpoint(folder)
        with pytest.raises(hf_zero.CheckpointError, match="holds no 'other'"):
            hf_zero.ShardedEMA(engine.module, DECAY, name="other").load_checkpoint(folder)
    engine.backward(engine(batch(2, torch.float64)))
    engine.step()
    ema.update()
    return ema.full_state_dict(keep=True), engine.full_state_dict(keep=True)


@pytest.mark.parametrize(
    ("saved", "resumed", "how"),
    [
        ((2, 3), (3, 2), "before"),
        ((2, 3), (2, 2), "after"),
        pytest.param((3, 1), (2, 0), "before", marks=pytest.mark.slow),
        pytest.param((1, 0), (2, 3), "after", marks=pytest.mark.slow),
    ],
)
def test_resume_at_another_world_size_and_stage(
    saved: tuple[int, int], resumed: tuple[int, int], how: str, tmp_path: Path
) -> None:
    """Each is (world size, stage)."""
    run_ranks(save, saved[0], saved[1], str(tmp_path))
    want, weights, _ = plain()
    for got, params in run_ranks(resume, resumed[0], resumed[1], str(tmp_path), how):
        for name in got:
            assert torch.allclose(got[name], want[name], rtol=1e-9, atol=1e-14), name
            assert torch.allclose(params[name], weights[name], rtol=1e-9, atol=1e-14), name


def without(folder: str, log: str) -> tuple[Weights, Weights]:
    """A checkpoint that has an average, read without one; and one that has none, read with one."""
    engine = start(3, {}, torch.float64)
    engine.load_checkpoint(folder)
    engine.backward(engine(batch(2, torch.float64)))
    engine.step()
    engine.save_checkpoint(log)
    ema = hf_zero.ShardedEMA(engine.module, DECAY)
    with pytest.raises(hf_zero.ConfigError, match="already"):
        hf_zero.ShardedEMA(engine.module)
    engine.backward(engine(batch(3, torch.float64)))
    engine.step()
    engine.load_checkpoint(log)
    with pytest.raises(hf_zero.ConfigError, match=r"decay=1\.5"):
        ema.update(1.5)
    for wrong in ("0.9", True, float("nan"), torch.tensor([0.5, 0.5])):
        with pytest.raises(hf_zero.ConfigError, match="expected a number from 0"):
            ema.update(wrong)
        with pytest.raises(hf_zero.ConfigError, match="expected a number from 0"):
            hf_zero.ShardedEMA(engine.module, wrong, name="another")
    average = ema.full_state_dict(keep=True)
    held = engine.memory_report()["optimizer"]
    ema.close()
    assert engine.memory_report()["optimizer"] < held and not engine.optimizer.attached
    return average, engine.full_state_dict(keep=True)


def test_checkpoints_with_and_without_an_average(tmp_path: Path) -> None:
    run_ranks(save, 2, 3, str(tmp_path / "with"))
    _, weights, _ = plain()
    for average, params in run_ranks(without, 2, str(tmp_path / "with"), str(tmp_path / "without")):
        for name in average:
            assert torch.allclose(params[name], weights[name], rtol=1e-9, atol=1e-14), name
            assert torch.equal(average[name], params[name]), "it starts anew from the loaded weights"


def test_it_needs_a_model_in_training() -> None:
    with pytest.raises(hf_zero.StateError, match=r"after hf_zero\.initialize"):
        hf_zero.ShardedEMA(Net())
