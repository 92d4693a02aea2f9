"""Memory that is used again: what gloo receives in a reduce; and what is asked anew."""

from __future__ import annotations

import collections

import torch


class Demand:
    """Counts requests to torch's allocator that nothing given back before can meet.

    An allocator that pools, as CUDA's does, asks the system for those only.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._free: collections.Counter[int] = collections.Counter()  # size in bytes -> how many were given back

    def add(self, nbytes: int) -> None:
        """Count a request."""
        if self._free[nbytes]:
            self._free[nbytes] -= 1
        else:
            self.allocations += 1

    def remove(self, nbytes: int) -> None:
        """Count memory that was given back."""
        self._free[nbytes] += 1


class BufferPool:
    """Free 1-D buffers on one device, for the next one of the same size and type.

    On the CPU fresh memory costs page faults, more than the reduce of a small unit; CUDA's allocator pools by itself.

    Args:
        max_kept: So many are kept, the largest ones, which serve smaller requests too.
    """

    def __init__(self, device: torch.device, *, max_kept: int) -> None:
        self._device = device
        self._max_kept = max_kept
        self._free: list[torch.Tensor] = []
        self.allocations = 0  # how often memory was needed that was not there, so far

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer with any content."""
        for index in range(len(self._free) - 1, -1, -1):  # the last one given may still be in the cache
            if self._free[index].numel() == numel and self._free[index].dtype == dtype:
                return self._free.pop(index)
        larger = [one for one in self._free if one.numel() > numel and one.dtype == dtype]
        if larger:
            best = min(larger, key=torch.Tensor.numel)
            self._free = [one for one in self._free if one is not best]
            return best[:numel]
        if len(self._free) >= self._max_kept:
            smallest = min(self._free, key=lambda one: one.untyped_storage().nbytes())
            self._free = [one for one in self._free if one is not smallest]
        self.allocations += 1
        return torch.empty(numel, dtype=dtype, device=self._device)

    def release(self, buffer: torch.Tensor) -> None:
        """Keep a buffer for the next one that asks."""
        size = buffer.untyped_storage().nbytes() // buffer.element_size()
        self._free.append(buffer.as_strided((size,), (1,), 0))  # all of it, where a part was lent

    def clear(self) -> None:
        """Forget what is free."""
        self._free.clear()
