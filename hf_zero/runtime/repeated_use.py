"""The order in which units are used while one thing is done again and again without gradients (decoding)."""

from __future__ import annotations

from collections.abc import Iterator

from hf_zero.sharding.unit import ShardUnit


class RepeatedUse:
    """What follows what while one thing is done again and again without gradients: a token for a token.

    Learned from the uses before, so that after the last layer of a token comes the first layer of the next one. No
    vote is needed: every use here is a gather, so ranks whose uses differ would have failed at the gather already.
    """

    def __init__(self) -> None:
        self._units: dict[int, ShardUnit] = {}
        # (unit before, unit) -> unit after, as in UseOrder
        self._next: dict[tuple[int, int], int] = {}
        self._before = self._here = -1

    def note(self, unit: ShardUnit) -> None:
        """`unit` is used now."""
        self._units[id(unit)] = unit
        self._next[(self._before, self._here)] = id(unit)
        self._before, self._here = self._here, id(unit)

    def upcoming(self) -> Iterator[ShardUnit]:
        """Units that followed the last times, nearest first."""
        before, here = self._before, self._here
        for _ in range(len(self._units)):
            after = self._next.get((before, here))
            if after is None:
                return
            yield self._units[after]
            before, here = here, after
