"""The order in which units are used, and which unit comes next.

A prefetch is a collective, so every rank must decide it alike: it happens only along an order whose digest all ranks
have agreed on. Where a pass leaves that order (evaluation of a part, generation), there is no prefetch, no error.
"""

from __future__ import annotations

from collections.abc import Iterator

from hf_zero.distributed.digests import digest_of
from hf_zero.sharding.unit import ShardUnit


class UseOrder:
    """Order of use in one direction (forward or backward)."""

    def __init__(self, units: list[ShardUnit]) -> None:
        self._units = units
        self._index = {id(unit): i for i, unit in enumerate(units)}
        self._recording: list[int] = []
        self._recorded: list[int] = []
        self._agreed: tuple[int, ...] = ()
        # (unit before, unit) -> unit after: the unit before tells two uses of a shared unit apart
        self._next: dict[tuple[int, int], int] = {}
        self._last = -1

    def begin(self) -> None:
        """A pass starts."""
        if self._recording:
            self._recorded = self._recording
        self._recording = []
        self._last = -1

    def note(self, unit: ShardUnit) -> bool:
        """`unit` is used now. False if it is the one noted last: another output of it, or its recomputation."""
        index = self._index[id(unit)]
        if self._recording and self._recording[-1] == index:
            return False
        self._last = self._recording[-1] if self._recording else -1
        self._recording.append(index)
        return True

    def upcoming(self) -> Iterator[ShardUnit]:
        """Units that follow the one noted last, nearest first."""
        if not self._recording:
            return
        before, here = self._last, self._recording[-1]
        for _ in range(len(self._agreed)):
            after = self._next.get((before, here))
            if after is None:
                return
            yield self._units[after]
            before, here = here, after

    def reaches_its_end(self, last: ShardUnit | None) -> bool:
        """Whether `upcoming`, which gave `last` last (None: nothing), stopped because the agreed order ends there."""
        if not self._agreed or not self._recording:
            return False
        return (self._recording[-1] if last is None else self._index[id(last)]) == self._agreed[-1]

    def whole_pass(self) -> Iterator[ShardUnit]:
        """All uses of the agreed order."""
        return (self._units[i] for i in self._agreed)

    def digest(self) -> float:
        """An integer, of the last whole pass; travels in the vote of a step."""
        return digest_of(repr(self._recorded).encode())

    def agree(self, all_ranks_equal: bool) -> None:
        """Take the last pass as the order to prefetch along, if every rank recorded the same."""
        order = tuple(self._recorded) if all_ranks_equal else ()
        if order == self._agreed:
            return
        self._agreed = order
        self._next = {}
        for before, here, after in zip((-1, *order), order, order[1:], strict=False):
            self._next[(before, here)] = after

    def forget(self) -> None:
        """Ranks were broken off at different places: nothing is recorded, and there is no prefetch until a vote."""
        self._recording, self._recorded = [], []
        self._agreed, self._next, self._last = (), {}, -1
