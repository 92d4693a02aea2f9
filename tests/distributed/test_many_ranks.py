"""Small control messages of many ranks: every rank gets what every rank gives, in few messages."""

from __future__ import annotations

import math
import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from tests.harness.ranks import RankFailure, run_ranks


def gathered() -> tuple[list[list[float]], list[Any], torch.Tensor, int]:
    """Return numbers, objects and votes of all ranks, and how many messages this rank has sent for the numbers."""
    sent, original = 0, dist.isend

    def isend(*args: Any, **call: Any) -> Any:
        nonlocal sent
        sent += 1
        return original(*args, **call)

    with unittest.mock.patch("hf_zero.distributed.comm._FEW_RANKS", 1):
        comm = Comm.join(timeout_s=20)
        with unittest.mock.patch.object(dist, "isend", isend):
            numbers = comm.all_gather_numbers([float(comm.rank), 0.5], "numbers")
        objects = comm.all_gather_object("x" * (300 * comm.rank), "objects")
        votes = comm.vote(torch.tensor([comm.rank + 1.0], dtype=torch.float64), "votes")
        return numbers, objects, votes, sent


@pytest.mark.parametrize("world", [2, 3, 5, pytest.param(7, marks=pytest.mark.slow)])
def test_every_rank_gets_what_every_rank_gives(world: int) -> None:
    for numbers, objects, votes, sent in run_ranks(gathered, world):
        assert numbers == [[rank, 0.5] for rank in range(world)]
        assert objects == ["x" * (300 * rank) for rank in range(world)]
        assert votes.tolist() == [[rank + 1.0] for rank in range(world)]
        assert sent == math.ceil(math.log2(world))


def gather_after_another_call() -> None:
    with unittest.mock.patch("hf_zero.distributed.comm._FEW_RANKS", 1):
        comm = Comm.join(timeout_s=20)
        if comm.rank == 3:
            comm.note_call("a call of one rank alone")
        comm.all_gather_numbers([1.0], "numbers")


def test_ranks_that_have_made_other_calls_do_not_meet() -> None:
    failures = run_ranks(gather_after_another_call, 5, expect_error=True, timeouts={"stalled": 0.2})
    for failure in failures:
        assert isinstance(failure, RankFailure)
        assert failure.kind == StateError.__name__
        assert "a call of one rank alone" in failure.message
