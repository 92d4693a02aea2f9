"""How much of a model may be unsharded ahead of its use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hf_zero.config.resolved import ZeroSection
from hf_zero.sharding.partition import UnitKind
from hf_zero.sharding.unit import ShardUnit

_DEFAULT_LIVE = 10**9


@dataclass(frozen=True)
class PrefetchLimits:
    """What may be whole beside the units in use, in elements.

    Args:
        ahead: `stage3_prefetch_bucket_size`: how far along the agreed order units are gathered ahead. The next one is,
            whatever its size; 0 turns it off.
        live: `stage3_max_live_parameters`: what may be whole beyond what is in use (the layer that runs; embeddings
            and head from forward to the end of backward). From the default on, the next layer may, whatever its size.
        reuse: `stage3_max_reuse_distance`: a unit whose next use comes before so many elements of other units stays
            whole, if there is room; 0 releases every unit after its use.
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
        """Whether the next unit may be whole beside those in use."""
        return numel <= self.live or self.live >= _DEFAULT_LIVE

    def why_none_ahead(self, units: Iterable[ShardUnit]) -> str:
        """Why no unit will be gathered ahead; empty if units will."""
        smallest = min((unit.numel for unit in units if unit.on_demand and unit.kind is UnitKind.LAYER), default=0)
        if not self.ahead:
            return "overlap_comm is false, or stage3_prefetch_bucket_size 0"
        if not self.admits_next(smallest):
            return f"stage3_max_live_parameters is {self.live}, and the smallest layer has {smallest}"
        return "" if smallest else "there are no layers"
