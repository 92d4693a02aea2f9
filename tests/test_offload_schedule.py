"""Whatever an offloaded update runs beside, the result is that of the sequential order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import ZeroEngine
from tests.harness.ranks import run_ranks

STEPS = 6


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))
        self.head = nn.Parameter(torch.randn(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return ((x * self.head).sum(1) - 1).square().mean()


def build() -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(3)
    model = Net().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def start(stage: int, offload: dict[str, Any], **config: Any) -> ZeroEngine:
    model, optimizer = build()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": offload}
    return hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": zero, **config})[0]


def backward(engine: ZeroEngine, step: int) -> float:
    loss = engine(rows(step).chunk(engine.world_size)[engine.rank])
    engine.backward(loss)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / engine.world_size


def assert_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


# -------------------------------------------------------------------- delayed update
def delayed_reference(first: int, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process: from step `first` on, the update of a step is applied after the backward of the next one."""
    model, optimizer = build()
    losses: list[float] = []
    waiting: list[torch.Tensor] | None = None
    for step in range(STEPS):
        loss = model(rows(step))
        loss.backward()
        losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        mine = [param.grad for param in model.parameters()]
        if waiting is not None:
            _apply(model, optimizer, waiting)
            waiting = None
        if step >= first:
            waiting = mine
        else:
            _apply(model, optimizer, mine)
        optimizer.zero_grad()
    if waiting is not None:
        _apply(model, optimizer, waiting)
    return losses, dict(model.state_dict())


def _apply(model: nn.Module, optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> None:
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    optimizer.step()


def train_delayed(stage: int, offload: dict[str, Any], clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = start(stage, offload, gradient_clipping=clip)
    losses = []
    for step in range(STEPS):
        losses.append(backward(engine, step))
        engine.step()
    return losses, engine.full_state_dict(keep=True)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_delayed_update(stage: int, first: int, tmp_path: Path) -> None:
    for device, clip in (("cpu", 0.0), ("nvme", 0.05)):
        offload = {
            "device": device,
            "nvme_path": str(tmp_path),
            "delayed_update": True,
            "delayed_update_start": first,
        }
        want_losses, want = delayed_reference(first, clip)
        losses, weights = run_ranks(train_delayed, 2, stage, offload, clip, timeout=60)[0]
        assert losses == pytest.approx(want_losses, rel=1e-9)
        assert_near(weights, want)
        at_once = delayed_reference(STEPS, clip)[0]
        assert losses[first + 2] != pytest.approx(at_once[first + 2], rel=1e-6), "nothing was delayed"


# -------------------------------------------------------------------- what undoes an update that began in backward
def plain(script: str) -> dict[str, torch.Tensor]:
    """The same script in one process."""
    model, optimizer = build()
    for step in range(STEPS):
        model(rows(step)).backward()
        if script == "skip" and step % 2:
            optimizer.zero_grad()
            continue
        if script == "lr":
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        if script == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if script == "twice":
            model(rows(step + 100)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def scripted(script: str, stage: int, folder: str) -> tuple[dict[str, torch.Tensor], int]:
    """(weights, updates that had begun when `step` was called)"""
    engine = start(stage, {"device": "nvme", "nvme_path": folder})
    assert engine.optimizer is not None and engine.optimizer._native is not None
    early = 0
    for step in range(STEPS):
        backward(engine, step)
        early += len(engine.optimizer._native._early)
        if script == "skip" and step % 2:
            engine.zero_grad()
            continue
        if script == "lr":
            engine.optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        if script == "clip":
            engine.clip_grad_norm_(0.05)
        if script == "twice":
            backward(engine, step + 100)
        engine.optimizer.step()
    return engine.full_state_dict(keep=True), early


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("script", ["plain", "skip", "lr", "clip", "twice"])
def test_early_updates_are_undone(script: str, stage: int, tmp_path: Path) -> None:
    weights, early = run_ranks(scripted, 2, script, stage, str(tmp_path), timeout=60)[0]
    assert_near(weights, plain(script))
    assert early > 0, "no update began in backward"


def look_too_early(stage: int) -> str:
    engine = start(stage, {"device": "cpu", "delayed_update": True})
    backward(engine, 0)
    engine.step()
    with pytest.raises(hf_zero.StateError, match="delayed") as caught:
        engine.module.state_dict()
    engine.finish_updates()
    if stage < 3:
        state = engine.module.state_dict()
        assert_near(dict(state), engine.full_state_dict(keep=True))
    return str(caught.value)


def test_parameters_without_their_delayed_update_are_not_given_away() -> None:
    assert all("engine.finish_updates()" in text for text in run_ranks(look_too_early, 2, 2, timeout=60))
