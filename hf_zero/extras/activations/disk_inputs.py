"""Saved inputs on disk: keys of the offload's store, written behind the forward and read ahead of the backward.

Staging memory is bounded: BUFFERS blocks of the size of the largest input. Files go with the engine, or the process.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable

import torch

from hf_zero.config.resolved import Aio
from hf_zero.native.host_memory import page_rounded
from hf_zero.storage import BorrowedTensors, DiskStore, StagingPool, SwapFolder
from hf_zero.storage.copy_stream import CopyStreams

BUFFERS = 4  # one that is used, one that is read ahead, and two that are written

Guard = Callable[[], contextlib.AbstractContextManager[None]]


class DiskInputs:
    """The file of one process.

    Args:
        guard: Around all that may fail: tells the other ranks.
    Raises:
        OffloadError: The folder cannot be used; later, the disk is full or has failed.
    """

    def __init__(self, nvme_path: str, device: torch.device, rank: int, aio: Aio, guard: Guard) -> None:
        self._device = device
        self._guard = guard
        self._folder = SwapFolder(nvme_path, rank)
        self._pool = StagingPool(1, device=device, pin=True)
        try:
            self.store = DiskStore(self._folder, "saved_inputs", aio=aio, pool=self._pool, preallocate=True)
        except BaseException:
            self._folder.close()
            raise
        self._number = 0
        # By the garbage collector, which may come while a lock of the store is held: they are dropped later.
        self.let_go: collections.deque[DiskCopy] = collections.deque()
        self.live_bytes = self.peak_bytes = 0

    @property
    def allocations(self) -> int:
        return self._pool.allocations

    def begin(self, numel: int, dtype: torch.dtype) -> DiskCopy:
        """Room for an input, whose elements go to `data`."""
        self.drop_unused()
        nbytes = numel * dtype.itemsize
        self._pool.budget_bytes = max(self._pool.budget_bytes, BUFFERS * page_rounded(nbytes))
        self._number += 1
        key = f"saved input {self._number} (activation_checkpointing.nvme_path)"
        with self._guard():
            self.store.create(key, numel, dtype)
            try:
                borrowed = self.store.borrow([key], write=True, overwrite=True)
            except BaseException:
                self.store.drop(key)
                raise
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return DiskCopy(self, key, nbytes, borrowed)

    def prefetch(self, key: str) -> None:
        self.store.prefetch([key])

    def read(self, key: str) -> torch.Tensor:
        """The elements, 1-D, in memory of their own on the device."""
        with self._guard(), self.store.borrow([key]) as borrowed:
            return borrowed.tensors[0].to(self._device, copy=True)

    def drop_unused(self) -> None:
        """Forget what autograd has dropped."""
        while self.let_go:
            copy = self.let_go.popleft()
            copy.discard()
            self.store.drop(copy.key)
            self.live_bytes -= copy.nbytes

    def close(self) -> None:
        """Remove the file."""
        self.drop_unused()
        self.store.close()
        self._folder.close()


class DiskCopy:
    """One input."""

    def __init__(self, inputs: DiskInputs, key: str, nbytes: int, borrowed: BorrowedTensors) -> None:
        self.key, self.nbytes = key, nbytes
        self.saved: torch.Event | None = None  # the copy off the device is over
        self._inputs = inputs
        self._borrowed: BorrowedTensors | None = borrowed  # until it is written

    @property
    def data(self) -> torch.Tensor:
        """1-D, typed: where the elements go in forward."""
        assert self._borrowed is not None
        return self._borrowed.tensors[0]

    def arrived(self) -> None:
        """Nothing is copied to `data` any more but what `saved` tells: start the write when that is over."""
        if self._borrowed is not None:
            if self.saved is not None:
                self.saved.synchronize()
            borrowed, self._borrowed = self._borrowed, None
            borrowed.release()

    def bring(self, streams: CopyStreams) -> None:
        """Start to read it."""
        self.arrived()
        self._inputs.prefetch(self.key)

    def brought(self) -> torch.Tensor:
        """In memory of its own on the device."""
        return self._inputs.read(self.key)

    def discard(self) -> None:
        """Nobody needs it, so it need not be written."""
        if self._borrowed is not None:
            if self.saved is not None:
                self.saved.synchronize()
            borrowed, self._borrowed = self._borrowed, None
            borrowed.discard()

    def let_go(self) -> None:
        """Autograd has dropped the input."""
        self._inputs.let_go.append(self)
