"""Memory of whole gradients, used again."""

from __future__ import annotations

import collections

import torch

MAX_FREE = 2  # of one size: as many reduces as may be under way


class MemoryPool:
    """Whole-gradient memory of buffers whose reduce is over, for the next buffer of the same size.

    On the CPU fresh memory costs page faults, more than the reduce of a small unit; CUDA's allocator pools by itself.
    """

    def __init__(self, device: torch.device, *, keeps: bool) -> None:
        self._device = device
        self._keeps = keeps
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = collections.defaultdict(list)
        self.live_bytes = 0
        self.peak_live_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        free = self._free[(numel, dtype)]
        tensor = free.pop() if free else torch.empty(numel, dtype=dtype, device=self._device)
        self.live_bytes += tensor.numel() * tensor.element_size()
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        return tensor

    def give(self, tensor: torch.Tensor) -> None:
        self.live_bytes -= tensor.numel() * tensor.element_size()
        free = self._free[(tensor.numel(), tensor.dtype)]
        if self._keeps and len(free) < MAX_FREE:
            free.append(tensor)

    def clear(self) -> None:
        self._free.clear()
