"""One allocation that is lent in pieces, as the staging memory of disks and the arena of saved inputs do."""

from __future__ import annotations

import torch


class Area:
    """Pieces of one 1-D uint8 tensor: each is taken from the first gap that is large enough."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._gaps = [(0, memory.numel())]  # in order; between two of them something is in use

    @property
    def is_idle(self) -> bool:
        """Whether no piece is in use."""
        return self._gaps == [(0, self.memory.numel())]

    def carve(self, size: int) -> torch.Tensor | None:
        """A piece of `size` bytes, or None if no gap is large enough."""
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                return self.memory[start : start + size]
        return None

    def holds(self, block: torch.Tensor) -> bool:
        """Whether `block` is a piece of this area."""
        return 0 <= block.data_ptr() - self.memory.data_ptr() < self.memory.numel()

    def fill(self, block: torch.Tensor) -> None:
        """Give a piece back."""
        start = block.data_ptr() - self.memory.data_ptr()
        gaps: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (start, start + block.numel())]):
            if gaps and gaps[-1][1] == gap[0]:
                gaps[-1] = (gaps[-1][0], gap[1])
            else:
                gaps.append(gap)
        self._gaps = gaps
