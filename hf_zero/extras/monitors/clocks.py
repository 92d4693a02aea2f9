"""Time between two points of a program: the host's clock on the CPU, events in the stream on a device.

Events cost nothing but their place in the stream: nobody waits for the device until a time is asked for.
"""

from __future__ import annotations

import collections
import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points in time, and measures what lies between two of them."""

    def mark(self) -> Any: ...

    def is_past(self, mark: Any) -> bool:
        """Whether `ms` would not have to wait."""
        ...

    def ms(self, start: Any, end: Any) -> float: ...


class HostClock:
    """The host's own time, for work that is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def is_past(self, mark: float) -> bool:
        return True

    def ms(self, start: float, end: float) -> float:
        return (end - start) * 1000.0


class DeviceClock:
    """The current stream's own time, for calls that return before the work is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def is_past(self, mark: torch.Event) -> bool:
        return bool(mark.query())

    def ms(self, start: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


class Stopwatch:
    """Adds up stretches of time; those that the device has not finished are added when it has, or when asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start: Any = None
        self._unread: collections.deque[tuple[Any, Any]] = collections.deque()
        self._ms = 0.0

    def start(self) -> None:
        self._start = self._clock.mark()

    def stop(self) -> None:
        """End the stretch that `start` began; without one it does nothing."""
        if self._start is not None:
            self.add(self._start, self._clock.mark())
            self._start = None

    def add(self, start: Any, end: Any) -> None:
        self._unread.append((start, end))
        while self._unread and self._clock.is_past(self._unread[0][1]):  # a long run keeps a few only
            self._ms += self._clock.ms(*self._unread.popleft())

    def read_ms(self) -> float:
        """Milliseconds so far. Waits for the device."""
        while self._unread:
            self._ms += self._clock.ms(*self._unread.popleft())
        return self._ms

    def take_ms(self) -> float:
        """Return what `read_ms` returns, and begin from zero."""
        total, self._ms = self.read_ms(), 0.0
        return total
