"""A copy of what a rank saves, in host memory, so that training can go on while it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from hf_zero.checkpoint.writer import Chunked, SliceState
from hf_zero.native.pinning import HostMemory

Buffers = Mapping[str, torch.Tensor]


class SnapshotMemory:
    """Memory of one copy at a time, pinned where a device copies to it.

    It stays between saves: fresh memory costs a page fault for each page.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self._host = HostMemory(device, pin=pin)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def copy(self, states: Sequence[SliceState], buffers: Buffers) -> tuple[list[SliceState], dict[str, torch.Tensor]]:
        """The same in memory of this object, until the next call. Values are there when it returns."""
        tensors = [*buffers.values(), *(tensor for state in states for tensor in state.tensors.values())]
        needed = sum(_rounded(_nbytes(tensor)) for tensor in tensors)
        if needed > self._memory.numel():
            self.free()  # never two of them
            self._memory = self._host.allocate(needed, fork=False)
        self._used = 0
        copied = {name: self._copy(tensor.detach().reshape(-1)).view(tensor.shape) for name, tensor in buffers.items()}
        return [self._copied(state) for state in states], copied

    def free(self) -> None:
        """Give the memory back; what was copied is lost."""
        self._host.free(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _copied(self, state: SliceState) -> SliceState:
        return dataclasses.replace(state, tensors={kind: self._copy(tensor) for kind, tensor in state.tensors.items()})

    def _copy(self, tensor: torch.Tensor | Chunked) -> torch.Tensor:
        numel = tensor.numel if isinstance(tensor, Chunked) else tensor.numel()
        target = self._take(numel * tensor.dtype.itemsize).view(tensor.dtype)
        start = 0
        for chunk in tensor.chunks() if isinstance(tensor, Chunked) else [tensor.detach()]:
            target[start : start + chunk.numel()].copy_(chunk)
            start += chunk.numel()
        return target

    def _take(self, nbytes: int) -> torch.Tensor:
        start, self._used = self._used, self._used + _rounded(nbytes)
        return self._memory[start : start + nbytes]


def _nbytes(tensor: torch.Tensor | Chunked) -> int:
    numel = tensor.numel if isinstance(tensor, Chunked) else tensor.numel()
    return numel * tensor.dtype.itemsize


def _rounded(nbytes: int) -> int:
    """Every tensor starts at a multiple of 64 bytes: a cache line, and of any element's size."""
    return -(-nbytes // 64) * 64
