"""Calls of torch.distributed: several collectives as one operation of a device, and messages of gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.torch_names import (
    all_gather_single,
    all_gather_single_coalesced,
    reduce_scatter_single,
    reduce_scatter_single_coalesced,
)


def all_gather(outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, group: Any, async_op: bool) -> Any:
    """Gather tensors of any types in one operation: NCCL has a group of its calls for that, each with its own type."""
    if len(outputs) == 1:
        return all_gather_single(outputs[0], inputs[0], group=group, async_op=async_op)
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = async_op
    return all_gather_single_coalesced(group)(outputs, inputs, options)


def reduce_scatter(outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, group: Any, async_op: bool) -> Any:
    """Reduce tensors of any types in one operation, as `all_gather` gathers them."""
    if len(outputs) == 1:
        return reduce_scatter_single(outputs[0], inputs[0], group=group, async_op=async_op)
    options = dist.ReduceScatterOptions()
    options.asyncOp = async_op
    return reduce_scatter_single_coalesced(group)(outputs, inputs, options)


def all_reduce(outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, group: Any, async_op: bool) -> Any:
    """Reduce tensors of one type in place: NCCL's call demands both."""
    if len(outputs) == 1:
        return dist.all_reduce(outputs[0], group=group, async_op=async_op)
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = async_op
    return group.allreduce_coalesced(outputs, options)


COALESCED: dict[str, Callable[..., Any]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}


def exchange(places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], rank: int, tag: int, group: Any) -> None:
    """See Comm._exchange; returns when all of it is over."""
    for work in start_messages(places, parts, rank, tag, group):
        work.wait()


def start_messages(
    places: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    place: int,
    tag: int,
    group: Any,
    ranks: Sequence[int] | None = None,
) -> list[Any]:
    """Start to send `parts[i]` to the i-th of `ranks`, and to fill `places[i]` with what that one sends.

    Nothing travels from this rank to itself.

    Args:
        place: This rank's place in `ranks`.
        ranks: Those that exchange something, the same on all of them; None: all ranks of the group.
    """
    works: list[Any] = []
    count = len(places)
    for step in range(1, count):  # an order in which no two ranks begin with the same one
        to, origin = (place + step) % count, (place - step) % count
        if parts[to].numel():
            works.append(dist.isend(parts[to], group=group, group_dst=ranks[to] if ranks else to, tag=tag))
        if places[origin].numel():
            source = ranks[origin] if ranks else origin
            works.append(dist.irecv(places[origin], group=group, group_src=source, tag=tag))
    return works


def gather_rows(rows: torch.Tensor, rank: int, tag: int, group: Any) -> None:
    """Fill `rows` [number of ranks, n] from the row that each rank has in it; returns when all of it is over.

    In as many messages of a rank as the number of ranks has binary digits, each of twice as many rows as the one
    before (Bruck et al., "Efficient algorithms for all-to-all communications", 1997).
    """
    kept = torch.empty_like(rows)  # from this rank's row on
    kept[0] = rows[rank]
    have, count = 1, len(rows)
    while have < count:
        number = min(have, count - have)
        to, origin = (rank - have) % count, (rank + have) % count
        works: list[Any] = [
            dist.isend(kept[:number], group=group, group_dst=to, tag=tag),
            dist.irecv(kept[have : have + number], group=group, group_src=origin, tag=tag),
        ]
        for work in works:
            work.wait()
        have += number
    rows.copy_(kept.roll(rank, 0))


def combine(values: torch.Tensor, largest: int, rank: int, count: int, tag: int, group: Any) -> None:
    """Replace `values` (1-D) by their sums over `count` ranks, the last `largest` by their maxima.

    Returns when all of it is over. By recursive doubling: a rank sends as many messages as the number of ranks has
    binary digits, or one more, of one size. Every rank gets the same bits, since partners add the same two numbers.
    """
    received = torch.empty_like(values)
    sums = len(values) - largest

    def add_from(other: int, *, sends: bool) -> None:
        works: list[Any] = [dist.irecv(received, group=group, group_src=other, tag=tag)]
        works += [dist.isend(values, group=group, group_dst=other, tag=tag)] if sends else []
        for work in works:
            work.wait()
        values[:sums] += received[:sums]
        torch.maximum(values[sums:], received[sums:], out=values[sums:])

    # The ranks from here on leave their values to one below, and get the result.
    paired = 1 << (count.bit_length() - 1)
    if rank >= paired:
        dist.send(values, group=group, group_dst=rank - paired, tag=tag)
        dist.recv(values, group=group, group_src=rank - paired, tag=tag)
        return
    waits = rank + paired < count
    if waits:
        add_from(rank + paired, sends=False)
    distance = 1
    while distance < paired:
        add_from(rank ^ distance, sends=True)
        distance *= 2
    if waits:
        dist.send(values, group=group, group_dst=rank + paired, tag=tag)
