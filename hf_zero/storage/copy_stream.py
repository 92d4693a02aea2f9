"""Streams for copies between host and device, beside the compute stream: one for each direction."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

MAX_DOWNLOADS = 2  # see CopyStreams.hold


class CopyObserver(Protocol):
    """Something that is told of every copy that has started."""

    def mark(self) -> Any:
        """Return the point in time at which a copy is about to start."""

    def copied(self, to: str, nbytes: int, begun: Any, event: torch.Event | None) -> None:
        """Take note of a copy to the "device" or "host"; `event` is None where it is over, `nbytes` 0 if not known."""


class CopyStreams:
    """Orders copies after what computes now, without making what computes next wait for them.

    A stream per direction: parameters on their way to the device do not queue behind gradients on theirs to the host,
    and the link is used both ways. On the CPU there are no streams and nothing to order: copies are done when they
    return.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [] if device.type == "cpu" else [torch.Stream(device), torch.Stream(device)]
        self.observers: list[CopyObserver] = []
        self._held: collections.deque[tuple[torch.Event, Sequence[torch.Tensor]]] = collections.deque()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Run what is started inside on the stream to the device, after all that the compute stream was given."""
        self.release()
        if not self._streams:
            yield
            return
        marks = [observer.mark() for observer in self.observers]
        with self._after_compute(self._streams[0]):
            yield
            self._notify("device", 0, marks, self._mark(self._streams[0]) if marks else None)

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: torch.Event | None) -> torch.Event | None:
        """Start `target.copy_(source)`, to the device; the event completes when it is over. None: it is over.

        Args:
            target: It has to live until the compute stream, or the host, has waited for the event.
            after: What writes `source`; None: nothing does.
        """
        return self._copy("device", target, source, after)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        """Start `target.copy_(source)`, to the host; the event completes when it and all before are over.

        None: it is over. The source has to live until then: see `hold`.
        """
        return self._copy("host", target, source, None)

    def hold(self, sources: Sequence[torch.Tensor], event: torch.Event | None) -> None:
        """Keep what downloads read until they are over: `event` is that of the last of them.

        MAX_DOWNLOADS calls are kept at most; beyond that the compute stream, whose memory it is, waits for the oldest.
        So the device's memory is bounded, the host waits for nothing, and the memory goes to nobody too early. (With
        record_stream the allocator would ask for new memory while the host is ahead of the copies.)
        """
        self.release()
        if event is not None:
            self._held.append((event, sources))
        if len(self._held) > MAX_DOWNLOADS:
            self._held[0][0].wait(torch.accelerator.current_stream(self._device))
            self._held.popleft()

    def release(self) -> None:
        """Give back what downloads that are over have read. It waits for nothing."""
        while self._held and self._held[0][0].query():
            self._held.popleft()

    def synchronize(self) -> None:
        """Return when all copies are over."""
        for stream in self._streams:
            stream.synchronize()
        self._held.clear()

    def _copy(
        self, to: str, target: torch.Tensor, source: torch.Tensor, after: torch.Event | None
    ) -> torch.Event | None:
        marks = [observer.mark() for observer in self.observers]
        event = None
        if not self._streams:
            target.copy_(source)
        else:
            stream = self._streams[0 if to == "device" else 1]
            with self._after_compute(stream):
                if after is not None:
                    after.wait(stream)
                target.copy_(source, non_blocking=True)
                event = self._mark(stream)
        self._notify(to, target.nbytes, marks, event)
        return event

    def _notify(self, to: str, nbytes: int, marks: Sequence[Any], event: torch.Event | None) -> None:
        for observer, begun in zip(self.observers, marks, strict=True):
            observer.copied(to, nbytes, begun, event)

    @contextlib.contextmanager
    def _after_compute(self, stream: torch.Stream) -> Iterator[None]:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            yield

    def _mark(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self._device.type)
        event.record(stream)
        return event
