"""The events of an engine's micro-batches and steps, for everything that watches it.

Log lines, monitors and profilers are watchers, which the parts of an engine bring (parts.py). Without any, nothing is
hooked on and nothing is measured.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.runtime.backward_watch import PassEvents, in_backward


class Event(enum.Enum):
    """The events of a micro-batch, in this order; a forward without gradients is no part of it."""

    FORWARD_STARTS = "before forward"
    FORWARD_ENDS = "after forward"
    BACKWARD_STARTS = "before backward"
    REDUCE_STARTS = "before the last reduces"  # the backward itself is over; what is left of its reduces follows
    BACKWARD_ENDS = "after backward"
    STEP_STARTS = "before step"
    STEP_ENDS = "after step"


class Watcher:
    """Something that is told of the events of an engine. A method that a subclass leaves out does nothing."""

    def on(self, event: Event) -> None: ...

    def loss(self, loss: torch.Tensor) -> None:
        """Take the loss of a micro-batch, as the script gave it to the engine."""

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Return the block for a backward that the script leaves to the engine or to accelerate."""
        return contextlib.nullcontext()

    def forget(self) -> None:
        """A pass was broken off."""

    def close(self) -> None:
        """The engine leaves its model."""

    def micro_ends(self, boundary: bool) -> None:
        """A micro-batch is over; with `boundary` the parameters were updated, or the update was skipped."""


class Reports:
    """Calls watchers as things happen to one engine."""

    def __init__(self, watchers: Sequence[Watcher] = ()) -> None:
        self._watchers = tuple(watchers)
        self._backward_done = False  # of a micro-batch that is not over

    def loss(self, loss: torch.Tensor) -> None:
        """The script has given the engine the loss of a micro-batch."""
        for watcher in self._watchers:
            watcher.loss(loss)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The script leaves a backward to the engine or to accelerate."""
        with contextlib.ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher.backward())
            yield

    def close(self) -> None:
        """The engine leaves its model."""
        for watcher in self._watchers:
            watcher.close()

    def around(self, events: PassEvents) -> PassEvents:
        """Return `events` that tell the watchers too; themselves where there are none."""
        return _WatchedPass(events, self) if self._watchers else events

    def watch_forward(self, model: nn.Module) -> Callable[[], None]:
        """Learn when the model's forward ends; returns what takes that back."""
        if not self._watchers:
            return lambda: None

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if _trains():
                self._notify(Event.FORWARD_ENDS)

        # Last of all hooks, and outside of what torch.compile traces.
        return model.register_forward_hook(torch.compiler.disable(after)).remove

    def step_starts(self) -> None:
        self._notify(Event.STEP_STARTS)

    def step_ends(self, *, boundary: bool) -> None:
        """End a micro-batch; `boundary` is that of Watcher.micro_ends."""
        self._notify(Event.STEP_ENDS)
        self._micro_ends(boundary)

    def forget(self) -> None:
        """A pass was broken off: no micro-batch is under way."""
        self._backward_done = False
        for watcher in self._watchers:
            watcher.forget()

    def _forward_starts(self) -> None:
        if self._backward_done:  # Trainer and Accelerate call no step between micro-batches
            self._micro_ends(False)
        self._notify(Event.FORWARD_STARTS)

    def _micro_ends(self, boundary: bool) -> None:
        self._backward_done = False
        for watcher in self._watchers:
            watcher.micro_ends(boundary)

    def _notify(self, event: Event) -> None:
        for watcher in self._watchers:
            watcher.on(event)


class _WatchedPass(PassEvents):
    """The events of a pass, of which the watchers of `reports` hear too."""

    def __init__(self, events: PassEvents, reports: Reports) -> None:
        self._events = events
        self._reports = reports

    def begin_forward(self) -> None:
        self._events.begin_forward()
        if _trains():
            self._reports._forward_starts()

    def begin_backward(self) -> None:
        self._reports._notify(Event.BACKWARD_STARTS)
        self._events.begin_backward()

    def gradients_complete(self) -> None:
        self._events.gradients_complete()

    def end_backward(self) -> None:
        self._reports._notify(Event.REDUCE_STARTS)
        self._events.end_backward()
        self._reports._backward_done = True
        self._reports._notify(Event.BACKWARD_ENDS)

    def check_current(self) -> None:
        self._events.check_current()


def _trains() -> bool:
    """A forward that a backward is to follow; one that is repeated inside a backward belongs to that."""
    return torch.is_grad_enabled() and not in_backward()
