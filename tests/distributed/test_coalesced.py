"""All-gathers at once: ranks of one host read each other's memory, and where they cannot, messages give the same."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed.backend_calls import COALESCED
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.peer_memory import PeerMemory, ProcessIdentity
from tests.harness.ranks import run_ranks

# Elements of a part and type of every gather: none, one, odd, and more than a page
PARTS = ((0, torch.float32), (1, torch.bfloat16), (257, torch.float64), (100_003, torch.float32), (9, torch.int8))


class Messages:
    """Counts the parts that ranks send to each other; their addresses are int64, and objects are uint8."""

    def __init__(self) -> None:
        self.count = 0
        self._send = dist.isend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += args[0].dtype not in (torch.int64, torch.uint8)
        return self._send(*args, **kwargs)


def part_of(rank: int, number: int, turn: int) -> torch.Tensor:
    numel, dtype = PARTS[number]
    return torch.arange(numel).add(rank * 7 + number + 31 * turn).remainder(100).to(dtype)


def gather_and_check(comm: Comm) -> int:
    """Return how many messages two turns of all gathers took."""
    world_size = comm.world_size
    gathers = []
    for number, (numel, dtype) in enumerate(PARTS):
        full = torch.empty(world_size * numel, dtype=dtype)
        # Every second part lies in its place, as that of parameters which stay whole does.
        inside = full.chunk(world_size)[comm.rank] if numel and number % 2 else torch.empty(numel, dtype=dtype)
        gathers.append((full, inside))
    with mock.patch.object(dist, "isend", Messages()) as messages:
        for turn in range(2):
            for number, (full, part) in enumerate(gathers):
                full.fill_(99)
                part.copy_(part_of(comm.rank, number, turn))
            with comm.coalesced("parts"):
                pending = [comm.all_gather(full, part, "a part") for full, part in gathers]
            for one in pending:
                one.wait()
            # Free to change now, while another rank may not have left the block
            mine = [full.clone() for full, _ in gathers]
            for _, part in gathers:
                part.fill_(-1)
            for number, full in enumerate(mine):
                expected = torch.cat([part_of(rank, number, turn) for rank in range(world_size)])
                assert torch.equal(full, expected), f"gather {number}, turn {turn}"
    assert comm.counts["all_gather"].calls == 2 * len(PARTS)
    return messages.count


def gather_in_memory() -> int:
    return gather_and_check(Comm.join())


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_are_read_from_memory(world_size: int) -> None:
    assert run_ranks(gather_in_memory, world_size) == [0] * world_size


def gather_with(change: str) -> int:
    """Gather like `gather_in_memory`, where rank 1 cannot be read, or says so of the others."""
    card_of = PeerMemory.identity

    def identity(peers: PeerMemory) -> ProcessIdentity | None:
        mine = card_of(peers)
        assert mine is not None
        wrong = {
            "no such call": lambda: None,
            "another host": lambda: ProcessIdentity("elsewhere", mine.pid, mine.address, mine.token),
            "another process": lambda: ProcessIdentity(mine.host, mine.pid, mine.address, b"0" * len(mine.token)),
            "memory that is not there": lambda: ProcessIdentity(mine.host, mine.pid, 8, mine.token),
            "a process that has ended": lambda: ProcessIdentity(mine.host, 2**22 + 1, mine.address, mine.token),
        }
        return wrong[change]()

    if dist.get_rank() != 1:
        return gather_and_check(Comm.join())
    with mock.patch.object(PeerMemory, "identity", identity):
        return gather_and_check(Comm.join())


@pytest.mark.parametrize(
    "change",
    ["no such call", "another host", "another process", "memory that is not there", "a process that has ended"],
)
def test_a_rank_that_cannot_be_read_has_all_send_messages(change: str) -> None:
    sent = sum(numel > 0 for numel, _ in PARTS)
    assert run_ranks(gather_with, 2, change) == [2 * sent] * 2


def die_before_it_was_read() -> None:
    comm = Comm.join(timeout_s=30)
    fill = PeerMemory.fill

    def die_or_wait(*args: Any) -> None:
        if comm.rank == 1:
            os._exit(9)
        time.sleep(1)
        fill(*args)

    gather_and_check(comm)
    with mock.patch.object(PeerMemory, "fill", die_or_wait):
        gather_and_check(comm)


def test_a_rank_that_dies_before_it_was_read_is_said() -> None:
    start = time.monotonic()
    failures = run_ranks(die_before_it_was_read, 2, timeout=40, expect_error=True)
    assert failures[0].kind == "DivergenceError", failures[0].traceback
    assert "all-gather of parts did not complete" in failures[0].message
    assert "cannot be read" in failures[0].message
    assert failures[1].kind == "Died"
    assert time.monotonic() - start < 15


def call_torch() -> list[list[torch.Tensor]]:
    """Make the calls of a device's block, on torch's own group: gloo has the calls too."""
    rank, results = dist.get_rank(), []
    for number in (1, 2):
        parts = [torch.full((3,), rank + 1.0), torch.full((2,), rank + 5, dtype=torch.int64)][:number]
        wholes = [torch.arange(4.0) + rank, torch.arange(2.0).double() - rank][:number]
        places = [part.new_zeros(2 * part.numel()) for part in parts]
        sums = [whole.new_zeros(whole.numel() // 2) for whole in wholes]
        totals = [torch.full((2,), rank + 1.0), torch.full((1,), rank + 2.0)][:number]
        for kind, outputs, inputs in (
            ("all_gather", places, parts),
            ("reduce_scatter", sums, wholes),
            ("all_reduce", totals, totals),
        ):
            COALESCED[kind](outputs, inputs, group=dist.group.WORLD, async_op=True).wait()
        results.append([*places, *sums, *totals])
    return results


def test_torch_takes_the_coalesced_calls() -> None:
    for rank, (alone, together) in enumerate(run_ranks(call_torch, 2)):
        gathered, scattered, reduced = alone
        assert (gathered.tolist(), reduced.tolist()) == ([1, 1, 1, 2, 2, 2], [3, 3])
        assert scattered.tolist() == ([1, 3] if rank == 0 else [5, 7])
        assert [one.tolist() for one in together] == [
            *(gathered.tolist(), [5, 5, 6, 6], scattered.tolist()),
            *([-1] if rank == 0 else [1], reduced.tolist(), [5]),
        ]


def leave_the_block() -> list[int]:
    """An error inside leaves nothing behind: the next gathers are whole."""
    comm = Comm.join()
    with pytest.raises(KeyError), comm.coalesced("parts"):
        raise KeyError("of every rank")
    return [gather_and_check(comm)]


def test_an_error_inside_the_block() -> None:
    assert run_ranks(leave_the_block, 2) == [[0]] * 2
