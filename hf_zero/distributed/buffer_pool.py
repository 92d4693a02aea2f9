"""Memory that is used again: what gloo receives in a reduce."""

from __future__ import annotations

import torch


class BufferPool:
    """Free 1-D buffers on one device, for the next one of the same size and type.

    On the CPU fresh memory costs page faults, more than the reduce of a small unit; CUDA's allocator pools by itself.

    Args:
        max_kept: Where a buffer is needed that is not there and more than so many are free, the oldest goes.
    """

    def __init__(self, device: torch.device, *, max_kept: int | None = None) -> None:
        self._device = device
        self._max_kept = max_kept
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer with any content."""
        for index in range(len(self._free) - 1, -1, -1):  # the last one given may still be in the cache
            if self._free[index].numel() == numel and self._free[index].dtype == dtype:
                return self._free.pop(index)
        if self._max_kept is not None and len(self._free) > self._max_kept:
            self._free.pop(0)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)

    def clear(self) -> None:
        """Forget what is free."""
        self._free.clear()
