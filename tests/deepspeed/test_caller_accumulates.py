"""The caller drives backward: windows of its own, scaled losses, gradients reduced before the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, StateError
from tests.harness.models import Net
from tests.harness.ranks import run_ranks

WINDOWS = (1, 3, 2)
ACCUMULATION = 2
Weights = dict[str, torch.Tensor]


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (3,), generator=torch.Generator().manual_seed(10 * number + rank))


def start(stage: int, model: nn.Module | None = None, **keys: Any) -> Any:
    model = model or build()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **keys,
    }
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.01)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def reference(windows: tuple[int, ...], clip: float = float("inf")) -> Weights:
    """Train one process with torch alone: gradients are means over ranks, divided by the accumulation steps."""
    model, numbers = build(), itertools.count()
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.01)
    for size in windows:
        for number in itertools.islice(numbers, size):
            loss = sum(model(batch(number, rank)) for rank in range(2)) / 2
            (loss / ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def close(found: Weights, want: Weights) -> None:
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


BACKWARDS: tuple[Callable[[Any, torch.Tensor], Any], ...] = (
    lambda engine, loss: engine.backward(loss),
    lambda engine, loss: loss.backward(),
    lambda engine, loss: engine.scale(loss).backward(),
)


def own_windows(stage: int) -> Weights:
    engine = start(stage, managed_gradient_accumulation=False)
    assert engine.config["managed_gradient_accumulation"] is False and not engine.optimizer.needs_scaler()
    number = 0
    for steps, size in enumerate(WINDOWS):
        for _ in range(size):
            assert not engine.is_gradient_accumulation_boundary()
            BACKWARDS[number % 3](engine, engine(batch(number, engine.rank)))
            number += 1
        assert engine.global_steps == steps
        engine.step()
        assert engine.was_step_applied()
    with pytest.raises(StateError, match=r"every engine.step\(\) updates"):
        engine.set_gradient_accumulation_boundary(True)
    return engine.full_state_dict(keep=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_step_of_the_caller_updates(stage: int) -> None:
    for found in run_ranks(own_windows, 2, stage):
        close(found, reference(WINDOWS))


def one_reduce(stage: int) -> tuple[Weights, list[int]]:
    engine = start(stage, gradient_accumulation_steps=1, managed_gradient_accumulation=True)
    number, reduces = 0, []
    for size in WINDOWS:
        before = engine.reducer.accumulators[0].num_reduces
        with engine.coalesce_grad_reduction():
            for _ in range(size):
                engine.backward(engine(batch(number, engine.rank)) / ACCUMULATION)
                number += 1
        reduces.append(engine.reducer.accumulators[0].num_reduces - before)
        engine.step()
        assert engine.reducer.accumulators[0].num_reduces == before + reduces[-1]
    return engine.full_state_dict(keep=True), reduces


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_of_several_backwards_are_reduced_together(stage: int) -> None:
    for found, reduces in run_ranks(one_reduce, 2, stage):
        close(found, reference(WINDOWS))
        assert reduces == ([1, 1, 1] if stage < 2 else list(WINDOWS))


def reduced_early(stage: int) -> Weights:
    """Reduce by hand before the step, twice in a window, and clip what `.grad` then holds at stage 0."""
    engine = start(stage, managed_gradient_accumulation=False)
    number = 0
    for size in WINDOWS:
        for _ in range(size):
            engine.backward(engine(batch(number, engine.rank)))
            engine.allreduce_gradients()
            number += 1
        if stage == 0:
            nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05)
        else:
            engine.clip_grad_norm_(0.05)
        engine.step()
    return engine.full_state_dict(keep=True)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_are_reduced_before_the_step(stage: int) -> None:
    for found in run_ranks(reduced_early, 2, stage):
        close(found, reference(WINDOWS, clip=0.05))


def scaled(stage: int) -> tuple[Weights, Weights]:
    """Two losses are scaled before either backward, then their sum: in fp16, with the scale of 2 ** 10."""
    fp16 = {"enabled": True, "initial_scale_power": 10}
    engine = start(stage, build().float(), fp16=fp16, gradient_accumulation_steps=1)
    assert engine.optimizer.needs_scaler() and engine.optimizer.cur_scale == 1024
    assert engine.optimizer.loss_scaler.cur_scale == 1024 and engine.optimizer.loss_scaler.dynamic
    plain = build().float()
    for together in (False, True):
        losses = [engine(batch(number, engine.rank)) for number in range(2)]
        multiplied = [engine.scale(loss) for loss in losses]
        torch.testing.assert_close(multiplied[0], losses[0].float() * 1024)
        for one in [sum(multiplied)] if together else multiplied:
            one.backward()
        grad = hf_zero.full_grad(engine.module.inner.weight)
        assert grad is not None
        sum(plain(batch(number, rank)) / 2 for number in range(2) for rank in range(2)).backward()
        assert plain.inner.weight.grad is not None
        torch.testing.assert_close(grad.float(), plain.inner.weight.grad, rtol=2e-2, atol=1e-3)
        engine.zero_grad(), plain.zero_grad()
    # A loss that did not meet the model leaves nothing behind, and a direct backward is scaled where it enters.
    engine.scale(torch.ones((), requires_grad=True)).backward()
    engine(batch(0, engine.rank)).backward()
    found = hf_zero.full_grad(engine.module.inner.weight)
    (sum(plain(batch(0, rank)) for rank in range(2)) / 2).backward()
    return {"grad": found}, {"grad": plain.inner.weight.grad}


@pytest.mark.parametrize("stage", [0, 3])
def test_losses_that_the_caller_scales(stage: int) -> None:
    for found, want in run_ranks(scaled, 2, stage):
        torch.testing.assert_close(found["grad"].float(), want["grad"], rtol=2e-2, atol=1e-3)


def staged() -> None:
    model = hf_zero.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}, "managed_gradient_accumulation": False}
    with pytest.raises(ConfigError, match="train_batch accumulates by itself"):
        hf_zero.initialize(model=model, config={**config, "optimizer": {"type": "Adam"}})


def test_a_pipeline_accumulates_by_itself() -> None:
    run_ranks(staged, 2)
