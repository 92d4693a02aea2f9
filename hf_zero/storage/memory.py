"""Shards that stay in memory: of the compute device, and what a store in the host's memory has in common with it."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from hf_zero.native.host_memory import private_pages
from hf_zero.storage.base import BorrowedTensors, ShardStore


class MemoryStore(ShardStore):
    """Every shard is one tensor; a borrow hands out the tensor itself."""

    is_memory = True

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
        return self._tensors[key]

    def can_adopt(self, other: ShardStore) -> bool:
        return type(other) is type(self) and isinstance(other, MemoryStore) and other.device == self.device

    def adopt(self, key: str, other: ShardStore, other_key: str) -> None:
        assert isinstance(other, MemoryStore)
        if key in self._tensors:
            raise AssertionError(f"{key} exists already")
        self._tensors[key] = other._tensors.pop(other_key)

    def prefetch(self, keys: Sequence[str]) -> None:
        return None

    def borrow(
        self, keys: Sequence[str], *, write: bool = False, overwrite: bool = False, staged: bool = False
    ) -> BorrowedTensors:
        if staged:
            raise AssertionError(f"{type(self).__name__} cannot stage writes (can_stage is False)")
        if overwrite and not write:
            raise AssertionError("overwrite=True needs write=True")
        return BorrowedTensors([self._tensors[key] for key in keys])

    def flush(self) -> None:
        return None

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
