"""Shards in the memory of the compute device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.store.base import Lease, ShardStore, check_in_place


class DeviceStore(ShardStore):
    """Every shard is a tensor on the device that computes; a lease hands out the tensor itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def create(self, key: str, numel: int, dtype: torch.dtype) -> None:
        if key in self._tensors:
            raise AssertionError(f"{key} exists already")
        self._tensors[key] = torch.zeros(numel, dtype=dtype, device=self.device)

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

    def usage(self) -> dict[str, int]:
        return {key: tensor.numel() * tensor.element_size() for key, tensor in self._tensors.items()}
