"""The one-process reference: it agrees with DistributedDataParallel, and its comparison would notice a mistake."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.harness.compare import assert_not_vacuous, assert_same_exact, assert_same_single
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case, Trace, snapshot, train_reference

# Reentrant checkpointing and modules called twice are beyond DDP with find_unused_parameters.
DDP_MODELS = ("plain", "tied", "unused", "unused_somewhere", "frozen", "unequal", "non_reentrant", "convnet")


def _train_ddp(cases: list[Case]) -> list[Trace]:
    return [_train_one(case) for case in cases]


def _train_one(case: Case) -> Trace:
    model = case.build()
    # A parameter that is unused on all ranks keeps no gradient, as in one process.
    ddp = DistributedDataParallel(model, find_unused_parameters=case.model.startswith("unused"))
    optimizer = case.make_optimizer(model)
    trace = Trace(params=[snapshot(model)])
    for step in range(case.steps):
        total = torch.zeros(1, dtype=torch.float64)
        for micro in range(case.accumulation):
            last = micro == case.accumulation - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = ddp(**case.batch(step, micro, dist.get_rank()))["loss"] / case.accumulation
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        trace.losses.append(total.item() / case.world)
        trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        trace.params.append(snapshot(model))
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3))])
def test_reference_is_what_ddp_does(world: int) -> None:
    cases = [
        Case(model, world, accumulation, optimizer)
        for model in DDP_MODELS
        for accumulation, optimizer in ((1, "adamw"), (4, "sgd"))
    ]
    for case, trace in zip(cases, run_ranks(_train_ddp, world, cases)[0], strict=True):
        assert_not_vacuous(case, train_reference(case))
        assert_same_exact(case, train_reference(case), trace, str(case))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", ["plain", "tied", "unequal", "convnet", "llama"])
def test_the_bound_of_fp32_holds_and_is_no_excuse(model: str, optimizer: str) -> None:
    case = Case(model, 2, 4, optimizer, single=True)
    want = train_reference(case)
    assert_same_single(case, want, train_reference(case, torch.float32), "fp32")
    # A mean over 3 of the 4 micro-steps, and a learning rate that is off by a thousandth.
    for wrong in (dataclasses.replace(case, accumulation=3), dataclasses.replace(case, lr_scale=1.001)):
        with pytest.raises(AssertionError):
            assert_same_single(case, want, train_reference(wrong, torch.float32), "wrong")
