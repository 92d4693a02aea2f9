"""A rank fails on a device whose collectives never say so: every other rank raises soon, and updates nothing.

The group is NCCL-like: `wait` returns at once and never raises, and what an aborted collective was to fill is garbage.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import pytest
import torch

from hf_zero.errors import OffloadError, ZeroError
from tests.harness.ranks import run_ranks
from tests.lag import device, group, matrix_runs

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

SOON_S = 15.0  # as long as over gloo: see tests/distributed/test_lost_ranks.py
FAILURES = {"dies": "DivergenceError", "raises": "DivergenceError", "disk is full": "OffloadError"}
PLACES = ("forward", "backward", "step")
STAGES = (0, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def _start(stage: int, schedule: str) -> matrix_runs.Training:
    device.enable()
    group.register()
    device.set_schedule(schedule)
    training = matrix_runs.Training(matrix_runs.start(matrix_runs.llama(), matrix_runs.zero_of(stage, "none", "")))
    training.step(0)
    return training


def _masters(engine: Any) -> list[torch.Tensor]:
    """Return what this rank holds of them, on the host."""
    return [flat.best.in_memory.memory.cpu().clone() for unit in engine.units for flat in unit.flats]


def _fail(engine: Any, failure: str) -> None:
    if engine.rank != 1:
        return
    if failure == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if failure == "raises":
        raise ValueError("a mistake in the script of rank 1")
    with engine.comm.stop_together():
        raise OffloadError("no space left")


def one_rank_fails(failure: str, place: str, stage: int, schedule: str) -> None:
    training = _start(stage, schedule)
    engine = training.engine
    layer = engine.module.model.layers[1]
    before = _masters(engine)

    def in_backward(_: Any, __: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda _: _fail(engine, failure))

    if place == "forward":
        layer.register_forward_pre_hook(lambda *_: _fail(engine, failure))
    elif place == "backward":
        layer.mlp.register_forward_hook(in_backward)
    else:
        step = engine.step
        engine.step = lambda: (_fail(engine, failure), step())
    began = time.monotonic()
    try:
        training.step(1)
    except ZeroError:
        assert time.monotonic() - began < SOON_S
        torch.accelerator.synchronize()
        for was, is_now in zip(before, _masters(engine), strict=True):
            assert torch.equal(was, is_now), "an update from a pass that was broken off"
        raise


CASES = [
    (failure, place, STAGES[(number + more) % 3], schedule)
    for number, (failure, place) in enumerate(itertools.product(FAILURES, PLACES))
    for more, schedule in enumerate(("late", "early"))
]


@pytest.mark.parametrize(("failure", "place", "stage", "schedule"), CASES)
def test_one_rank_fails(failure: str, place: str, stage: int, schedule: str) -> None:
    failures = run_ranks(
        one_rank_fails, 2, failure, place, stage, schedule, expect_error=True, init_group=False, timeout=60
    )
    assert failures[1].kind == {"dies": "Died", "raises": "ValueError", "disk is full": "OffloadError"}[failure]
    assert failures[0].kind == FAILURES[failure], failures[0].traceback
    said = {
        "dies": "did not complete: rank(s) [1] have ended",
        "raises": "rank 1 of 2 ended by ValueError: a mistake in the script of rank 1",
        "disk is full": "rank 1: no space left",
    }
    assert said[failure] in failures[0].message


def memory_ends_in_a_collective(call: str) -> None:
    """Rank 1 runs out of memory where NCCL allocates, which it does when it connects."""
    training = _start(2, "late")
    link = training.engine.comm._processes.link

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if training.engine.comm.rank == 1:
        setattr(link.group, call, full)
    training.step(1)


def test_memory_that_ends_in_a_collective_is_said_to_have_ended() -> None:
    """auto_find_batch_size tries again after this kind of error only."""
    told, full = run_ranks(
        memory_ends_in_a_collective, 2, "reduce_scatter_single", expect_error=True, init_group=False, timeout=60
    )
    assert full.kind == "OutOfMemoryError", full.traceback
    assert full.message.startswith("CUDA out of memory.")
    assert told.kind == "DivergenceError", told.traceback
    assert "rank 1 of 2 ended by OutOfMemoryError: CUDA out of memory." in told.message


NCCL_SAID = """NCCL error in: /pytorch/ProcessGroupNCCL.cpp:4013, invalid usage (run with NCCL_DEBUG=WARN)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000
Exception raised from create at /pytorch/NCCLUtils.cpp:94 (most recent call first):
frame #0: c10::Error::Error"""


def backend_refuses() -> None:
    training = _start(2, "late")

    def refuse(*_: Any) -> None:
        raise torch.distributed.DistBackendError(NCCL_SAID)

    training.engine.comm._processes.link.group.reduce_scatter_single = refuse
    training.step(1)


def test_reason_that_a_backend_gives_in_its_last_lines_is_shown() -> None:
    failures = run_ranks(backend_refuses, 2, expect_error=True, init_group=False, timeout=60)
    for failure in failures:
        assert failure.kind == "DivergenceError", failure.traceback
        assert "NCCL error in" in failure.message and "Duplicate GPU detected" in failure.message
        assert "frame #0" not in failure.message
