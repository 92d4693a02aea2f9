"""Keeps the ranks together in a forward or a backward in which each of them may use other units.

[Note: Ranks that use different units]
A gather needs all ranks, and the data may decide who uses what: an image, an expert, a layer that is dropped. No rank
knows what the others use. So a pass is one of two kinds:
  - It follows the order that all ranks had in the last one, and asks nobody. Who is about to use another unit than the
    next, or is at the end too early, first goes through the rest of that order: it takes part in the gathers and the
    reduces that the other ranks start, and computes nothing.
  - Or the ranks agree on each gather: all tell what they need, or that they need nothing more, and gather the first of
    these in the model, in a backward the last. Ranks that need another one drop it: they need this one no more if the
    model uses its units in order. What no rank needs is not gathered. A rank that has its unit goes on to tell what it
    used next in the pass before, so that the gather runs beside its work. This may be wrong, and is given up for a
    pass in which it was wrong too often.
Every pass ends when nobody needs anything. A rank that has left the shared order gets there what it could not have
before. All passes of a kind in which ranks differed once are of the second kind, and so are the first ones.
A reduce starts, in a backward of the second kind, when no rank comes to the unit any more, as far as each can tell by
its forward; a gradient that comes after it waits for the step: [Note: One reduce per unit and backward]. A rank that
tells what it uses next has not computed with the last unit: the ranks ask about that one the next time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from hf_zero.runtime.use_order import Mark, UseOrder
from hf_zero.sharding.unit import ShardUnit, UnitState

# Gives the largest of each number over all ranks. All ranks must call.
Ask = Callable[[Sequence[float], str], list[float]]
_NOTHING = -math.inf


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
        self._gathered: list[ShardUnit] = []  # by agreement, and some rank may have been in the middle of the last use
        self._ahead: ShardUnit | None = None  # this rank expected to use it next, and it may be gathered

    def before_use(self, unit: ShardUnit) -> None:
        """Let the ranks come to where this rank may use `unit`: it is unsharded then, or is gathered next by all."""
        if self.order.is_used_again(unit) and unit.state is not UnitState.SHARDED:
            return
        if self.follows_order and not self.order.expects(unit):
            self._follow_the_rest()
        if not self.follows_order:
            self.order.compare_with_expected(unit)
            self._drop_ahead(unless=unit)
            while unit.state is UnitState.SHARDED:
                self._agree_on(unit)

    def gather_ahead(self, is_admitted: Callable[[ShardUnit], bool]) -> None:
        """Start the gather of what this rank is expected to use next, unless other ranks need another unit first."""
        following = self.order.expected_next()
        if following is not None and following.state is UnitState.SHARDED and is_admitted(following):
            self._agree_on(following, is_ahead=True)
            self._ahead = following

    def _drop_ahead(self, *, unless: ShardUnit | None = None) -> None:
        unit, self._ahead = self._ahead, None
        if unit is not None and unit is not unless and unit.state is UnitState.UNSHARDING:
            self._actions.reshard(unit)

    def end(self) -> bool:
        """Take part in what other ranks need, until none needs anything; return whether all needed the same.

        All ranks must call.
        """
        if self.follows_order and self.order.has_rest:
            self._follow_the_rest()
        self._drop_ahead()
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

    def _agree_on(self, wanted: ShardUnit | None, *, is_ahead: bool = False) -> bool | None:
        """Gather a unit that some rank needs. If none needs any: whether all have recorded the same pass.

        Args:
            is_ahead: This rank expects to use `wanted`, and has not computed yet with the unit that it uses now.
        """
        sign = -1 if self.phase is Phase.FORWARD else 1  # the first of the needed units comes next, or the last
        needed = _NOTHING if wanted is None else float(sign * self.order.number_of(wanted))
        digest = self.order.digest() if wanted is None else 0.0
        open_uses = [float(self._actions.has_open_use(unit)) for unit in self._gathered]
        asked = [needed, float(is_ahead), digest, -digest, *open_uses]
        next_one, some_are_ahead, highest, lowest, *are_open = self._ask(asked, f"layers of a {self.phase.value}")
        if next_one == _NOTHING:
            return highest == -lowest
        chosen = self._units[int(sign * next_one)]
        self._gather(chosen, is_needed=chosen is wanted)
        in_use = self._gathered[-1:] if some_are_ahead else []
        for unit, is_open in zip(self._gathered[: len(self._gathered) - len(in_use)], are_open, strict=False):
            if self.phase is Phase.BACKWARD and unit is not chosen and not is_open:
                self._actions.reduce(unit)
        self._gathered = [*in_use, chosen]
        return None

    def _gather(self, unit: ShardUnit, *, is_needed: bool) -> None:
        if unit.state is not UnitState.SHARDED:
            unit.join_gather()
            return
        self._actions.unshard(unit, wait=False)
        if not is_needed:
            self._actions.reshard(unit)  # waits for it
