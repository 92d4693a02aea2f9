"""Spans: stretches of time in which an engine does something, in named lanes, such as a collective or a copy.

What is recorded is told by the engine's own parts to their observers; without any they measure nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.config import COLLECTIVES
from hf_zero.distributed.comm import Comm
from hf_zero.errors import ZeroError
from hf_zero.extras.monitors.clocks import Clock, HostClock, clock_of
from hf_zero.extras.monitors.comms_log import CommsLog, Running
from hf_zero.storage.copy_stream import CopyStreams
from hf_zero.storage.disk import DiskStore, Flight

# The lanes of a picture, from the top down.
LANES = (
    "forward",
    "backward",
    "step",
    "gather",
    "reduce",
    "other collectives",
    "update",
    "copy to device",
    "copy to host",
    "disk read",
    "disk write",
)
_OF_COLLECTIVE = {"all_gather_into_tensor": "gather", "broadcast": "gather", "reduce_scatter_tensor": "reduce"}
_OTHERS = "other collectives"


@dataclass(frozen=True)
class Span:
    """Times are milliseconds since the log began."""

    lane: str
    name: str
    start_ms: float
    ms: float
    nbytes: int = 0
    op: str = ""  # of a collective, DeepSpeed's name


@dataclass(frozen=True)
class _Marked:
    lane: str
    name: str
    start: Any
    end: Any
    nbytes: int
    op: str
    on_host: bool


class SpanLog:
    """Collects spans of several threads.

    Times of the device are those of its streams; those of the host, of time.perf_counter. Waits for the device when
    it is made, so that both begin at the same moment.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: Clock = clock_of(device)
        self._host = HostClock()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        self._zero, self._host_zero = self._clock.mark(), self._host.mark()
        self.began_at = time.time()
        self._marked: list[_Marked] = []

    def mark(self) -> Any:
        """Return a point of the current stream's time."""
        return self._clock.mark()

    def host_mark(self) -> float:
        return self._host.mark()

    def host_ms(self) -> float:
        """Return the milliseconds since the log began."""
        return self._host.ms(self._host_zero, self._host.mark())

    def add(self, lane: str, name: str, start: Any, end: Any, nbytes: int = 0, op: str = "") -> None:
        """Add a span between two `mark`s."""
        self._marked.append(_Marked(lane, name, start, end, nbytes, op, on_host=False))

    def add_on_host(self, lane: str, name: str, start: float, end: float, nbytes: int = 0, op: str = "") -> None:
        """Add a span between two `host_mark`s."""
        self._marked.append(_Marked(lane, name, start, end, nbytes, op, on_host=True))

    def spans(self) -> list[Span]:
        """Return the spans in the order of their starts. Waits for the device."""
        return sorted((self._span(one) for one in self._marked), key=lambda span: (span.start_ms, -span.ms))

    def _span(self, one: _Marked) -> Span:
        clock, zero = (self._host, self._host_zero) if one.on_host else (self._clock, self._zero)
        return Span(one.lane, one.name, clock.ms(zero, one.start), clock.ms(one.start, one.end), one.nbytes, one.op)


class CommSpans(CommsLog):
    """The collectives of an engine as spans, with the bytes of the whole tensor.

    Args:
        on_start: Called as each one starts.
    """

    def __init__(self, comm: Comm, log: SpanLog, on_start: Callable[[], None]) -> None:
        self._log = log
        self._on_start = on_start
        super().__init__(comm, (*COLLECTIVES, "vote"), names_tensors=True)

    def close(self) -> None:
        """Wait for the collectives under way."""
        super().close()
        with contextlib.suppress(ZeroError):  # a lost rank, which the training itself reports
            self.calls()

    def mark(self) -> Any:
        self._on_start()
        return super().mark()

    def is_over(self, one: Running, end: Any) -> None:
        op, _, what = one.name.partition(" | ")
        add = self._log.add_on_host if isinstance(one.clock, HostClock) else self._log.add
        add(_OF_COLLECTIVE.get(op, _OTHERS), what[1:-1], one.begun, end, one.nbytes, op)


class CopySpans:
    """The copies between host and device, on their streams; on the CPU they are over when they return."""

    def __init__(self, copies: CopyStreams, log: SpanLog, device: torch.device) -> None:
        self._copies = copies
        self._log = log
        self._beside = None if device.type == "cpu" else torch.Stream(device)
        copies.observers.append(self)

    def close(self) -> None:
        self._copies.observers.remove(self)

    def mark(self) -> Any:
        return self._log.mark()

    def copied(self, to: str, nbytes: int, begun: Any, event: torch.Event | None) -> None:
        lane = f"copy to {to}"
        with self._beside or contextlib.nullcontext():
            if event is not None and self._beside is not None:
                event.wait(self._beside)
            self._log.add(lane, lane, begun, self._log.mark(), nbytes)


class DiskSpans:
    """The transfers of stores on disk, from the request until the disk was done."""

    def __init__(self, stores: Iterable[DiskStore], log: SpanLog) -> None:
        self._stores = list(stores)
        self._log = log
        self._started: list[tuple[float, Flight]] = []
        for store in self._stores:
            store.observers.append(self._note)

    def close(self) -> None:
        """Wait for the transfers under way."""
        for store in self._stores:
            store.observers.remove(self._note)
        for begun, flight in self._started:
            flight.transfer.wait()
            if flight.transfer.ended_at is not None:
                lane = "disk write" if flight.is_write else "disk read"
                self._log.add_on_host(lane, flight.entry.key, begun, flight.transfer.ended_at, flight.entry.nbytes)

    def _note(self, flight: Flight) -> None:
        self._started.append((self._log.host_mark(), flight))
