"""Shards in the memory of the host, pinned where a CUDA device copies from and to it."""

from __future__ import annotations

import torch

from hf_zero.storage.base import ShardStore
from hf_zero.storage.memory import MemoryStore
from hf_zero.storage.staging_pool import HostMemory


class HostStore(MemoryStore):
    """Every shard is a page-aligned CPU tensor; a borrow hands out the tensor itself.

    Copies between it and the device, and waiting for them, are the caller's: the store knows no streams.

    Args:
        device: The device that computes.
        pin: Pin the memory where that device is CUDA. A block that cannot be pinned is pageable; that is said once.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        super().__init__(device)
        self._memory = HostMemory(device, pin=pin)
        self._blocks: dict[str, torch.Tensor] = {}  # uint8, whole pages

    @property
    def pinned_bytes(self) -> int:
        return self._memory.pinned_bytes

    def _allocate(self, key: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        self._blocks[key] = self._memory.allocate(nbytes)
        return self._blocks[key][:nbytes].view(dtype)

    def can_adopt(self, other: ShardStore) -> bool:
        return super().can_adopt(other) and isinstance(other, HostStore) and other._memory.pins == self._memory.pins

    def adopt(self, key: str, other: ShardStore, other_key: str) -> None:
        assert isinstance(other, HostStore)
        super().adopt(key, other, other_key)
        self._blocks[key] = other._blocks.pop(other_key)
        self._memory.adopt(self._blocks[key], other._memory)

    def drop(self, key: str) -> None:
        super().drop(key)
        self._memory.free(self._blocks.pop(key))

    def close(self) -> None:
        for key in list(self._tensors):
            self.drop(key)
