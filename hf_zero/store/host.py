"""Shards in the memory of the host, pinned where a CUDA device copies from and to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.store.base import Lease, ShardStore, check_in_place
from hf_zero.store.staging import HostMemory


class HostStore(ShardStore):
    """Every shard is a page-aligned CPU tensor; a lease hands out the tensor itself.

    Copies between it and the device, and waiting for them, are the caller's: the store knows no streams.

    Args:
        device: The device that computes.
        pin: Pin the memory where that device is CUDA. A block that cannot be pinned is pageable; that is said once.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self.device = device
        self._memory = HostMemory(device, pin=pin)
        self._blocks: dict[str, torch.Tensor] = {}  # uint8, whole pages
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def pinned_bytes(self) -> int:
        return self._memory.pinned_bytes

    def create(self, key: str, numel: int, dtype: torch.dtype) -> None:
        if key in self._tensors:
            raise AssertionError(f"{key} exists already")
        nbytes = numel * dtype.itemsize
        block = self._memory.allocate(nbytes)
        self._blocks[key] = block
        self._tensors[key] = block[:nbytes].view(dtype)

    def tensor(self, key: str) -> torch.Tensor:
        """The one tensor behind `key`; it stays where it is until `drop`, so an optimizer may hold views of it."""
        return self._tensors[key]

    def prefetch(self, keys: Sequence[str]) -> None:
        return None

    def lease(
        self, keys: Sequence[str], *, write: bool = False, overwrite: bool = False, staged: bool = False
    ) -> Lease:
        check_in_place(self, write, overwrite, staged)
        return Lease([self._tensors[key] for key in keys])

    def flush(self) -> None:
        return None

    def drop(self, key: str) -> None:
        del self._tensors[key]
        self._memory.free(self._blocks.pop(key))

    def usage(self) -> dict[str, int]:
        return {key: tensor.numel() * tensor.element_size() for key, tensor in self._tensors.items()}

    def close(self) -> None:
        for key in list(self._tensors):
            self.drop(key)
