"""Decides when gradients are reduced.

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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from hf_zero.distributed.comm import Comm
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.step_events import StepEvents
from hf_zero.sharding.unit import ShardUnit

MAX_REDUCES = 2  # under way at a time


@dataclass(slots=True)
class _Group:
    """The accumulators that are reduced by one operation."""

    members: list[GradAccumulator] = field(default_factory=list)
    is_started: bool = False  # its reduce, in this backward

    @property
    def unit(self) -> str:
        return self.members[0].unit

    @property
    def eager(self) -> bool:  # which a unit is as a whole
        return self.members[0].eager


@dataclass(slots=True)
class _Running:
    """A reduce that is under way."""

    members: Sequence[GradAccumulator]
    is_final: bool  # the last one before the step, unless more arrives late


class GradReducer:
    """Starts the reduces in the fixed order as early as it can. See [Note: One reduce per unit and backward]."""

    def __init__(
        self,
        accumulators: list[GradAccumulator],
        comm: Comm,
        events: StepEvents,
        *,
        overlap: bool,
        on_arrival: bool,
    ) -> None:
        """`accumulators` in the order of reduces, the same on all ranks.

        Args:
            overlap: False makes backward wait for each reduce.
            on_arrival: Start a reduce when its gradients are there; False if other collectives run in backward.
        """
        self.accumulators = accumulators
        self._comm = comm
        self._events = events
        self._overlap = overlap
        self._on_arrival = on_arrival
        self._groups: list[_Group] = []  # in the order of reduces
        self._place_of: dict[int, int] = {}  # id of a flat parameter -> its group
        self._next = 0  # on arrival: the first group in the order whose reduce has not started in this backward
        self._under_way: collections.deque[_Running] = collections.deque()
        self._reduced = False  # stages 0-1: the boundary's reduce of this window has been started everywhere
        self.regroup()

    def regroup(self) -> None:
        """Take in accumulators that were appended, between steps."""
        by_unit: dict[Hashable, _Group] = {}
        for acc in self.accumulators:
            by_unit.setdefault(acc.unit if self._comm.coalesces else id(acc), _Group()).members.append(acc)
        self._groups = list(by_unit.values())
        self._place_of = {id(acc.flat): place for place, group in enumerate(self._groups) for acc in group.members}

    def start_complete(self) -> None:
        """Start the reduces that are next in the order and have all their gradients, where they start on arrival."""
        if not self._on_arrival:
            return
        groups = self._groups
        while self._next < len(groups):
            group = groups[self._next]
            for acc in group.members:
                if not acc.is_complete:
                    return
            boundary = self._events.is_boundary()
            if not self._is_due(group, boundary):
                return
            self._start(group, is_final=boundary, is_last=boundary)
            self._next += 1

    def unit_left(self, unit: ShardUnit) -> None:
        """Start the reduces of a unit that backward has left for good. All ranks must call, in the same order."""
        boundary, places = self._events.is_boundary(), self._place_of
        for place in sorted({places[id(flat)] for flat in unit.flats if id(flat) in places}):
            if self._is_due(self._groups[place], boundary):
                self._start(self._groups[place], is_final=boundary, is_last=boundary)

    def _is_due(self, group: _Group, boundary: bool) -> bool:
        """Whether the reduce of a group has not started in this backward, and is to."""
        return not group.is_started and (group.eager or (boundary and not self._reduced))

    def end_backward(self, *, boundary: bool, expects_gradients: bool = True) -> None:
        """Reduce what this backward has left. All its gradients are there. All ranks must call.

        `expects_gradients`: A backward without any is none on any rank, and reduces nothing.
        """
        if expects_gradients and not any(acc.has_arrivals for acc in self.accumulators):
            return
        for group in self._groups:
            if self._is_due(group, boundary):
                self._start(group, is_final=boundary, is_last=boundary)
        self._reduced = self._reduced or boundary
        self._finish()

    def reduce_remaining(self) -> None:
        """Start and end what is left for the vote of a step: each accumulator has its reduce of this window then."""
        self.end_backward(boundary=True)
        if not self._reduced:
            for group in self._groups:
                if not group.eager:
                    self._start(group)
            self._reduced = True
            self._finish()
        if any(acc.awaits_groups for acc in self.accumulators):
            # Nobody knew in the last backward that a step would follow.
            for group in self._groups:
                if members := [acc for acc in group.members if acc.awaits_groups]:
                    self._start(group, members)
            self._finish()

    def reduce_late_gradients(self, which: list[bool]) -> None:
        """Reduce once more the accumulators for which some rank has late gradients."""
        late = {id(acc) for acc, is_late in zip(self.accumulators, which, strict=True) if is_late}
        for group in self._groups:
            if members := [acc for acc in group.members if id(acc) in late]:
                self._start(group, members)
        self._finish()

    def clear(self) -> None:
        """Begin another accumulation window. Called by ParamGrads.clear."""
        self._wait()
        self._reduced = False
        for acc in self.accumulators:
            acc.clear()
        for acc in self.accumulators[:1]:  # copies are those of all flat parameters
            acc.flat.placement.copies.release()  # else the last gradients would be on the device in the next forward

    def forget(self) -> None:
        """Forget the reduces of a pass that was broken off on all ranks, and whose connections are closed."""
        self._under_way.clear()
        for acc in self.accumulators:
            acc.forget_reduce()

    def _start(
        self,
        group: _Group,
        members: Sequence[GradAccumulator] | None = None,
        *,
        is_final: bool = False,
        is_last: bool = True,
    ) -> None:
        """Start the reduce of a group, or of some of its members. `is_last`: see GradAccumulator.reduce_start."""
        group.is_started = True
        members = members or group.members
        while len(self._under_way) >= MAX_REDUCES:
            self._over(self._under_way.popleft())
        with self._comm.coalesced(members[0].unit, in_background=True):
            for acc in members:
                acc.reduce_start(is_last=is_last)
        self._under_way.append(_Running(members, is_final))
        if not self._overlap:
            self._over(self._under_way.popleft())

    def _over(self, running: _Running) -> None:
        for acc in running.members:
            acc.reduce_finish()
            if running.is_final:
                self._events.gradient_is_final(acc)

    def _finish(self) -> None:
        self._wait()
        for acc in self.accumulators:
            acc.end_backward()

    def _wait(self) -> None:
        """Nothing is under way after it, and a backward may begin."""
        while self._under_way:
            self._over(self._under_way.popleft())
        for group in self._groups:
            group.is_started = False
        self._next = 0
