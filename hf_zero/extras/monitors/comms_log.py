"""Sizes, counts, times and bandwidths of an engine's collectives: DeepSpeed's `comms_logger`, in its layout.

A log is an observer of one Comm, which calls nothing without one. A time is from the start of a collective until it
is over, with what other ranks come late. Nothing waits for it, so what overlaps in a run overlaps here too (DeepSpeed
makes every collective blocking).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero.config import COLLECTIVES
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.group_work import DeviceWork, HostWork
from hf_zero.distributed.work import Pending
from hf_zero.extras.monitors.clocks import Clock, HostClock, clock_of

_KEPT = 1000  # times of an operation and size, of which means and stragglers are taken
# The operations of Comm, under DeepSpeed's names of the collectives.
_NAMES = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all_single",
    "broadcast": "broadcast",
}


@dataclass
class Calls:
    """The calls of one operation with one size."""

    count: int = 0
    total_ms: float = 0.0
    last_ms: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=_KEPT))

    def add(self, ms: float) -> None:
        self.count += 1
        self.total_ms += ms
        self.last_ms.append(ms)


@dataclass(frozen=True)
class Running:
    """A collective whose time is not known yet. Times are marks of the clock; a HostWork has its end itself."""

    name: str
    nbytes: int
    begun: Any
    end: Any
    pending: Pending
    clock: Clock


# Operation -> bytes of the whole tensor -> calls.
Table = dict[str, dict[int, Calls]]
# A call whose time is known: operation, bytes, milliseconds.
Show = Callable[[str, int, float], None]


class CommsLog:
    """The collectives of one engine, from now on until `close`.

    Args:
        wanted: Names out of COLLECTIVES.
        names_tensors: Tell collectives of different tensors apart, by their names.
        show: Called for each collective, some time after it.
    """

    def __init__(
        self, comm: Comm, wanted: Sequence[str] = COLLECTIVES, *, names_tensors: bool = False, show: Show | None = None
    ) -> None:
        self.world_size = comm.world_size
        self._comm = comm
        self._wanted = frozenset(wanted)
        self._names_tensors = names_tensors
        self._show = show
        self._clock, self._host = clock_of(comm.device), HostClock()
        self._stream = None if comm.computes_on_host else torch.Stream(comm.device)
        self._table: Table = {}
        self._running: collections.deque[Running] = collections.deque()
        comm.observers.append(self)

    def close(self) -> None:
        """Log nothing any more; what was logged stays."""
        if self in self._comm.observers:
            self._comm.observers.remove(self)

    def calls(self) -> Table:
        """Return what was logged so far. Waits for the collectives under way."""
        self._read(wait=True)
        return self._table

    def fastest_ms(self) -> dict[str, dict[int, list[float]]]:
        """Return the shortest time of all ranks for each of the last calls: that of the rank that came last.

        All ranks must call.
        """
        mine = {name: {size: [*one.last_ms] for size, one in sizes.items()} for name, sizes in self.calls().items()}
        everyone = self._comm.all_gather_object(mine, "times of collectives")

        def fastest(name: str, size: int) -> list[float]:
            return [min(ms) for ms in zip(*(one[name][size] for one in everyone), strict=False)]

        return {name: {size: fastest(name, size) for size in sizes} for name, sizes in mine.items()}

    # ---------------------------------------------------------------- Observer
    def mark(self) -> Any:
        return self._clock.mark(), self._host.mark()

    def started(self, op: str, what: str, nbytes: int, begun: Any, pending: Pending) -> None:
        name = _NAMES.get(op, op)
        if name not in self._wanted:
            return
        end, on_host = None, isinstance(pending, HostWork)
        if isinstance(pending, DeviceWork):
            assert self._stream is not None
            with self._stream:  # another stream waits for it, and marks when it is over
                pending.hold_stream()
                end = self._clock.mark()
        elif not on_host:  # it is over
            end = self._clock.mark()
        name = f"{name} | [{what}]" if self._names_tensors else name
        clock = self._host if on_host else self._clock
        self._running.append(Running(name, nbytes, begun[on_host], end, pending, clock))
        self._read(wait=False)

    def _read(self, *, wait: bool) -> None:
        """Take the times of what is over, in the order of the starts."""
        while self._running:
            one = self._running[0]
            if wait:
                one.pending.wait()
            end = one.pending.ended_at if isinstance(one.pending, HostWork) else one.end
            if end is None or not (wait or one.clock.is_past(end)):
                return
            self._running.popleft()
            self.is_over(one, end)

    def is_over(self, one: Running, end: Any) -> None:
        """Keep the time of a collective, which is known now."""
        ms = one.clock.ms(one.begun, end)
        self._table.setdefault(one.name, {}).setdefault(one.nbytes, Calls()).add(ms)
        if self._show is not None:
            self._show(one.name, one.nbytes, ms)
