"""Sizes that disks and vector units do not like: each trains as torch's AdamW does in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

SIZES = (0, 1, 7, 511, 4097, 20011)
STEPS = 20


class Odd(nn.Module):
    """Every parameter is a unit of its own, and an element's gradient depends on the element and the row."""

    _no_split_modules = ("Scale",)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scale(size) for size in SIZES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts]).sum()


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.sin(x[:, None] * torch.arange(1, self.weight.numel() + 1))
        return (rows * self.weight - 0.5).square().mean(0).sum()


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(step))


def build() -> tuple[Odd, torch.optim.AdamW]:
    torch.manual_seed(5)
    model = Odd()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def reference() -> dict[str, torch.Tensor]:
    model, optimizer = build()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(step)).backward()
        optimizer.step()
    return dict(model.state_dict())


def train(stage: int, zero: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, optimizer = build()
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(STEPS):
        engine.backward(engine(rows(step).chunk(engine.world_size)[engine.rank]))
        engine.step()
    return engine.full_state_dict(keep=True)


@pytest.mark.slow
@pytest.mark.parametrize("world", [*(pytest.param(world, marks=pytest.mark.nightly) for world in (1, 2)), 3])
def test_awkward_sizes(world: int, tmp_path: Path) -> None:
    want = reference()
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    small_pools = {
        "offload_optimizer": {**disk, "buffer_count": 1},
        "offload_param": {**disk, "max_in_cpu": 0, "buffer_count": 1, "buffer_size": 1000},
        "sub_group_size": 513,
    }
    runs: list[dict[str, torch.Tensor]] = []
    for stage, zero in (
        (3, {"offload_optimizer": {"device": "cpu"}}),
        (3, small_pools),
        (2, {"offload_optimizer": disk, "reduce_bucket_size": 1001}),
    ):
        runs.append(run_ranks(train, world, stage, zero, timeout=90)[0])
        for name, value in want.items():
            assert runs[-1][name].shape == value.shape
            if value.numel():
                difference = (runs[-1][name] - value).abs().max() / value.abs().max()
                assert difference <= 1e-6, f"stage {stage}, {zero}: {name} is off by {difference:.3g} of its size"
    for name, value in runs[0].items():
        assert torch.equal(runs[1][name], value), f"{name}: the disk gives other bits than the host"


def train_weights_alone(zero: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return weights before and after two steps of an optimizer that does not hold the biases, which require
    gradients.
    """
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW([layer.weight for layer in model], lr=1e-2)  # type: ignore[arg-type]
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero}}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 40)).square().mean())
        engine.step()
    engine.finish_updates()
    after = engine.full_state_dict(keep=True)
    return {name: (value, after[name]) for name, value in before.items()}


def test_parameters_that_the_optimizer_does_not_hold_stay(tmp_path: Path) -> None:
    """An update that fills memory of its own, or what a disk lends, must fill in what it does not update, too."""
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    delayed = {"device": "cpu", "delayed_update": True, "delayed_update_start": 0}
    for zero in (
        {"offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 0}},
        {"offload_optimizer": delayed, "offload_param": {"device": "cpu"}},
    ):
        for name, (before, after) in run_ranks(train_weights_alone, 2, zero, timeout=90)[0].items():
            assert torch.equal(before, after) == name.endswith("bias"), f"{zero}: {name}"
