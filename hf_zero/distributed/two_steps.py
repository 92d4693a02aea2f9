"""All-gathers and reduce-scatters in two steps, so that each element crosses from one group of ranks to another once.

[Note: Two steps]
N ranks form groups of g, and rank r owns the r-th of N parts of a tensor. Ranks at the same place l in their groups
own the parts l, g + l, 2g + l, ...: together they own a g-th of the tensor, a row of N / g parts.

    gather          1. across the groups: each rank gets the row of its place
                    2. inside the group: each rank gives its row to the others, and all have all rows
    reduce-scatter  1. inside the group: each rank gets the sums of the group for the row of its place
                    2. across the groups: each rank gets the sum of the groups' sums for its part

So a group sends each part that its ranks own to every other group once, and a gradient leaves a group as a sum. What
comes out is what one step gives, but for the order of additions: inside the group first, then over the groups in
order. A row that is kept after the first step makes the next gather one that stays inside the group; and sums that are
kept after the first step need the second one only when no more will be added.

Where groups replicate (`hybrid_shard`) there are g parts only, one for each rank of a group, and every group has them
all: a gather is its second step, and after the first step of a reduce the ranks across all-reduce their sums.

Where the steps are `quantized`, what crosses is 8-bit blocks, each quantized once: a part before a gather, from which
its owner fills its row too, and a group's sums before they are added up. All else is exact.

Over gloo a group may have ranks on several hosts, and a host ranks of several groups: the exchanges of each step take
two steps themselves then, with the ranks of hosts as groups, and what crosses between hosts is quantized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.backend_calls import COALESCED, start_messages
from hf_zero.distributed.block_quantization import dequantize, quantize, sum_messages
from hf_zero.distributed.rank_groups import RankGroups
from hf_zero.distributed.torch_names import all_gather_single, reduce_scatter_single


# ---------------------------------------------------------------- over gloo, called in a thread of a link
@dataclass(frozen=True)
class MessageSteps:
    """The steps as messages that carry `tag` between the ranks of torch's `group`.

    Args:
        per_host: The ranks of each host; 1 where that is not the same number. See Exchanges.
    """

    groups: RankGroups
    rank: int
    tag: int
    per_host: int
    quantized: bool = False

    def gather(
        self, full: Sequence[torch.Tensor], row: Sequence[torch.Tensor], part: torch.Tensor | None, group: Any
    ) -> None:
        """Fill `row` from the `part` of each rank at this place, where one is given, and `full` from the rows.

        Args:
            full: The parts of all ranks.
            row: The parts of the ranks at this one's place, which may be those of `full`.
        """
        if part is not None:
            self._across(group).gather([(row, part)])
        self._inside(group).gather([*zip(self._by_group(full), row, strict=True)])

    def reduce(
        self, out: torch.Tensor, full: torch.Tensor, received: torch.Tensor, sums: torch.Tensor, group: Any
    ) -> None:
        """Sum `full` over ranks, of which this rank's part goes to `out`.

        Args:
            received: Memory of the size and type of `full`.
            sums: Memory for a row, of `out`'s type. Sums travel in that of `full`.
        """
        self.reduce_inside(sums, full, received, group)
        across = self._across(group)
        if not self.groups.replicates:
            # The memory is free again: its parts have been summed.
            across.reduce([(out, sums.chunk(self.groups.number), received[: sums.numel()])])
            return
        # An all-reduce: each rank across adds a part up, in `out`'s type, and sends it to the others.
        parts, totals = (one.tensor_split(len(self.groups.across)) for one in (sums, out))
        mine = totals[self.groups.across.index(self.rank)]
        across.reduce([(mine, parts, full.new_empty(len(parts) * parts[0].numel()))])
        across.gather([(totals, mine)])

    def reduce_inside(self, row: torch.Tensor, full: torch.Tensor, received: torch.Tensor, group: Any) -> None:
        """Make the first step alone: `row` becomes this group's sums for it."""
        number = self.groups.number
        parts = self._by_group(full.chunk(self.groups.size * number))
        self._inside(group).reduce([*zip(row.chunk(number), parts, received.chunk(number), strict=True)])

    def _inside(self, group: Any) -> Exchanges:
        return Exchanges(self.groups.inside, self.rank, self.tag, self.per_host, group)

    def _across(self, group: Any) -> Exchanges:
        return Exchanges(self.groups.across, self.rank, self.tag, self.per_host, group, self.quantized)

    def _by_group(self, parts: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        return [parts[start : start + self.groups.size] for start in range(0, len(parts), self.groups.size)]


Gather = tuple[Sequence[torch.Tensor], torch.Tensor]  # places by rank, and this rank's part
# The sum, the parts for each rank, and memory for as many parts as there are ranks, each of the largest one's size.
Reduce = tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Exchanges:
    """Gathers and reduce-scatters among `ranks`, several at once.

    Where hosts have several of these ranks each, no host sends a part twice to another one: [Note: Two steps].
    """

    ranks: tuple[int, ...]
    rank: int
    tag: int
    per_host: int
    group: Any
    quantized: bool = False

    def gather(self, gathers: Sequence[Gather]) -> None:
        """Fill the places from the part that each rank gives."""
        if (hosts := RankGroups.of_hosts(self.ranks, self.rank, self.per_host)) is not None:
            place, size = hosts.inside.index(self.rank), hosts.size
            self._across(hosts).gather([(places[place::size], part) for places, part in gathers])
            self._inside(hosts).gather(
                [
                    (places[start : start + size], places[start + place])
                    for places, _ in gathers
                    for start in range(0, len(places), size)
                ]
            )
        elif self.quantized:
            for places, part in gathers:
                messages = self._cross([quantize(part.unsqueeze(0))[0]] * len(places))
                dequantize(messages, places)
        else:
            self._run([(places, [part] * len(places)) for places, part in gathers])

    def reduce(self, reduces: Sequence[Reduce]) -> None:
        """Sum the parts that ranks have for this one, which travel in the type of the memory."""
        if (hosts := RankGroups.of_hosts(self.ranks, self.rank, self.per_host)) is not None:
            self._reduce_by_host(hosts, reduces)
        elif self.quantized:
            for out, parts, _ in reduces:
                sum_messages(out, self._cross([quantize(part.unsqueeze(0))[0] for part in parts]))
        else:
            rows = [memory[: len(parts) * out.numel()].view(len(parts), -1) for out, parts, memory in reduces]
            sent = [[part.to(memory.dtype) for part in parts] for _, parts, memory in reduces]
            self._run([(row.unbind(), one) for row, one in zip(rows, sent, strict=True)])
            for row, (out, _, _) in zip(rows, reduces, strict=True):
                _sum(row, out)

    def _reduce_by_host(self, hosts: RankGroups, reduces: Sequence[Reduce]) -> None:
        place = hosts.inside.index(self.rank)
        inside: list[Reduce] = []
        across: list[Reduce] = []
        for out, parts, memory in reduces:
            sums = [out.new_empty(part.numel()) for part in parts[place :: hosts.size]]
            blocks = [parts[start : start + hosts.size] for start in range(0, len(parts), hosts.size)]
            inside += zip(sums, blocks, memory.chunk(hosts.number), strict=True)
            across.append((out, sums, memory))
        self._inside(hosts).reduce(inside)
        self._across(hosts).reduce(across)

    def _inside(self, hosts: RankGroups) -> Exchanges:
        return replace(self, ranks=hosts.inside, quantized=False)

    def _across(self, hosts: RankGroups) -> Exchanges:
        return replace(self, ranks=hosts.across)

    def _cross(self, messages: Sequence[torch.Tensor]) -> torch.Tensor:
        """Send the i-th message to the i-th rank; return what comes, a row for each."""
        received = messages[0].new_empty(len(messages), len(messages[0]))
        self._run([(received.unbind(), messages)])
        return received

    def _run(self, exchanges: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]) -> None:
        """Exchange (places for what comes, what is sent), by rank, several times at once."""
        mine = self.ranks.index(self.rank)
        works = []
        for places, parts in exchanges:
            works += start_messages(places, parts, mine, self.tag, self.group, self.ranks)
            if places[mine].data_ptr() != parts[mine].data_ptr():
                places[mine].copy_(parts[mine])
        for work in works:
            work.wait()


def _sum(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Add rows up in order, in the type of `out`."""
    if len(rows) == 2 and rows.dtype == out.dtype:
        torch.add(rows[0], rows[1], out=out)
    else:
        torch.sum(rows, 0, dtype=out.dtype, out=out)


# ---------------------------------------------------------------- on a device, as two of its operations
@dataclass(frozen=True)
class DeviceSteps:
    """The steps as collectives of two process groups; the second waits for the first on a stream between them.

    Args:
        beside: That stream.
        inside, across: torch's groups of these ranks.
    """

    groups: RankGroups
    beside: torch.Stream
    inside: Any
    across: Any
    quantized: bool = False

    def gather(self, full: torch.Tensor, row: torch.Tensor, part: torch.Tensor | None, **call: Any) -> StepsWork:
        """Start what MessageSteps.gather does, of tensors as they are."""
        number = self.groups.number
        with self._after_compute():
            if part is not None and self.quantized:
                message = quantize(part.unsqueeze(0))
                received = message.new_empty(number, message.shape[1])
                all_gather_single(received, message, group=self.across, async_op=True).wait()
                dequantize(received, row.chunk(number))
            elif part is not None:
                all_gather_single(row, part, group=self.across, async_op=True).wait()
            places, mine = list(full.chunk(number)), list(row.chunk(number))
            work = COALESCED["all_gather"](places, mine, group=self.inside, async_op=True)
        return StepsWork(work, [full, row, part])

    def reduce(self, out: torch.Tensor, full: torch.Tensor, sums: torch.Tensor, **call: Any) -> StepsWork:
        """Start what MessageSteps.reduce does, in one type."""
        with self._after_compute():
            self.reduce_inside(sums, full).wait()
            if self.groups.replicates:  # then `sums` is `out`
                work = dist.all_reduce(out, group=self.across, async_op=True)
            else:
                work = reduce_scatter_single(out, sums, group=self.across, async_op=True)
        return StepsWork(work, [full, sums])

    def reduce_to_messages(
        self, received: torch.Tensor, full: torch.Tensor, sums: torch.Tensor, sent: torch.Tensor, **call: Any
    ) -> StepsWork:
        """Start what MessageSteps.reduce does, up to the messages of all groups about this rank's part.

        Args:
            received, sent: Memory for as many messages as there are groups.
        """
        with self._after_compute():
            self.reduce_inside(sums, full).wait()
            sent.copy_(quantize(sums.view(self.groups.number, -1)))
            work = dist.all_to_all_single(received, sent, group=self.across, async_op=True)
        return StepsWork(work, [full, sums, sent])

    def reduce_inside(self, row: torch.Tensor, full: torch.Tensor, **call: Any) -> Any:
        """Start the first step alone; returns torch's Work."""
        places, addends = list(row.chunk(self.groups.number)), list(full.chunk(self.groups.number))
        return COALESCED["reduce_scatter"](places, addends, group=self.inside, async_op=True)

    @contextlib.contextmanager
    def _after_compute(self) -> Iterator[None]:
        self.beside.wait_stream(torch.accelerator.current_stream(self.beside.device))
        with self.beside:
            yield


class StepsWork:
    """torch's Work of the second step, which keeps what the first one reads and writes until somebody has waited."""

    def __init__(self, work: Any, tensors: Sequence[torch.Tensor | None]) -> None:
        self._work = work
        self._tensors = tensors

    def wait(self) -> None:
        self._work.wait()
        self._tensors = ()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
