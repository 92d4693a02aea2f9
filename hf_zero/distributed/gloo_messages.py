"""All-gather and all-to-all over gloo as messages between pairs of ranks.

gloo's own all-gather fills a buffer of its own and copies: half as fast (scripts/bench_comm.py measures it). And its
collectives are matched by order alone, while messages carry a tag: see [Note: Matching] in operation_log.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Message:
    """What this rank sends to another one, and where it puts what that one sends."""

    to: int
    sent: torch.Tensor
    origin: int
    received: torch.Tensor


def gather_messages(full: torch.Tensor, part: torch.Tensor, rank: int, world_size: int) -> list[Message]:
    """For `full` (1-D) to have the `part` of every rank, in rank order. `part` may lie inside `full`."""
    places = full.chunk(world_size)
    _copy(places[rank], part)
    return [Message(to, part, origin, places[origin]) for to, origin in _others(rank, world_size)]


def split_messages(
    out: torch.Tensor, full: torch.Tensor, sizes: tuple[list[int], list[int]] | None, rank: int, world_size: int
) -> list[Message]:
    """For `out` (1-D) to have what the ranks have for this one in their `full` (1-D), in rank order.

    `sizes`: elements from each rank, and to each rank; None means equal parts.
    """
    places = out.split(sizes[0]) if sizes else out.chunk(world_size)
    parts = full.split(sizes[1]) if sizes else full.chunk(world_size)
    _copy(places[rank], parts[rank])
    return [Message(to, parts[to], origin, places[origin]) for to, origin in _others(rank, world_size)]


def message_calls(messages: Sequence[Message], group: Any, tag: int) -> list[Callable[[], Any]]:
    """Calls that start the messages; each returns a Work."""
    calls: list[Callable[[], Any]] = []
    for one in messages:
        if one.sent.numel():
            calls.append(functools.partial(dist.isend, one.sent, group=group, group_dst=one.to, tag=tag))
        if one.received.numel():
            calls.append(functools.partial(dist.irecv, one.received, group=group, group_src=one.origin, tag=tag))
    return calls


def _others(rank: int, world_size: int) -> list[tuple[int, int]]:
    """(to, from) in an order in which no two ranks begin with the same one."""
    return [((rank + step) % world_size, (rank - step) % world_size) for step in range(1, world_size)]


def _copy(place: torch.Tensor, part: torch.Tensor) -> None:
    if place.data_ptr() != part.data_ptr():
        place.copy_(part)
