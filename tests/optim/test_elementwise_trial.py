"""Optimizers that hf_zero does not know: a trial tells those that treat every element by itself from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.optim.elementwise_trial import DIFFERS, why_not_elementwise
from tests.harness.ranks import run_ranks

CPU = torch.device("cpu")


class OtherSGD(torch.optim.Optimizer):
    """SGD by its own code; `change` makes something else of a gradient."""

    def __init__(self, params: Any, lr: float = 0.1, change: str = "nothing") -> None:
        super().__init__(params, {"lr": lr})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(CHANGES[self.change](param, param.grad), alpha=group["lr"])


def _in_blocks(grad: torch.Tensor) -> torch.Tensor:
    """Round to 127 steps of the largest magnitude in each block of 256, as 8-bit states are."""
    blocks = nn.functional.pad(grad.reshape(-1), (0, -grad.numel() % 256)).view(-1, 256)
    steps = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return ((blocks / steps).round() * steps).view(-1)[: grad.numel()].view_as(grad)


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda param, grad: grad,
    "zero": lambda param, grad: 0 * grad,
    "sign": lambda param, grad: grad.sign() + param,
    "norm": lambda param, grad: grad / grad.norm(),
    "rows": lambda param, grad: grad - grad.mean(-1, keepdim=True),
    "blocks": lambda param, grad: _in_blocks(grad),
    # AdamP's: what points along the parameter is taken out where the gradient hardly does.
    "projection": lambda param, grad: (
        grad - 0.5 * param if (grad * param).sum().abs() < 1e-3 * grad.norm() * param.norm() else grad
    ),
    "matrices": lambda param, grad: grad / grad.shape[1] if param.shape != (70,) else grad,
}


class WithTwoSets(torch.optim.Optimizer):
    """Weights for evaluation are the mean of those of all steps, and change places with the others: schedule-free."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "train_mode": True, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param, 1 / group["steps"])

    def train(self) -> None:
        self._exchange(to_train=True)

    def eval(self) -> None:
        self._exchange(to_train=False)

    @torch.no_grad()
    def _exchange(self, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                group["train_mode"] = to_train
                for param in group["params"]:
                    if "mean" in self.state[param]:
                        mean = self.state[param]["mean"]
                        other = mean.clone()
                        mean.copy_(param)
                        param.copy_(other)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "NAdam", "Rprop", "Adadelta"])
def test_elementwise_optimizers_of_torch(name: str) -> None:
    model = _model()
    before = [param.clone() for param in model.parameters()]
    state = torch.get_rng_state()
    assert why_not_elementwise(getattr(torch.optim, name)(model.parameters(), lr=0.01), CPU) is None
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("rate", [0.1, 1e-7, 0.0])
@pytest.mark.parametrize("change", CHANGES)
def test_what_an_update_uses(change: str, rate: float) -> None:
    why = why_not_elementwise(OtherSGD(_model().parameters(), rate, change), CPU)
    if change in ("nothing", "sign"):
        assert why is None
    elif change == "matrices":
        assert why is not None and "IndexError" in why
    elif change == "zero":
        assert why is not None and "did not move" in why
    else:
        assert why == DIFFERS


def _losses(optimizer: str, stage: int) -> list[float]:
    """Train by Accelerate; return losses of training, and of an evaluation after each step."""
    accelerator = hf_zero_accelerator(stage)
    model = _model()
    made = WithTwoSets(model.parameters()) if optimizer == "two sets" else OtherSGD(model.parameters(), 0.1, optimizer)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    model, made = accelerator.prepare(model, made)
    return _train(model, made, accelerator.backward, rank, world_size)


def hf_zero_accelerator(stage: int) -> Any:
    from accelerate import Accelerator

    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    accelerator = Accelerator(cpu=True)
    hf_zero.ZeroPlugin({**config, "train_micro_batch_size_per_gpu": 4}).attach(accelerator)
    return accelerator


def _train(model: Any, optimizer: Any, backward: Callable[[Any], Any], rank: int, world_size: int) -> list[float]:
    seen = []
    for step in range(4):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        for mode in ("eval", "train"):
            getattr(optimizer, mode, lambda: None)()
            with torch.no_grad():
                seen.append(model(torch.ones(1, 8)).sum().item())
    return seen


@pytest.mark.parametrize("optimizer", ["sign", "two sets"])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_trial_shows_is_trained(optimizer: str, stage: int) -> None:
    model = _model()
    alone: Any = (
        WithTwoSets(model.parameters()) if optimizer == "two sets" else OtherSGD(model.parameters(), 0.1, "sign")
    )
    want = _train(model, alone, torch.Tensor.backward, 0, 1)
    assert len(set(want)) == (8 if optimizer == "two sets" else 4) - (optimizer == "two sets")
    for losses in run_ranks(_losses, 2, optimizer, stage):
        assert losses == pytest.approx(want, rel=1e-5)


def test_what_a_trial_does_not_show_is_refused_on_every_rank() -> None:
    for failure in run_ranks(_losses, 2, "norm", 2, expect_error=True):
        assert failure.kind == "ConfigError"
        assert DIFFERS in failure.message and "zero_allow_untested" not in failure.message
