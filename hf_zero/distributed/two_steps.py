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
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    """The steps as messages that carry `tag` between the ranks of torch's `group`."""

    groups: RankGroups
    rank: int
    tag: int
    quantized: bool = False

    def gather(
        self, full: Sequence[torch.Tensor], row: Sequence[torch.Tensor], part: torch.Tensor | None, group: Any
    ) -> None:
        """Fill `row` from the `part` of each rank at this place, where one is given, and `full` from the rows.

        Args:
            full: The parts of all ranks.
            row: The parts of the ranks at this one's place, which may be those of `full`.
        """
        if part is not None and self.quantized:
            messages = quantize(part.unsqueeze(0)).expand(self.groups.number, -1)
            for piece, values in dequantize(self._cross(messages, group), part.numel()):
                for place, one in zip(row, values, strict=True):
                    place[piece] = one
        elif part is not None:
            self._run([(row, [part] * self.groups.number)], self.groups.across, group)
        mine = [[one] * self.groups.size for one in row]
        self._run(zip(self._by_group(full), mine, strict=True), self.groups.inside, group)

    def reduce(
        self, out: torch.Tensor, full: torch.Tensor, received: torch.Tensor, sums: torch.Tensor, group: Any
    ) -> None:
        """Sum `full` over ranks, of which this rank's part goes to `out`.

        Args:
            received: Memory of the size and type of `full`.
            sums: Memory for a row, of `out`'s type. Sums travel in that of `full`.
        """
        self.reduce_inside(sums, full, received, group)
        if self.groups.replicates:
            self._all_reduce_across(out, sums.to(full.dtype), group)
            return
        number = self.groups.number
        if self.quantized:
            sum_messages(out, self._cross(quantize(sums.view(number, -1)), group))
            return
        by_group = received[: sums.numel()].view(number, -1)  # what was received has been summed
        sent = sums.to(full.dtype).view(number, -1)
        self._run([(by_group.unbind(), sent.unbind())], self.groups.across, group)
        _sum(by_group, out)

    def reduce_inside(self, row: torch.Tensor, full: torch.Tensor, received: torch.Tensor, group: Any) -> None:
        """Make the first step alone: `row` becomes this group's sums for it."""
        size, number = self.groups.size, self.groups.number
        places = [list(one) for one in received.view(size, number, -1).unbind(1)]
        self._run(zip(places, self._by_group(full.chunk(size * number)), strict=True), self.groups.inside, group)
        _sum(received.view(size, -1), row)

    def _all_reduce_across(self, out: torch.Tensor, sums: torch.Tensor, group: Any) -> None:
        """Sum `sums` over the ranks across: each adds a part up, in `out`'s type, and sends it to the others."""
        ranks = self.groups.across
        mine = ranks.index(self.rank)
        parts, totals = sums.tensor_split(len(ranks)), out.tensor_split(len(ranks))
        places = sums.new_empty(len(ranks), parts[mine].numel())
        self._run([(places.unbind(), parts)], ranks, group)
        _sum(places, totals[mine])
        self._run([(totals, [totals[mine]] * len(ranks))], ranks, group)

    def _cross(self, messages: torch.Tensor, group: Any) -> torch.Tensor:
        """Send the i-th message to the i-th rank across; return what comes."""
        received = torch.empty(messages.shape, dtype=messages.dtype, device=messages.device)
        self._run([(received.unbind(), messages.unbind())], self.groups.across, group)
        return received

    def _by_group(self, parts: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        return [parts[start : start + self.groups.size] for start in range(0, len(parts), self.groups.size)]

    def _run(
        self,
        exchanges: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
        ranks: Sequence[int],
        group: Any,
    ) -> None:
        """Exchange with `ranks`, several times at once: (places for what comes, what is sent), by rank."""
        mine = ranks.index(self.rank)
        works = []
        for places, parts in exchanges:
            works += start_messages(places, parts, mine, self.tag, group, ranks)
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
                for piece, values in dequantize(received, part.numel()):
                    row.view(number, -1)[:, piece] = values
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
