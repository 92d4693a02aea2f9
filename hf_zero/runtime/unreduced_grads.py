"""Memory for the gradients of a flat parameter before their reduce, and what is kept of it for the next one."""

from __future__ import annotations

import torch

from hf_zero.layout import UnitLayout
from hf_zero.native.block_pool import Demand


class UnreducedGrads:
    """One flat tensor, and views of it. They are made once: for a small gradient a view takes as long as its copy.

    Args:
        memory: 1-D [padded_numel].
    """

    def __init__(self, layout: UnitLayout, memory: torch.Tensor) -> None:
        self.memory = memory
        self.of_param = [memory.as_strided(slot.shape, slot.strides, slot.offset) for slot in layout.slots]
        self.gaps = [memory[start:end] for start, end in layout.gaps]
        self.buckets = memory.split([numel for _, numel in layout.buckets()])  # one reduce each


class UnreducedPool:
    """Free memory for gradients that are reduced layer by layer, and the bytes of what is in use.

    On the CPU fresh memory costs page faults, more than the reduce of a small unit; CUDA's allocator pools by itself.
    It is no BlockPool, for what it keeps are the views too, which cost more than the memory.

    Args:
        max_kept: Free ones that are kept for flat parameters of the same shapes and type; 0 keeps none.
    """

    def __init__(self, device: torch.device, *, max_kept: int) -> None:
        self._device = device
        self._max_kept = max_kept
        self._free_lists: dict[object, FreeList] = {}
        self._left_to_torch = Demand() if max_kept == 0 else None
        self._made = 0
        self.live_bytes = 0
        self.peak_live_bytes = 0

    def free_list(self, layout: UnitLayout, dtype: torch.dtype) -> FreeList:
        """Return the list for flat parameters whose layouts have the same shapes and buckets as `layout`."""
        places = tuple((slot.shape, slot.strides, slot.offset) for slot in layout.slots)
        key = (places, layout.padded_numel, tuple(layout.buckets()), dtype)
        return self._free_lists.setdefault(key, FreeList(self, layout, dtype))

    @property
    def free(self) -> list[UnreducedGrads]:
        """The memory that is kept."""
        return [one for one_list in self._free_lists.values() for one in one_list.free]

    @property
    def allocations(self) -> int:
        """The number of times that memory was needed and was not there, so far."""
        return self._made if self._left_to_torch is None else self._left_to_torch.allocations

    def make(self, layout: UnitLayout, dtype: torch.dtype) -> UnreducedGrads:
        """Return new memory, with any content."""
        self._made += 1
        return UnreducedGrads(layout, torch.empty(layout.padded_numel, dtype=dtype, device=self._device))

    def count(self, nbytes: int) -> None:
        """Count so many bytes more that are in use, or less."""
        if self._left_to_torch is not None:
            (self._left_to_torch.add if nbytes > 0 else self._left_to_torch.remove)(abs(nbytes))
        self.live_bytes += nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)

    def keeps(self, num_free: int) -> bool:
        """Whether one more is kept where so many are free."""
        return num_free < self._max_kept


class FreeList:
    """The free memory of an UnreducedPool for flat parameters of the same shapes and type."""

    def __init__(self, pool: UnreducedPool, layout: UnitLayout, dtype: torch.dtype) -> None:
        self._pool = pool
        self._layout = layout
        self._dtype = dtype
        self._nbytes = layout.padded_numel * dtype.itemsize
        self.free: list[UnreducedGrads] = []

    def acquire(self) -> UnreducedGrads:
        """Return memory with any content, in the gaps between parameters too."""
        self._pool.count(self._nbytes)
        if self.free:
            return self.free.pop()  # the last one given may still be in the cache
        return self._pool.make(self._layout, self._dtype)

    def release(self, grads: UnreducedGrads) -> None:
        """Keep memory for the next one that asks, or let it go."""
        self._pool.count(-self._nbytes)
        if self._pool.keeps(len(self.free)):
            self.free.append(grads)
