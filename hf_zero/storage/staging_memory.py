"""The blocks of a staging pool: pieces of memory that is mapped, and pinned, once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.native.area import Area
from hf_zero.native.pinning import HostMemory


class StagingMemory:
    """Blocks of whole pages: pieces of one area that is as large as the budget, and of further ones where that was
    too small. The pool bounds what is in use; its lock guards all of this.

    Mapping faults on every page, pinning locks them all, and unpinning waits for the device. So areas stay until
    `close`, whatever sizes are asked for, unless the budget grows. Pages of pageable memory are there once touched.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.current_bytes = 0  # in use and kept for reuse
        self.peak_bytes = 0
        self.allocations = 0  # how often the system was asked for memory
        self._memory = memory
        self._areas: list[Area] = []

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Whether blocks of these sizes can be taken together, where the budget allows it."""
        if not self._areas:
            return True
        tried = [self._carve(size) for size in sizes]
        found = [block for block in tried if block is not None]
        for block in found:
            self.give(block)
        return len(found) == len(tried)

    def take(self, sizes: Sequence[int], budget_bytes: int) -> list[torch.Tensor]:
        """A block per size, of memory that is not in use. Raises OSError where the system has none."""
        if not self._areas:
            self._map(max(budget_bytes, sum(sizes)))
        blocks: list[torch.Tensor] = []
        try:
            for size in sizes:
                block = self._carve(size)
                if block is None:  # the budget has grown
                    self.close()
                    self._map(max(size, budget_bytes - self.current_bytes))
                    block = self._areas[-1].carve(size)
                assert block is not None
                blocks.append(block)
        except OSError:
            for block in blocks:
                self.give(block)
            raise
        return blocks

    def give(self, block: torch.Tensor) -> None:
        """Keep a block for reuse."""
        next(area for area in self._areas if area.holds(block)).fill(block)

    def close(self) -> None:
        """Give back to the system what is not in use."""
        idle = [area for area in self._areas if area.is_idle]
        self._areas = [area for area in self._areas if not area.is_idle]
        self._count(-sum(area.memory.numel() for area in idle))
        self._memory.free(*(area.memory for area in idle))

    def _map(self, size: int) -> None:
        self._areas.append(Area(self._memory.allocate(size, fork=False)))
        self.allocations += 1
        self._count(self._areas[-1].memory.numel())

    def _count(self, nbytes: int) -> None:
        self.current_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _carve(self, size: int) -> torch.Tensor | None:
        return next((block for area in self._areas if (block := area.carve(size)) is not None), None)
