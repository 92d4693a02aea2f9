"""Limits how much is unsharded ahead of its use, along an order that all ranks share (see use_order.py)."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hf_zero.config.resolved import ZeroSection
from hf_zero.runtime.use_order import UseOrder
from hf_zero.sharding.unit import ShardUnit, UnitKind

_DEFAULT_LIVE = 10**9


class GatheredAhead:
    """The units that follow a use along an order, as far as they are unsharded or their gathers have started.

    It moves on with the uses, so that no use walks the order again.
    Invariant: none of `units` is SHARDED; who reshards one clears this.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.units = collections.deque[ShardUnit]()  # nearest first
        self.numel = 0  # of them
        self._used: ShardUnit | None = None
        self._rest: Iterator[ShardUnit] = iter(())
        self.following: ShardUnit | None = None  # after `units`

    def move_to(self, unit: ShardUnit, order: UseOrder) -> None:
        """`unit` is used now, and was noted in `order`."""
        if unit is self._used:
            return
        if self.units and self.units[0] is unit:
            self.numel -= self.units.popleft().numel
        else:
            self.clear()
            self._rest = order.upcoming()
            self.following = next(self._rest, None)
        self._used = unit

    def take(self) -> None:
        """Append the unit that follows."""
        assert self.following is not None
        self.units.append(self.following)
        self.numel += self.following.numel
        self.following = next(self._rest, None)


@dataclass(frozen=True)
class PrefetchLimits:
    """The limits of what is unsharded beside the units in use, in elements.

    Args:
        ahead: `stage3_prefetch_bucket_size`: how far along the agreed order units are gathered ahead. The next one is,
            whatever its size; 0 turns it off.
        live: `stage3_max_live_parameters`: what may be unsharded beyond what is in use (the layer that runs;
            embeddings and head from forward to the end of backward). From the default on, the next layer may, whatever
            its size.
        reuse: `stage3_max_reuse_distance`: a unit whose next use comes before so many elements of other units stays
            unsharded, if there is room; 0 reshards every unit after its use.
    """

    ahead: int
    live: int
    reuse: int = 0

    @classmethod
    def of(cls, zero: ZeroSection) -> PrefetchLimits:
        return cls(
            zero.stage3_prefetch_bucket_size if zero.overlap_comm else 0,
            zero.stage3_max_live_parameters,
            zero.stage3_max_reuse_distance,
        )

    def admits_next(self, numel: int) -> bool:
        """Whether the next unit may be unsharded beside those in use."""
        return numel <= self.live or self.live >= _DEFAULT_LIVE

    def why_none_ahead(self, units: Iterable[ShardUnit]) -> str:
        """Return why no unit will be gathered ahead; empty if units will."""
        smallest = min((unit.numel for unit in units if unit.on_demand and unit.kind is UnitKind.LAYER), default=0)
        if not self.ahead:
            return "overlap_comm is false, or stage3_prefetch_bucket_size 0"
        if not self.admits_next(smallest):
            return f"stage3_max_live_parameters is {self.live}, and the smallest layer has {smallest}"
        return "" if smallest else "there are no layers"
