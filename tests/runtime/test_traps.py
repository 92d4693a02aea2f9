"""Training loops and models that trip up sharded training, each compared with plain PyTorch in one process.

Every rank runs a trap (tests.harness.traps) on data of its own, one process runs it on all of them. Misuse that must
raise is in test_traps_misuse.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks
from tests.harness.traps import TRAPS, WIDTH

STEPS, WORLD, EVERYTHING = 3, 2, 10**9

Params = dict[str, torch.Tensor]


def build(name: str) -> nn.Module:
    torch.manual_seed(5)
    return TRAPS[name][0]().double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_plain(name: str) -> Params:
    model = build(name)
    optimizer = optimizer_for(model)
    for step in range(STEPS):
        for rank in range(WORLD):
            with _last_gradients_only(model):
                TRAPS[name][1](model, batch(step, rank))
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= WORLD
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in model.named_parameters()}


@contextlib.contextmanager
def _last_gradients_only(model: nn.Module) -> Iterator[None]:
    """A step may call zero_grad: what the ranks before this one contributed is put aside meanwhile."""
    before = {param: param.grad for param in model.parameters() if param.grad is not None}
    for param in before:
        param.grad = None
    yield
    for param, grad in before.items():
        param.grad = grad if param.grad is None else grad + param.grad.detach()


def train_sharded(name: str, runs: list[tuple[int, int]]) -> list[Params]:
    return [_train_one(name, stage, prefetch) for stage, prefetch in runs]


def _train_one(name: str, stage: int, prefetch: int) -> Params:
    model = build(name)
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": prefetch,
    }
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "desync_timeout": 15}
    engine = hf_zero.initialize(model=model, optimizer=optimizer_for(model), config=config)[0]
    for step in range(STEPS):
        TRAPS[name][1](engine, batch(step, dist.get_rank()))
        engine.step()
    return engine.full_state_dict(keep=True)


@pytest.mark.filterwarnings("ignore:Using backward")  # create_graph=True makes a reference cycle, torch says
@pytest.mark.parametrize(
    "name",
    # Every second one is enough for a quick look: neighbours in the table are alike.
    [pytest.param(name, marks=[pytest.mark.slow] if place % 2 else []) for place, name in enumerate(TRAPS)],
)
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([(1, EVERYTHING), (3, EVERYTHING), (3, 0)], id="1, 3"),
        pytest.param([(0, EVERYTHING), (2, EVERYTHING)], id="0, 2", marks=pytest.mark.nightly),
    ],
)
def test_trap(name: str, runs: list[tuple[int, int]]) -> None:
    want = train_plain(name)
    start = dict(build(name).named_parameters())
    assert any(not torch.equal(start[key], value) for key, value in want.items())
    for run, got in zip(runs, run_ranks(train_sharded, WORLD, name, runs)[0], strict=True):
        for key, value in want.items():
            torch.testing.assert_close(
                got[key], value, rtol=0, atol=1e-12, msg=f"stage {run[0]}, prefetch {run[1]}: {key}"
            )
