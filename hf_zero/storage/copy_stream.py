"""A stream for copies between host and device, beside the compute stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class CopyStream:
    """Orders copies after what computes now, without making what computes next wait for them.

    On the CPU there is no stream and nothing to order: copies are done when they return.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What is started inside runs on the copy stream, after everything that the compute stream has been given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        """Start `target.copy_(source)`; the event completes when it is over. None: it is over.

        The source's memory is not given to anybody else before; a target on the device must outlive the event.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        with self.beside():
            target.copy_(source, non_blocking=True)
            if source.device.type != "cpu":
                source.record_stream(self._stream)
            event = torch.Event(self._device.type)
            event.record(self._stream)
        return event
