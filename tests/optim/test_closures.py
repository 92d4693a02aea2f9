"""Optimizers that evaluate the loss themselves, at stage 0: they follow one process with the batch of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

STEPS = 3
Weights = dict[str, torch.Tensor]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization (arXiv:2010.01412): takes the gradient again, where the loss is higher."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        moves = [param.grad * (self.param_groups[0]["rho"] / norm) for param in params]
        torch._foreach_add_(params, moves)
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        torch._foreach_sub_(params, moves)
        self.base.step()
        return loss


MAKERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.3, max_iter=6),
    "lbfgs, line search": lambda params: torch.optim.LBFGS(params, max_iter=8, line_search_fn="strong_wolfe"),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sam": Sam,
}


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def batch(step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    rows = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    return rows[:, :5], rows[:, 5:]


def plain(name: str, world: int, micros: int) -> tuple[Weights, list[float]]:
    """The weights and the losses that the optimizer returned, in one process."""
    model = build()
    optimizer = MAKERS[name](model.parameters())
    losses = []
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            if name != "sam":
                optimizer.zero_grad()
            parts = [batch(step, rank, micro) for rank in range(world) for micro in range(micros)]
            loss = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in parts]).mean()
            loss.backward()
            return loss

        if name == "sam":
            closure()
        losses.append(float(optimizer.step(closure)))
        optimizer.zero_grad()
    return model.state_dict(), losses


def train(name: str, stage: int, micros: int) -> tuple[Weights, list[float], int]:
    model = build()
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micros,
    }
    engine, optimizer, *_ = hf_zero.initialize(model=model, optimizer=MAKERS[name](model.parameters()), config=config)
    losses = []
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            if name != "sam":
                optimizer.zero_grad()
            total = 0.0
            for micro in range(micros):
                x, y = batch(step, dist.get_rank(), micro)
                total += float(engine.backward(nn.functional.mse_loss(engine(x), y)))
            return total

        if name == "sam":
            closure()
        losses.append(float(optimizer.step(closure)))
    return engine.full_state_dict(keep=True), losses, engine.global_steps


@pytest.mark.parametrize(
    ("name", "stage", "world", "micros"),
    [
        ("lbfgs", 0, 2, 1),
        ("lbfgs, line search", 0, 3, 2),
        ("adamw", 0, 2, 1),
        ("sam", 0, 2, 1),
        ("sam", 0, 3, 2),
        ("lbfgs", 3, 1, 1),  # one rank holds all of every parameter
    ],
)
def test_they_follow_one_process(name: str, stage: int, world: int, micros: int) -> None:
    want, losses = plain(name, world, micros)
    before = build().state_dict()
    assert all(float((want[key] - before[key]).abs().max()) > 1e-3 for key in want), "vacuous"
    for got, mine, steps in run_ranks(train, world, name, stage, micros):
        assert steps == STEPS
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(losses), rtol=1e-9, atol=0)
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-9, msg=key)


def with_accelerate(stage: int) -> Weights:
    accelerator = Accelerator(cpu=True)
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 4}
    hf_zero.ZeroPlugin(config).attach(accelerator)
    model = build()
    model, optimizer = accelerator.prepare(model, MAKERS["lbfgs"](model.parameters()))
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank(), 0)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    return dict(accelerator.get_state_dict(model))


def test_under_accelerate() -> None:
    want, _ = plain("lbfgs", 2, 1)
    for got in run_ranks(with_accelerate, 2, 0):
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-9, msg=key)


def refused(stage: int, block: dict[str, Any], call: str) -> str:
    model = build().float()
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 4, **block}
    name = "lbfgs" if call == "engine.step" else "adamw"
    engine, optimizer, *_ = hf_zero.initialize(model=model, optimizer=MAKERS[name](model.parameters()), config=config)
    with pytest.raises(hf_zero.StateError) as raised:
        engine.step() if call == "engine.step" else optimizer.step(lambda: 0.0)
    return str(raised.value)


@pytest.mark.parametrize(
    ("stage", "block", "call", "said"),
    [
        (0, {}, "engine.step", "LBFGS evaluates the loss itself: call step(closure)"),
        (1, {}, "optimizer.step", "or use stage 0"),
        (3, {}, "optimizer.step", "or use stage 0"),
        (0, {"fp16": {"enabled": True}}, "optimizer.step", "cannot be used with fp16"),
    ],
)
def test_what_cannot_be_says_what_to_do(stage: int, block: dict[str, Any], call: str, said: str) -> None:
    for text in run_ranks(refused, 2, stage, block, call):
        assert said in text
