"""Finds where a backward begins and ends, and tells the step of it.

[Note: Who says that a backward is over]
Gradients of one parameter can arrive several times in one backward (reentrant checkpointing runs nested ones), so no
count of arrivals says that it is over. The end-of-backward callback does, and it must be queued in the outermost graph
task: from hooks on tensors that a forward outside of any backward returned. Where no such hook fires (parts of the
model called without it, a loss that was built from something a module kept), the first gradient queues it; if that
was made in a nested backward, the end comes with that one's, and once more for what arrives later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_zero.runtime.nested import tensors_in


def in_backward() -> bool:
    """Whether this code runs inside an autograd backward."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Whether this code runs inside torch.vmap or a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class PassEvents:
    """The events of a forward and a backward of the whole model, in their order. Here nothing comes of them."""

    def begin_forward(self) -> None:
        """A forward of the model starts."""

    def begin_backward(self) -> None:
        """An outermost backward starts."""

    def gradients_complete(self) -> None:
        """Every parameter of some flat parameter has had its gradient in this backward."""

    def end_backward(self) -> None:
        """The outermost backward is over."""

    def check_current(self) -> None:
        """Raise StateError where parameters are to be read that do not have the last update yet."""


class BackwardWatch:
    """Tells `events` of every outermost backward that goes through a watched tensor."""

    def __init__(self, events: PassEvents) -> None:
        self._events = events
        self._also_at_end: list[Callable[[], None]] = []
        self.task = -1  # the outermost backward under way

    def at_end(self, call: Callable[[], None]) -> None:
        """Call `call` too when a backward is over."""
        self._also_at_end.append(call)

    def watch(self, output: Any) -> None:
        """Watch the tensors that a forward returned; call outside of any backward."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_grad)

    def started(self) -> None:
        """Take notice that a hook of the outermost backward has fired."""
        task = torch._C._current_graph_task_id()
        # One inside a transform of torch.func is a part of what the outermost differentiates.
        if task != self.task and task != -1 and not in_transform():
            self.task = task
            self._events.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def gradient_arrived(self) -> None:
        """Take notice of a parameter's gradient: nothing that is watched may have been on its way."""
        if self.task == -1:
            self.started()

    def gradients_complete(self) -> None:
        """See PassEvents."""
        self._events.gradients_complete()

    def _on_grad(self, grad: torch.Tensor) -> None:
        self.started()

    def _finish(self) -> None:
        self.task = -1
        self._events.end_backward()
        for call in self._also_at_end:
            call()
