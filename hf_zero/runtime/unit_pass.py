"""Keeps the ranks together in a forward or a backward in which each of them may use other units.

[Note: Ranks that use different units]
A gather needs all ranks, and the data may decide who uses what: an image, an expert, a layer that is dropped. No rank
knows what the others use. So a pass is one of two kinds:
  - It follows the order that all ranks had in the last one, and asks nobody. Who is about to use another unit than the
    next, or is at the end too early, first goes through the rest of that order: it takes part in the gathers and the
    reduces that the other ranks start, and computes nothing.
  - Or the ranks agree on each gather: all tell what they need, or that they need nothing more, and gather the unit
    that most of them need. For the others it is dropped. What no rank needs is not gathered.
Every pass ends when nobody needs anything. A rank that has left the shared order gets there what it could not have
before. All passes of a kind in which ranks differed once are of the second kind, and so are the first ones.
A reduce starts, in a backward of the second kind, when no rank comes to the unit any more, as far as each can tell by
its forward; a gradient that comes after it waits for the step: [Note: One reduce per unit and backward].
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from hf_zero.runtime.use_order import Mark, UseOrder
from hf_zero.sharding.unit import ShardUnit, UnitState

# Gives the numbers of all ranks, in rank order. All ranks must call.
Ask = Callable[[Sequence[float], str], list[list[float]]]
_NOTHING = -1


class Phase(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class UnitActions(Protocol):
    """The actions on units that a pass causes."""

    def follow(self, unit: ShardUnit) -> None:
        """Go along with a use of `unit` on other ranks."""

    def after_use(self, unit: ShardUnit) -> None: ...

    def unshard(self, unit: ShardUnit, *, wait: bool) -> None: ...

    def reshard(self, unit: ShardUnit) -> None: ...

    def reduce(self, unit: ShardUnit) -> None:
        """Start the reduces of `unit`."""

    def has_open_use(self, unit: ShardUnit) -> bool:
        """Whether a forward of this rank has used `unit`, and no backward has come to that use."""


class UnitPass:
    """One pass of this rank. All ranks begin and end it together."""

    def __init__(
        self,
        phase: Phase,
        order: UseOrder,
        units: Sequence[ShardUnit],
        actions: UnitActions,
        ask: Ask,
        *,
        is_like_the_last: bool,
    ) -> None:
        """`is_like_the_last`: Nothing says that the ranks will not use what they used the last time."""
        order.begin()
        self.phase = phase
        self.order = order
        self.follows_order = order.is_shared and is_like_the_last
        self._units = units
        self._actions = actions
        self._ask = ask
        self._gathered: ShardUnit | None = None  # the last unit that ranks agreed on

    def before_use(self, unit: ShardUnit) -> None:
        """Let the ranks come to where this rank may use `unit`: it is unsharded then, or is gathered next by all."""
        if self.order.is_used_again(unit) and unit.state is not UnitState.SHARDED:
            return
        if self.follows_order and not self.order.expects(unit):
            self._follow_the_rest()
        if not self.follows_order:
            while unit.state is UnitState.SHARDED:
                self._agree_on(unit)

    def end(self) -> bool:
        """Take part in what other ranks need, until none needs anything; return whether all needed the same.

        All ranks must call.
        """
        if self.follows_order and self.order.has_rest:
            self._follow_the_rest()
        while (equal := self._agree_on(None)) is None:
            pass
        self.order.agree(equal)
        return equal

    def _follow_the_rest(self) -> None:
        resharded = set[ShardUnit]()  # by the other ranks, though this one is in the middle of a use
        gathered = set[ShardUnit]()  # for the other ranks alone
        for mark, unit in self.order.take_rest():
            if mark is Mark.REDUCED:
                self._actions.reduce(unit)
            elif mark is Mark.LEFT:
                if self.order.is_in_use(unit):
                    resharded.add(unit)
                else:
                    self._actions.after_use(unit)
                    gathered.discard(unit)
            elif unit in resharded:
                resharded.discard(unit)
                unit.join_gather()
            else:
                self._actions.follow(unit)
                gathered.add(unit)
        for unit in gathered:
            if not self.order.is_in_use(unit):
                self._actions.reshard(unit)
        self.follows_order = False

    def _agree_on(self, wanted: ShardUnit | None) -> bool | None:
        """Gather the unit that most ranks need. If none needs any: whether all have recorded the same pass."""
        before = self._gathered
        is_over = before is None or not self._actions.has_open_use(before)
        index = _NOTHING if wanted is None else self.order.number_of(wanted)
        mine = [float(index), float(is_over), self.order.digest() if wanted is None else 0.0]
        by_rank = self._ask(mine, f"layers of a {self.phase.value}")
        needed = collections.Counter(int(row[0]) for row in by_rank if row[0] != _NOTHING)
        if not needed:
            return len({row[2] for row in by_rank}) == 1
        # The first in the model goes before others that as many ranks need; in backward the last one does.
        sign = 1 if self.phase is Phase.FORWARD else -1
        chosen = self._units[min(needed, key=lambda one: (-needed[one], sign * one))]
        self._gather(chosen, is_needed=chosen is wanted)
        is_left = self.phase is Phase.BACKWARD and all(row[1] for row in by_rank)
        if is_left and before is not None and before is not chosen:
            self._actions.reduce(before)
        self._gathered = chosen
        return None

    def _gather(self, unit: ShardUnit, *, is_needed: bool) -> None:
        if unit.state is not UnitState.SHARDED:
            unit.join_gather()
            return
        self._actions.unshard(unit, wait=False)
        if not is_needed:
            self._actions.reshard(unit)  # waits for it
