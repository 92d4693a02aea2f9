"""Ranks with different numbers of batches: torch's Join over an engine, and accelerate's join_uneven_inputs."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import hf_zero
from hf_zero.errors import DivergenceError
from tests.distributed.test_operation_order import WIDTH, Block
from tests.harness.ranks import RankFailure, run_ranks

BATCHES = (7, 5, 4)
Weights = dict[str, torch.Tensor]


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.blocks(x)).square().mean()
        return loss


def build() -> Net:
    torch.manual_seed(1)
    return Net().double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def data(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, WIDTH, dtype=torch.float64, generator=generator) for _ in range(BATCHES[rank])]


def one_process(world: int, accumulation: int, initial: bool, clip: float) -> Weights:
    """Micro-batch by micro-batch, those of the ranks that still have data."""
    model = build()
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    for number, batches in enumerate(itertools.zip_longest(*map(data, range(world)))):
        there = [batch for batch in batches if batch is not None]
        for batch in there:
            (model(batch) / (world if initial else len(there)) / accumulation).backward()
        if (number + 1) % accumulation == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert not torch.equal(model.head.weight, build().head.weight)
    return {name: value.detach() for name, value in model.named_parameters()}


def start(stage: int, accumulation: int = 1, clip: float = 0.0, **more: Any) -> tuple[Any, Any]:
    model = build()
    optimizer = optimizer_of(model)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "desync_timeout": 20,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more},
    }
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    return engine, schedule_of(engine.optimizer.optimizer)


def join(stage: int, accumulation: int, initial: bool, clip: float) -> tuple[Weights, int]:
    engine, schedule = start(stage, accumulation, clip)
    steps = 0
    with Join([engine], divide_by_initial_world_size=initial):
        for batch in data(engine.rank):
            with torch.no_grad():
                engine(batch)
            engine.backward(engine(batch))
            engine.step()
            if engine.schedule.step_applied:
                schedule.step()
            steps += 1
    assert engine.global_steps == BATCHES[0] // accumulation
    engine.eval()
    with torch.no_grad():  # everything is as before: all ranks, and nobody else is told
        engine(data(0)[0])
    weights = engine.full_state_dict(keep=True)
    assert weights is not None
    return weights, steps


def plain_loop(stage: int) -> Weights:
    """A loop that knows of torch only: the model itself is joined, and its optimizer steps."""
    engine, schedule = start(stage)
    model, optimizer = engine.module, engine.optimizer
    with Join([model]):
        for batch in data(engine.rank):
            model(batch).backward()
            optimizer.clip_grad_norm(0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    weights: Weights | None = engine.full_state_dict(keep=True)
    assert weights is not None
    return weights


def assert_same(got: Weights, want: Weights) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-9, msg=name)


CASES = [
    (2, 3, 1, True, 0.0),
    (2, 2, 1, True, 0.1),
    (2, 0, 1, True, 0.0),
    (3, 1, 2, True, 0.0),
    (3, 3, 1, False, 0.1),
    (3, 2, 1, False, 0.0),
    (3, 3, 2, True, 0.0),
]


@pytest.mark.parametrize(("world", "stage", "accumulation", "initial", "clip"), CASES)
def test_join(world: int, stage: int, accumulation: int, initial: bool, clip: float) -> None:
    want = one_process(world, accumulation, initial, clip)
    for rank, (weights, steps) in enumerate(run_ranks(join, world, stage, accumulation, initial, clip)):
        assert steps == BATCHES[rank]
        assert_same(weights, want)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_of_torch(stage: int) -> None:
    want = one_process(2, 1, True, 0.1)
    for weights in run_ranks(plain_loop, 2, stage):
        assert_same(weights, want)


def one_block_after_another() -> Weights:
    """One is not enabled, one is left by an exception of all ranks, and the next has uneven data."""
    engine, schedule = start(3)
    batches = data(engine.rank)
    with torch.no_grad():
        with Join([engine], enable=False):
            engine(batches[0])
        with contextlib.suppress(ZeroDivisionError), Join([engine]):
            engine(batches[0])
            raise ZeroDivisionError
    with Join([engine]):
        for batch in batches:
            engine.backward(engine(batch))
            engine.step()
            schedule.step()
    assert engine.comm.join_block is None and "join_process_group" not in vars(engine.module)
    weights: Weights | None = engine.full_state_dict(keep=True)
    assert weights is not None
    return weights


def test_one_block_after_another() -> None:
    want = one_process(2, 1, True, 0.0)
    for weights in run_ranks(one_block_after_another, 2):
        assert_same(weights, want)


def other_calls() -> None:
    engine, _ = start(2)
    with Join([engine]):
        for number, batch in enumerate(data(engine.rank)):
            if engine.rank == 2 and number == 1:
                with torch.no_grad():
                    engine(batch)
            engine.backward(engine(batch))
            engine.step()


def test_ranks_with_data_make_the_same_calls() -> None:
    for failure in run_ranks(other_calls, 3, expect_error=True):
        assert isinstance(failure, RankFailure) and isinstance(failure.exception, DivergenceError)
        assert "rank 1: forward (0); rank 2: evaluation (0)" in failure.message


def stop_at_the_first(stage: int) -> tuple[int, Weights]:
    engine, schedule = start(stage)
    steps = 0
    with pytest.raises(RuntimeError, match="exhausted"), Join([engine], throw_on_early_termination=True):
        for batch in data(engine.rank):
            engine.backward(engine(batch))
            engine.step()
            schedule.step()
            steps += 1
    engine.backward(engine(data(engine.rank)[0]))  # all ranks go on, with what they like
    engine.step()
    weights: Weights | None = engine.full_state_dict(keep=True)
    assert weights is not None
    return steps, weights


@pytest.mark.parametrize("stage", [1, 3])
def test_all_stop_where_the_first_has_no_data(stage: int) -> None:
    ranks = run_ranks(stop_at_the_first, 2, stage)
    assert [steps for steps, _ in ranks] == [min(BATCHES[:2])] * 2
    assert_same(ranks[0][1], ranks[1][1])
