"""Parameters without a dimension (CLIP's logit_scale) and without elements train as they do in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

STEPS, CLIP = 3, 0.05

Params = dict[str, torch.Tensor]


class Tiny(nn.Module):
    """Every module is a unit of its own: the empty parameter is alone in its buffer, and so is the number."""

    _no_split_modules = ("Linear", "Number", "Empty")

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.number, self.empty = nn.Linear(6, 2), Number(), Empty()
        self.root_number = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.empty(self.number(self.linear(x)) * self.root_number).square().mean()


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum()


def build(kind: str) -> tuple[Tiny, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tiny()
    if kind == "Adafactor":
        model.empty.requires_grad_(False)  # torch's divides by the number of elements
        return model, torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def reference(kind: str, clip: float, steps: int = STEPS) -> Params:
    model, optimizer = build(kind)
    for step in range(steps):
        model(rows(step)).backward()
        if clip:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip, "vacuous"
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def start(kind: str, stage: int, zero: dict[str, Any], clip: float) -> Any:
    model, optimizer = build(kind)
    config = {
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def step_on(engine: Any, step: int) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    engine.backward(engine(rows(step).chunk(world)[rank]))
    engine.step()


def train(kind: str, runs: list[tuple[int, dict[str, Any], float]]) -> list[Params]:
    results = []
    for stage, zero, clip in runs:
        engine = start(kind, stage, zero, clip)
        for step in range(STEPS):
            step_on(engine, step)
        results.append(engine.full_state_dict(keep=True))
    return results


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_training_follows_one_process(kind: str, world: int, tmp_path: Path) -> None:
    media: list[dict[str, Any]] = [{}]
    if kind == "AdamW":
        media += [
            {"offload_optimizer": one} for one in ({"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)})
        ]
    runs = [(stage, zero, clip) for stage in (1, 2, 3) for zero in media for clip in (0.0, CLIP)]
    runs.append((0, {}, CLIP))
    start_values = dict(build(kind)[0].named_parameters())
    for run, got in zip(runs, run_ranks(train, world, kind, runs)[0], strict=True):
        want = reference(kind, run[2])
        assert not torch.equal(want["number.scale"], start_values["number.scale"])
        for name, value in want.items():
            assert got[name].shape == value.shape
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=f"{run}: {name}")


def save_and_resume(folder: str, zero: dict[str, Any]) -> Params:
    engine = start("AdamW", 3, zero, 0.0)
    for step in range(2):
        step_on(engine, step)
    engine.save_checkpoint(folder, "tiny")
    again = start("AdamW", 1, {}, 0.0)
    again.load_checkpoint(folder, "tiny")
    step_on(again, 2)
    result: Params = again.full_state_dict(keep=True)
    return result


def test_checkpoint_keeps_their_state(tmp_path: Path) -> None:
    want = reference("AdamW", 0.0)
    for number, zero in enumerate(({}, {"offload_optimizer": {"device": "cpu"}})):
        got = run_ranks(save_and_resume, 2, str(tmp_path / str(number)), zero)[0]
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=name)


def average(stage: int) -> float:
    engine = start("AdamW", stage, {}, 0.0)
    ema = hf_zero.ShardedEMA(engine.module, decay=0.5)
    step_on(engine, 0)
    ema.update()
    return float(ema.full_state_dict(keep=True)["number.scale"])


def test_average_of_weights() -> None:
    want = (1.3 + float(reference("AdamW", 0.0, steps=1)["number.scale"])) / 2
    for stage in (1, 3):
        assert run_ranks(average, 2, stage)[0] == pytest.approx(want, rel=1e-6)
