"""When gradients are reduced.

[Note: One reduce per unit and backward]
Every rank starts exactly one reduce per accumulator in a backward (stages 2-3) or in the boundary's backward (stages
0-1), with zeros where a parameter got none. Where the backend takes several tensors in one operation, the accumulators
of a unit, of which there is one for each type, are reduced together; else each alone. Where nothing else communicates
in backward, a reduce starts when the gradients of its accumulators, and of all before them in one fixed order, are
there. Where units are gathered in backward, that moment would come between other gathers on every rank, as the data
decides; so there a unit's reduce starts when backward has left the unit, and at the end of backward for what has no
such moment. A gradient that arrives after its reduce has started (a module used twice under reentrant checkpointing, a
second backward before the step) waits in its own memory; the ballot of the step shows all ranks which accumulators
have such late gradients, and they reduce those.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.param_grads import ParamGrads
from hf_zero.sharding.unit import ShardUnit

MAX_REDUCES = 2  # under way at a time


class GradReducer:
    """Starts the reduces in the fixed order as early as it can. See [Note: One reduce per unit and backward]."""

    def __init__(
        self,
        accumulators: list[GradAccumulator],
        comm: Comm,
        *,
        overlap: bool,
        on_arrival: bool,
        is_boundary: Callable[[], bool],
        on_final: Callable[[GradAccumulator], None] = lambda acc: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`accumulators` in the order of reduces, the same on all ranks; more may be appended between steps.

        Args:
            overlap: False makes backward wait for each reduce.
            on_arrival: Start a reduce when its gradients are there; False if other collectives run in backward.
            is_boundary: Whether the backward under way is the last one before the step.
            on_final: Called in the last backward before the step when a reduce is over, so that the shard holds the
                gradient of the accumulation window unless more arrives late.
            on_change: Called before the user's own change of a gradient is taken over.
        """
        self.accumulators = accumulators
        self._comm = comm
        self.shown = ParamGrads(accumulators, drop_all=self.clear, on_change=on_change)
        self._on_final = on_final
        self._final: set[int] = set()  # ids of accumulators whose reduce under way is the last of the window
        self._overlap = overlap
        self._on_arrival = on_arrival
        self._is_boundary = is_boundary
        self._started: set[int] = set()  # ids of accumulators whose reduce has started in this backward
        self._grouped: list[list[GradAccumulator]] = []  # see `_groups`
        self._number_grouped = 0  # of the accumulators
        self._place_of: dict[int, int] = {}  # id of a flat parameter -> its group
        self._next = 0  # on arrival: the first group in the order whose reduce has not
        self._under_way: collections.deque[Sequence[GradAccumulator]] = collections.deque()
        self._reduced = False  # stages 0-1: the boundary's reduce of this window has been started everywhere

    def arrivals_of(self, acc: GradAccumulator, index: int) -> Callable[[torch.Tensor], None]:
        """What to call with every gradient of parameter `index` of an accumulator."""
        return acc.accumulation_of(index, self._start_complete if self._on_arrival else None)

    def _start_complete(self) -> None:
        """Start the reduces that are next in the order and have all their gradients."""
        boundary, groups = self._is_boundary(), self._groups
        while self._next < len(groups) and all(one.is_complete for one in groups[self._next]):
            due = self._to_start(groups[self._next], boundary)
            if not due:
                return
            self._start(due, final=boundary)
            self._next += 1

    @property
    def _groups(self) -> list[list[GradAccumulator]]:
        """The accumulators that are reduced by one operation, in the order of reduces."""
        if self._number_grouped != len(self.accumulators):
            self._group()
        return self._grouped

    def _group(self) -> None:
        by_unit: dict[Hashable, list[GradAccumulator]] = {}
        for acc in self.accumulators:
            by_unit.setdefault(acc.unit if self._comm.coalesces else id(acc), []).append(acc)
        self._grouped = list(by_unit.values())
        self._number_grouped = len(self.accumulators)
        self._place_of = {id(acc.flat): place for place, group in enumerate(self._grouped) for acc in group}

    def unit_left(self, unit: ShardUnit) -> None:
        """Backward has left a unit for good. All ranks must call, in the same order."""
        boundary, groups = self._is_boundary(), self._groups
        for place in sorted({self._place_of[id(flat)] for flat in unit.flats if id(flat) in self._place_of}):
            self._start(self._to_start(groups[place], boundary), final=boundary)

    def _to_start(self, group: Sequence[GradAccumulator], boundary: bool) -> list[GradAccumulator]:
        """Those of a group whose reduce has not started in this backward, and is to."""
        return [acc for acc in group if id(acc) not in self._started and self._due(acc, boundary)]

    def _due(self, acc: GradAccumulator, boundary: bool) -> bool:
        return acc.eager or (boundary and not self._reduced)

    def end_backward(self, *, boundary: bool) -> None:
        """All gradients of this backward are there. All ranks must call."""
        if not any(acc.has_arrived for acc in self.accumulators):
            return
        for group in self._groups:
            self._start(self._to_start(group, boundary), final=boundary)
        self._reduced = self._reduced or boundary
        self._finish()

    def settle(self) -> None:
        """Before the vote of a step: nothing is under way, and every accumulator has had its reduce of this window."""
        self.shown.collect()
        self.end_backward(boundary=True)
        if not self._reduced:
            for group in self._groups:
                self._start([acc for acc in group if not acc.eager])
            self._reduced = True
            self._finish()

    def reduce_rests(self, which: list[bool]) -> None:
        """Reduce once more the accumulators for which some rank has a rest."""
        rests = {id(acc) for acc, has_rest in zip(self.accumulators, which, strict=True) if has_rest}
        for group in self._groups:
            self._start([acc for acc in group if id(acc) in rests])
        self._finish()

    def clear(self) -> None:
        """The window is over."""
        self._finish()
        self._reduced = False
        self.shown.clear()
        for acc in self.accumulators:
            acc.clear()
        for acc in self.accumulators[:1]:  # copies are those of all flat parameters
            acc.flat.placement.copies.release()  # else the last gradients would be on the device in the next forward

    def forget(self) -> None:
        """A pass was broken off on all ranks, and its connections are closed: no gradient of its window remains."""
        self._under_way.clear()
        self._final.clear()
        for acc in self.accumulators:
            acc.forget_reduce()
        self.clear()

    def _start(self, accumulators: Sequence[GradAccumulator], *, final: bool = False) -> None:
        if not accumulators:
            return
        for running in [one for one in self._under_way if any(acc in one for acc in accumulators)]:
            self._under_way.remove(running)
            self._over(running)
        while len(self._under_way) >= MAX_REDUCES:
            self._over(self._under_way.popleft())
        with self._comm.coalesced(accumulators[0].unit, in_background=True):
            for acc in accumulators:
                acc.reduce_start()
        self._started.update(map(id, accumulators))
        if final:
            self._final.update(map(id, accumulators))
        self._under_way.append(accumulators)
        if not self._overlap:
            self._over(self._under_way.popleft())

    def _over(self, accumulators: Sequence[GradAccumulator]) -> None:
        for acc in accumulators:
            acc.reduce_finish()
            if id(acc) in self._final:
                self._final.discard(id(acc))
                self._on_final(acc)

    def _finish(self) -> None:
        while self._under_way:
            self._over(self._under_way.popleft())
        self._started.clear()
        self._next = 0
        for acc in self.accumulators:
            acc.end_backward()
