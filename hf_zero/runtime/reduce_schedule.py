"""When gradients are reduced.

[Note: One reduce per unit and backward]
Every rank starts exactly one reduce per buffer in a backward (stages 2-3) or in the boundary's backward (stages 0-1),
with zeros where a parameter got none. Where nothing else communicates in backward, a reduce starts when the gradients
of its buffer, and of all before it in one fixed order, are there. Where units are gathered in backward, that moment
would come between other gathers on every rank, as the data decides; so there a unit's reduce starts when backward has
left the unit, and at the end of backward for what has no such moment. What arrives after a buffer's reduce has started
(a shared module under reentrant checkpointing, a second backward before the step) waits in memory of its own; the vote
of the step tells all ranks which buffers have such a rest, and they reduce it then.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch

from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.param_grads import ParamGrads
from hf_zero.sharding.unit import ShardUnit

MAX_REDUCES = 2  # under way at a time


class GradReducer:
    """Starts the reduces in the fixed order as early as it can. See [Note: One reduce per unit and backward]."""

    def __init__(
        self,
        buffers: list[GradAccumulator],
        *,
        overlap: bool,
        on_arrival: bool,
        is_boundary: Callable[[], bool],
        on_final: Callable[[GradAccumulator], None] = lambda buffer: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`buffers` in the order of reduces, the same on all ranks.

        Args:
            overlap: False makes backward wait for each reduce.
            on_arrival: Start a reduce when its gradients are there; False if other collectives run in backward.
            is_boundary: Whether the backward under way is the last one before the step.
            on_final: Called in the last backward before the step when a buffer's reduce is over, so that its shard
                holds the gradient of the window unless more arrives late.
            on_change: Called before the user's own change of a gradient is taken over.
        """
        self.buffers = buffers
        self.shown = ParamGrads(buffers, drop_all=self.clear, on_change=on_change)
        self._on_final = on_final
        self._final: set[int] = set()  # ids of buffers whose reduce under way is the last of the window
        self._overlap = overlap
        self._on_arrival = on_arrival
        self._is_boundary = is_boundary
        self._started: set[int] = set()  # ids of buffers whose reduce has started in this backward
        self._next = 0  # on arrival: the first buffer in the order whose reduce has not
        self._under_way: collections.deque[GradAccumulator] = collections.deque()
        self._reduced = False  # stages 0-1: the boundary's reduce of this window has been started everywhere
        self._any_arrival = False

    def arrived(self, number: int, index: int, grad: torch.Tensor) -> None:
        """The gradient of parameter `index` of buffer `number` is there."""
        buffer = self.buffers[number]
        buffer.accumulate(index, grad)
        self._any_arrival = True
        if self._on_arrival and buffer.is_complete:
            boundary = self._is_boundary()
            while self._next < len(self.buffers) and self.buffers[self._next].is_complete:
                if not self._due(self.buffers[self._next], boundary):
                    return
                self._start(self.buffers[self._next], final=boundary)
                self._next += 1

    def unit_left(self, unit: ShardUnit) -> None:
        """Backward has left a unit for good. All ranks must call, in the same order."""
        mine = {id(flat) for flat in unit.buffers}
        boundary = self._is_boundary()
        for buffer in self.buffers:
            if id(buffer.flat) in mine and id(buffer) not in self._started and self._due(buffer, boundary):
                self._start(buffer, final=boundary)

    def _due(self, buffer: GradAccumulator, boundary: bool) -> bool:
        return buffer.eager or (boundary and not self._reduced)

    def end_backward(self, *, boundary: bool) -> None:
        """All gradients of this backward are there. All ranks must call."""
        if not self._any_arrival:
            return
        for buffer in self.buffers:
            if id(buffer) not in self._started and self._due(buffer, boundary):
                self._start(buffer, final=boundary)
        self._reduced = self._reduced or boundary
        self._finish()

    def settle(self) -> None:
        """Before the vote of a step: nothing is under way, and every buffer has had its reduce of this window."""
        self.shown.collect()
        self.end_backward(boundary=True)
        if not self._reduced:
            for buffer in self.buffers:
                if not buffer.eager:
                    self._start(buffer)
            self._reduced = True
            self._finish()

    def reduce_rests(self, which: list[bool]) -> None:
        """Reduce once more the buffers for which some rank has a rest."""
        for buffer, has_rest in zip(self.buffers, which, strict=True):
            if has_rest:
                self._start(buffer)
        self._finish()

    def clear(self) -> None:
        """The window is over."""
        self._finish()
        self._reduced = False
        self.shown.clear()
        for buffer in self.buffers:
            buffer.clear()

    def forget(self) -> None:
        """A pass was broken off on all ranks, and its connections are closed: no gradient of its window remains."""
        self._under_way.clear()
        self._final.clear()
        for buffer in self.buffers:
            buffer.forget_reduce()
        self.clear()

    def _start(self, buffer: GradAccumulator, *, final: bool = False) -> None:
        if buffer in self._under_way:
            self._under_way.remove(buffer)
            self._over(buffer)
        while len(self._under_way) >= MAX_REDUCES:
            self._over(self._under_way.popleft())
        buffer.reduce_start()
        self._started.add(id(buffer))
        if final:
            self._final.add(id(buffer))
        self._under_way.append(buffer)
        if not self._overlap:
            self._over(self._under_way.popleft())

    def _over(self, buffer: GradAccumulator) -> None:
        buffer.reduce_finish()
        if id(buffer) in self._final:
            self._final.discard(id(buffer))
            self._on_final(buffer)

    def _finish(self) -> None:
        while self._under_way:
            self._over(self._under_way.popleft())
        self._started.clear()
        self._next = 0
        self._any_arrival = False
        for buffer in self.buffers:
            buffer.end_backward()
