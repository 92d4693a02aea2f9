"""Shards that stay in memory: of the compute device, or of the host, pinned where a device copies from it."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from hf_zero.native.host_memory import private_pages
from hf_zero.native.pinning import HostMemory
from hf_zero.storage.base import BorrowedTensors, ShardStore


class MemoryStore(ShardStore):
    """Every shard is one tensor; a borrow hands out the tensor itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # the one that computes
        self._tensors: dict[str, torch.Tensor] = {}

    @abc.abstractmethod
    def _allocate(self, key: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros."""

    def create(self, key: str, numel: int, dtype: torch.dtype) -> None:
        if key in self._tensors:
            raise AssertionError(f"{key} exists already")
        self._tensors[key] = self._allocate(key, numel, dtype)

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor behind `key`; it stays until `drop`, so an optimizer may hold views of it."""
        return self._tensors[key]

    def can_adopt(self, other: ShardStore) -> bool:
        return type(other) is type(self) and isinstance(other, MemoryStore) and other.device == self.device

    def adopt(self, key: str, other: MemoryStore, other_key: str) -> None:
        """Take the tensor under `other_key` out of a store that passes `can_adopt`. Nothing is copied."""
        if key in self._tensors:
            raise AssertionError(f"{key} exists already")
        self._tensors[key] = other._tensors.pop(other_key)

    def prefetch(self, keys: Sequence[str]) -> None:
        """Nothing to do: every key is in memory."""

    def borrow(self, keys: Sequence[str], *, write: bool = False, overwrite: bool = False) -> BorrowedTensors:
        if overwrite and not write:
            raise AssertionError("overwrite=True needs write=True")
        return BorrowedTensors([self._tensors[key] for key in keys])

    def drop(self, key: str) -> None:
        del self._tensors[key]

    def usage(self) -> dict[str, int]:
        return {key: tensor.numel() * tensor.element_size() for key, tensor in self._tensors.items()}


class DeviceStore(MemoryStore):
    """Shards on the device that computes."""

    is_on_device = True

    def _allocate(self, key: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.device.type != "cpu" or not numel:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        # Pages of zeros, made in one go: torch.zeros would fault on each of them and write it once more. Small ones,
        # unlike numpy's: where memory is fragmented, the kernel takes long to find huge ones.
        return torch.frombuffer(private_pages(numel * dtype.itemsize, populate=True), dtype=dtype)


class HostStore(MemoryStore):
    """Every shard is a page-aligned CPU tensor; a borrow hands out the tensor itself.

    Copies between it and the device, and waiting for them, are the caller's: the store knows no streams.

    Args:
        device: The device that computes.
        pin: Pin the memory for that device, unless it is the CPU. A block that cannot be pinned is pageable; that is
            logged once.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        super().__init__(device)
        self._memory = HostMemory(device, pin=pin)
        self._blocks: dict[str, torch.Tensor] = {}  # uint8, rounded up to pages
        self._closed = False

    def _allocate(self, key: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        self._blocks[key] = self._memory.allocate(nbytes)
        return self._blocks[key][:nbytes].view(dtype)

    def can_adopt(self, other: ShardStore) -> bool:
        return super().can_adopt(other) and isinstance(other, HostStore) and other._memory.pins == self._memory.pins

    def adopt(self, key: str, other: MemoryStore, other_key: str) -> None:
        assert isinstance(other, HostStore)
        super().adopt(key, other, other_key)
        self._blocks[key] = other._blocks.pop(other_key)
        self._memory.adopt(self._blocks[key], other._memory)

    def drop(self, key: str) -> None:
        if self._closed:  # who had the key may end after the store: an average that outlives its engine
            return
        super().drop(key)
        self._memory.free(self._blocks.pop(key))

    def close(self) -> None:
        self._closed = True
        self._tensors.clear()
        self._memory.free(*self._blocks.values())
        self._blocks.clear()
