"""The order in which units are used in a pass: as this rank does it, and as all ranks did it the last time."""

from __future__ import annotations

import array
import collections
import enum
from collections.abc import Iterator, Mapping, Sequence

from hf_zero.distributed.digests import digest_of
from hf_zero.sharding.unit import ShardUnit

# (unit before, unit) -> unit after: the unit before tells two uses of a shared unit apart
NextUse = dict[tuple[int, int], int]
# A model whose passes change more often, though on all ranks alike, is taken for one that depends on its data.
_MAX_CHANGES = 3
# A gather for nothing costs more than one in time saves: no unit is expected from this share of mistakes on.
_MAX_MISTAKES = 0.25


class Mark(enum.IntEnum):
    """The events of a unit in a pass that may start a collective."""

    USED = 0  # it is gathered, and what comes next ahead of its use
    LEFT = 1  # a use is over: it may be resharded, and gathered again for the next use
    REDUCED = 2  # backward does not come to it any more: the reduce of its gradients starts


_MARKS = len(Mark)  # an entry of an order is a unit's number times this, plus a mark


def follow(following: Mapping[tuple[int, int], int], before: int, here: int, most: int) -> Iterator[int]:
    """Yield at most `most` units after `here`, nearest first."""
    for _ in range(most):
        after = following.get((before, here))
        if after is None:
            return
        yield after
        before, here = here, after


class UseOrder:
    """The order of one kind of pass, such as the backward of a model.

    A prefetch is a collective, so every rank must decide it alike: it happens only along an order that all ranks had
    in the last pass of the kind (`is_shared`).
    """

    def __init__(self, units: Sequence[ShardUnit]) -> None:
        self._units = units
        self._index = {id(unit): i for i, unit in enumerate(units)}
        self._mine = array.array("q")  # entries: this rank's pass
        self._open = collections.Counter[int]()  # uses of a unit that are not over
        self._uses: list[int] = []  # of this rank, and those of the other ranks that it follows
        self._last = -1
        self._shared = array.array("q")  # entries
        self._shared_uses: list[int] = []
        self._at = 0  # the entries of `_shared` that this rank has come to
        self._next: NextUse = {}  # in the last pass: of all ranks if it was shared, and else of this one
        self._changes = 0
        self._expected = self._mistakes = 0  # uses for which `_next` had a unit, and those for which it was another
        self.differs = False  # the ranks use different units, or others in every pass: no order is shared again

    @property
    def is_shared(self) -> bool:
        """Whether all ranks had one order in the last pass, so that they may be expected to keep it."""
        return bool(self._shared) and not self.differs

    def begin(self) -> None:
        """A pass starts."""
        self._mine, self._uses = array.array("q"), []
        self._open.clear()
        self._last, self._at = -1, 0

    def number_of(self, unit: ShardUnit) -> int:
        """Return the place of `unit` among the units, equal on all ranks."""
        return self._index[id(unit)]

    # ---------------------------------------------------------------- this rank's pass
    def note(self, mark: Mark, unit: ShardUnit) -> None:
        """Record what happens to `unit` on this rank."""
        index = self._index[id(unit)]
        entry = index * _MARKS + mark
        self._mine.append(entry)
        if mark is Mark.USED:
            self._open[index] += 1
            self._at = self._next_use()
        elif mark is Mark.LEFT:
            self._open[index] -= 1
        if self._at < len(self._shared) and self._shared[self._at] == entry:
            self._at += 1

    def is_used_again(self, unit: ShardUnit) -> bool:
        """Whether a use of `unit` was noted last: this is another output of it, or its recomputation."""
        return bool(self._mine) and self._mine[-1] == self._index[id(unit)] * _MARKS + Mark.USED

    def is_in_use(self, unit: ShardUnit) -> bool:
        """Whether a use of `unit` has begun on this rank and is not over."""
        return self._open[self._index[id(unit)]] > 0

    def digest(self) -> float:
        """An integer: this rank's pass so far."""
        return digest_of(self._mine.tobytes())

    # ---------------------------------------------------------------- the order of all ranks
    def expects(self, unit: ShardUnit) -> bool:
        """Whether a use of `unit` is what comes next in the shared order."""
        at = self._next_use()
        return at < len(self._shared) and self._shared[at] == self._index[id(unit)] * _MARKS + Mark.USED

    def _next_use(self) -> int:
        """Return the place of the next use in the shared order, or its length."""
        at = self._at
        while at < len(self._shared) and self._shared[at] % _MARKS != Mark.USED:
            at += 1
        return at

    @property
    def has_rest(self) -> bool:
        """Whether uses are still to come in the shared order."""
        return self._next_use() < len(self._shared)

    def take_rest(self) -> list[tuple[Mark, ShardUnit]]:
        """Return what is still to come in the shared order, which this rank has come to the end of then."""
        entries = self._shared[self._at :]
        self._at = len(self._shared)
        return [(Mark(entry % _MARKS), self._units[entry // _MARKS]) for entry in entries]

    def agree(self, all_ranks_equal: bool) -> None:
        """The pass is over; take it as the shared order if every rank recorded the same, and give that up if not."""
        mine = self._mine if all_ranks_equal else array.array("q")
        if all_ranks_equal and mine == self._shared:
            return
        if self._shared:
            self._changes += 1
            self.differs |= not all_ranks_equal or self._changes > _MAX_CHANGES
        self._shared = mine
        uses = _without_repeats([entry // _MARKS for entry in self._mine if entry % _MARKS == Mark.USED])
        self._shared_uses = uses if all_ranks_equal else []
        self._next = dict(zip(zip((-1, *uses), uses, strict=False), uses[1:], strict=False))

    def forget(self) -> None:
        """Ranks were broken off at different places: nothing is recorded, and no order is shared."""
        self.begin()
        self._shared, self._shared_uses, self._next = array.array("q"), [], {}

    # ---------------------------------------------------------------- prediction
    def advance(self, unit: ShardUnit) -> bool:
        """`unit` is used now, here or on the ranks that this one follows. False if it is the one before, once more."""
        index = self._index[id(unit)]
        if self._uses and self._uses[-1] == index:
            return False
        self._last = self._uses[-1] if self._uses else -1
        self._uses.append(index)
        return True

    def upcoming(self) -> Iterator[ShardUnit]:
        """Yield the units that follow the one used last, nearest first; none where the order is not shared."""
        if self._uses and self.is_shared:
            for index in follow(self._next, self._last, self._uses[-1], len(self._shared_uses)):
                yield self._units[index]

    def expected_next(self) -> ShardUnit | None:
        """Return the unit that this rank used next in the last pass; None if there is none, or it is often another."""
        index = self._after_last_use()
        return None if index is None or self._mistakes > _MAX_MISTAKES * self._expected else self._units[index]

    def compare_with_expected(self, unit: ShardUnit) -> None:
        """`unit` is used next."""
        index, expected = self._index[id(unit)], self._after_last_use()
        if expected is not None and index != self._uses[-1]:
            self._expected += 1
            self._mistakes += index != expected

    def _after_last_use(self) -> int | None:
        return self._next.get((self._last, self._uses[-1])) if self._uses else None

    def reaches_its_end(self, last: ShardUnit | None) -> bool:
        """Whether `upcoming`, which gave `last` last (None: nothing), stopped because the shared order ends there."""
        if not self._shared_uses or not self._uses:
            return False
        return (self._uses[-1] if last is None else self._index[id(last)]) == self._shared_uses[-1]

    def whole_pass(self) -> Iterator[ShardUnit]:
        """Yield all uses of the shared order; none where it is not shared."""
        return (self._units[i] for i in self._shared_uses if self.is_shared)


def _without_repeats(uses: Sequence[int]) -> list[int]:
    return [index for index, before in zip(uses, [-1, *uses], strict=False) if index != before]
