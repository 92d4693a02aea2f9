"""A copy of what a rank saves, in host memory, so that training can go on while it is written.

What is on a disk is not copied: the store keeps it as it is, and it is read piece by piece when it is written. See
[Note: Kept contents] in storage/disk.py.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from hf_zero.checkpoint.writer import Chunked, SliceState
from hf_zero.native.host_copy import copy_past_caches
from hf_zero.native.host_memory import PAGE
from hf_zero.native.pinning import HostMemory
from hf_zero.sharding.shard import KeptElements

Buffers = Mapping[str, torch.Tensor]
_PIECE_BYTES = 4 << 20  # read from a disk at once; of pages


def nbytes_of_copy(states: Sequence[SliceState], buffers: Buffers) -> int:
    """Return the bytes that SnapshotMemory needs for a copy."""
    tensors = [*buffers.values(), *_tensors(states)]
    piece = _PIECE_BYTES if any(map(_is_on_disk, tensors)) else 0
    return piece + sum(_rounded(_nbytes(tensor)) for tensor in tensors if not _is_on_disk(tensor))


class SnapshotMemory:
    """Memory of one copy at a time, pinned where a device copies to it.

    It is no BlockPool: the whole copy is one block, whose size is known before. It stays between saves: fresh memory
    costs a page fault for each page, ten times what the copy takes.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self._host = HostMemory(device, pin=pin)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0
        self._kept: list[KeptElements] = []
        self._preparing: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        self._wait()
        return self._memory.numel()

    def prepare(self, nbytes: int) -> None:
        """Take memory for the first copy in the background, so that it does not wait for it."""
        self._wait()
        if nbytes > self._memory.numel():
            self._preparing = threading.Thread(target=self._prepare, args=(nbytes,), name="hf_zero-snapshot-memory")
            self._preparing.start()

    def _prepare(self, nbytes: int) -> None:
        try:
            self._memory = self._host.allocate(nbytes, fork=False)
        except (OSError, RuntimeError, MemoryError):
            return  # the copy asks again, and can say so
        self._memory[::PAGE].fill_(0)

    def _wait(self) -> None:
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            preparing.join()

    def copy(self, states: Sequence[SliceState], buffers: Buffers) -> tuple[list[SliceState], dict[str, torch.Tensor]]:
        """The same in memory of this object, or kept where it is, until `release` or the next call.

        Values in memory are there when it returns. What is kept can be read once.
        """
        self._wait()
        self.release()
        needed = nbytes_of_copy(states, buffers)
        if needed > self._memory.numel():
            self.free()  # never two of them
            self._memory = self._host.allocate(needed, fork=False)
        self._used = _PIECE_BYTES if any(map(_is_on_disk, _tensors(states))) else 0
        copied = {name: self._copy(tensor.detach().reshape(-1)).view(tensor.shape) for name, tensor in buffers.items()}
        return [self._copied(state) for state in states], copied

    def release(self) -> None:
        """Nobody reads any more what is kept on a disk. Any thread may call."""
        kept, self._kept = self._kept, []
        for one in kept:
            one.release()

    def free(self) -> None:
        """Give the memory back; what was copied is lost."""
        self._wait()
        self.release()
        self._host.free(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _copied(self, state: SliceState) -> SliceState:
        tensors = {kind: self._keep(tensor) or self._copy(tensor) for kind, tensor in state.tensors.items()}
        return dataclasses.replace(state, tensors=tensors)

    def _keep(self, tensor: torch.Tensor | Chunked) -> Chunked | None:
        """Keep a tensor that is on a disk, to be read through the first bytes of the memory; None for the rest."""
        if not isinstance(tensor, Chunked) or tensor.keep is None:
            return None
        kept = tensor.keep()
        self._kept.append(kept)
        return Chunked(tensor.numel, tensor.dtype, functools.partial(kept.chunks, self._memory[:_PIECE_BYTES]))

    def _copy(self, tensor: torch.Tensor | Chunked) -> torch.Tensor:
        numel = tensor.numel if isinstance(tensor, Chunked) else tensor.numel()
        target = self._take(numel * tensor.dtype.itemsize).view(tensor.dtype)
        start = 0
        for chunk in tensor.chunks() if isinstance(tensor, Chunked) else [tensor.detach()]:
            copy_past_caches(target[start : start + chunk.numel()], chunk)
            start += chunk.numel()
        return target

    def _take(self, nbytes: int) -> torch.Tensor:
        start, self._used = self._used, self._used + _rounded(nbytes)
        return self._memory[start : start + nbytes]


def _tensors(states: Sequence[SliceState]) -> Iterator[torch.Tensor | Chunked]:
    return (tensor for state in states for tensor in state.tensors.values())


def _is_on_disk(tensor: torch.Tensor | Chunked) -> bool:
    return isinstance(tensor, Chunked) and tensor.keep is not None


def _nbytes(tensor: torch.Tensor | Chunked) -> int:
    numel = tensor.numel if isinstance(tensor, Chunked) else tensor.numel()
    return numel * tensor.dtype.itemsize


def _rounded(nbytes: int) -> int:
    """Every tensor starts at a multiple of 64 bytes: a cache line, and of any element's size."""
    return -(-nbytes // 64) * 64
