"""Keeps the sums of gradients over a group of ranks until the last reduce of an accumulation window.

[Note: Sums of a group]
Where ranks form groups ([Note: Two steps] in distributed/two_steps.py) and gradients are reduced in every backward, a
reduce that is not the last of its window stays inside the group: what it gives is added to a row, which this rank
keeps. The last one first adds the row to what it is about to reduce. No other rank of the group has it, so the group's
sum is that of the window, and crosses to the other groups once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.distributed.rank_groups import RankGroups
from hf_zero.layout import Slot, UnitLayout


class GroupSums:
    """The row of one flat parameter's gradient."""

    def __init__(self, layout: UnitLayout, groups: RankGroups, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._groups = groups
        self._dtype, self._device = dtype, device
        self._memory: torch.Tensor | None = None  # 1-D, from the first window with several reduces on
        self.is_filled = False  # it has what the last reduce of the window will need
        self.is_filling = False  # the reduce under way adds to it

    @classmethod
    def of(cls, comm: Comm, layout: UnitLayout, dtype: torch.dtype) -> GroupSums | None:
        """Return a row, or None where there are no groups."""
        return None if comm.groups is None else cls(layout, comm.groups, dtype, comm.device)

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def parts(self) -> Sequence[torch.Tensor]:
        """Return what belongs to each bucket."""
        layout, size = self._layout, self._groups.size
        if self._memory is None:
            self._memory = torch.zeros(layout.padded_numel // size, dtype=self._dtype, device=self._device)
        parts: Sequence[torch.Tensor] = self._memory.split([numel // size for _, numel in layout.buckets()])
        return parts

    def add_to(self, buckets: Sequence[torch.Tensor]) -> None:
        """Add the row to the gradients of this rank, once."""
        if self.is_filled:
            for bucket, part in zip(buckets, self.parts(), strict=True):
                places = bucket.chunk(self._layout.world_size)
                own = [places[number] for number in self._groups.row]
                torch._foreach_add_(own, list(part.chunk(self._groups.number)))
        self.is_filled = False

    def drop(self, slot: Slot) -> None:
        """Let the sums of a parameter be zero."""
        for (start, numel), part in zip(self._layout.buckets(), self.parts(), strict=True):
            for shard, piece in zip(self._groups.row, part.chunk(self._groups.number), strict=True):
                first = start + shard * (numel // self._layout.world_size)
                piece[max(slot.offset - first, 0) : max(slot.end - first, 0)].zero_()
