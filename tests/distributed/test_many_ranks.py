"""Small control messages of many ranks: every rank gets what every rank gives, in few messages."""

from __future__ import annotations

import contextlib
import math
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from tests.harness.ranks import RankFailure, run_ranks


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Collect the bytes of each message that this rank sends inside."""
    sizes: list[int] = []

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def send(tensor: torch.Tensor, **call: Any) -> Any:
            sizes.append(tensor.nbytes)
            return original(tensor, **call)

        return send

    with (
        unittest.mock.patch.object(dist, "isend", counting(dist.isend)),
        unittest.mock.patch.object(dist, "send", counting(dist.send)),
    ):
        yield sizes


def gathered() -> tuple[list[list[float]], list[Any], list[int]]:
    """Return numbers and objects of all ranks, and the messages that this rank has sent for the numbers."""
    with unittest.mock.patch("hf_zero.distributed.comm._FEW_RANKS", 1):
        comm = Comm.join(timeout_s=20)
        with counted() as sent, torch.inference_mode():
            numbers = comm.all_gather_numbers([float(comm.rank), 0.5], "numbers")
        return numbers, comm.all_gather_object("x" * (300 * comm.rank), "objects"), sent


@pytest.mark.parametrize("world", [2, 3, 5, pytest.param(7, marks=pytest.mark.slow)])
def test_every_rank_gets_what_every_rank_gives(world: int) -> None:
    for numbers, objects, sent in run_ranks(gathered, world):
        assert numbers == [[rank, 0.5] for rank in range(world)]
        assert objects == ["x" * (300 * rank) for rank in range(world)]
        assert len(sent) == math.ceil(math.log2(world))


def combined() -> tuple[list[float], list[float], list[int]]:
    """Return a vote, the largest numbers, and the messages that this rank has sent for the vote."""
    comm = Comm.join(timeout_s=20)
    values = torch.tensor([2.0**50, 0.1 * comm.rank, comm.rank, -comm.rank], dtype=torch.float64)
    with counted() as sent:
        vote = comm.vote(values, "votes", largest=2)
    with torch.inference_mode():
        return vote.tolist(), comm.largest([float(-comm.rank), math.inf], "numbers"), sent


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, pytest.param(7, marks=pytest.mark.slow)])
def test_votes_are_combined_in_few_messages_of_one_size(world: int) -> None:
    ranks = run_ranks(combined, world)
    assert len({tuple(vote) for vote, _, _ in ranks}) == 1  # to the bit
    for vote, largest, sent in ranks:
        assert vote == [world * 2.0**50, pytest.approx(0.1 * sum(range(world))), world - 1, 0]
        assert largest == [0, math.inf]
        assert len(sent) <= math.ceil(math.log2(world)) and set(sent) <= {4 * 8}


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
