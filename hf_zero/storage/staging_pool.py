"""Host memory in pages: a helper that allocates (and pins) it, and the bounded pool that disk stores share.

[Note: Why not torch.empty(pin_memory=True)]
torch's host allocator rounds every block up to a power of two and never gives it back. Here memory is mapped in exact
page-rounded sizes, costs nothing until it is touched (the kernel maps zeros), and is registered with CUDA as it is.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import mmap
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from hf_zero.errors import OffloadError
from hf_zero.native.host_memory import transfer_memory

PAGE = mmap.PAGESIZE

# Seconds a request waits for memory that others borrow before it is served beyond the budget: they may be waiting for
# the very thread that asks.
PATIENCE_S = 10.0

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device

logger = logging.getLogger(__name__)


def page_rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class HostMemory:
    """Allocates page-aligned CPU memory that reads as zeros; pins it where `pin` and `device` is CUDA.

    See [Note: Why not torch.empty(pin_memory=True)].
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self.pins = pin and device.type == "cuda"
        self._device = device
        self._registered: dict[int, int] = {}  # what is pinned: address -> bytes
        self._warned = False

    def allocate(self, nbytes: int, *, fork: bool = True) -> torch.Tensor:
        """uint8 [nbytes rounded up to pages]; see transfer_memory. It lives as long as any view of the tensor."""
        block = transfer_memory(page_rounded(nbytes), fork=fork)
        if self.pins and block.numel():
            self._register(block)
        return block

    def free(self, block: torch.Tensor) -> None:
        """Undo the pinning; the pages go when the last view goes."""
        if self._registered.pop(block.data_ptr(), None) is not None:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    def adopt(self, block: torch.Tensor, other: HostMemory) -> None:
        """Become the one that frees a block which `other` allocated."""
        if other._registered.pop(block.data_ptr(), None) is not None:
            self._registered[block.data_ptr()] = block.numel()

    def _register(self, block: torch.Tensor) -> None:
        with torch.cuda.device(self._device):
            status = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), _PORTABLE))
        if status == 0:
            self._registered[block.data_ptr()] = block.numel()
            return
        self._clear_cuda_error()
        if not self._warned:
            self._warned = True
            logger.warning(
                "%d bytes of host memory could not be pinned (CUDA error %d; %d bytes are pinned so far): they and "
                "what else cannot be pinned stay pageable, and copies to and from the device are slower. See "
                "`ulimit -l`, the memory limit of the container, or set pin_memory to false.",
                block.numel(),
                status,
                sum(self._registered.values()),
            )

    def _clear_cuda_error(self) -> None:
        """CUDA keeps the failure as its last error, and the next kernel launch would report it as its own."""
        try:
            torch.zeros(1, device=self._device)
        except RuntimeError as error:
            logger.debug("cleared: %s", error)


@dataclasses.dataclass(eq=False)
class StagingBlock:
    """Memory taken from a pool: uint8, rounded up to pages."""

    memory: torch.Tensor
    owner: int | None  # thread that borrowed it; None while a transfer without a borrow uses it

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class Reclaimer(Protocol):
    """A user of the pool that can give memory back before anybody releases a borrow."""

    def reclaim_written(self) -> bool:
        """Give back the memory of a write that no borrow uses, waiting for its end; False if there is none.

        Both methods may wait for the disk, and are called without any lock of the pool held.
        """

    def reclaim_prefetched(self) -> bool:
        """Give back the memory of a read that nobody has asked for yet; False if there is none."""


class StagingPool:
    """At most `nbytes` of page-aligned host memory, shared by the borrowed of one or more stores.

    Blocks that are given back stay for the next request of exactly their size, and are unmapped when another size
    needs the room. A request that cannot be met waits: for memory that the stores can reclaim, then for other threads
    to release their borrowed. Who came first is served first. Where waiting cannot help, because the request alone is
    too large or because everybody with memory waits for more, the budget grows to what is needed, with one warning.
    """

    def __init__(self, nbytes: int, *, device: torch.device, pin: bool) -> None:
        self.budget_bytes = nbytes
        self.current_bytes = 0  # in use and kept for reuse
        self.peak_bytes = 0
        self._memory = HostMemory(device, pin=pin)
        self._idle: dict[int, list[torch.Tensor]] = {}  # by size
        self._held: collections.Counter[int | None] = collections.Counter()  # owner -> bytes in use
        self._line: dict[int, None] = {}  # threads with a request that had no room, in their order
        self._waiting: set[int] = set()  # those of them that can do nothing but wait for others
        self._reclaimers: list[Reclaimer] = []
        self._warned = False
        self._changed = threading.Condition()
        self._version = 0  # counts what a waiting thread would want to look at

    def register(self, reclaimer: Reclaimer) -> None:
        with self._changed:
            self._reclaimers.append(reclaimer)

    def unregister(self, reclaimer: Reclaimer) -> None:
        with self._changed:
            self._reclaimers.remove(reclaimer)

    def take_now(self, nbytes: int) -> StagingBlock | None:
        """One block of at least `nbytes`; None if there is no room now."""
        with self._changed:
            return self._allocate([nbytes], None)[0] if self._may_take([nbytes], None) else None

    def take_all(self, sizes: Sequence[int]) -> list[StagingBlock]:
        """One block per size, all together or none yet: a request that waits holds nothing of what it asked for."""
        me = threading.get_ident()
        deadline = time.monotonic() + PATIENCE_S
        blocks = None
        try:
            while blocks is None:
                with self._changed:
                    version = self._version
                    reclaimers = list(self._reclaimers)
                    blocks = self._allocate(sizes, me) if self._may_take(sizes, me) else None
                    if blocks is None:
                        self._line.setdefault(me)
                # A write has to end anyway; a read that is thrown away has to be done again.
                if blocks is None and not (
                    any(one.reclaim_written() for one in reclaimers)
                    or any(one.reclaim_prefetched() for one in reclaimers)
                ):
                    blocks = self._wait_for_release(sizes, me, version, deadline)
            return blocks
        finally:
            with self._changed:
                if me in self._line:
                    del self._line[me]
                    self._notify()

    def give(self, block: StagingBlock) -> None:
        """Back to the pool. Nothing may use the memory any more, the disk included."""
        with self._changed:
            self._held[block.owner] -= block.nbytes
            self._idle.setdefault(block.nbytes, []).append(block.memory)
            self._shrink(0)
            self._notify()

    def pass_on(self, block: StagingBlock, *, to_thread: bool) -> None:
        """The block belongs to the borrow of this thread from now on, or to a transfer."""
        with self._changed:
            self._held[block.owner] -= block.nbytes
            block.owner = threading.get_ident() if to_thread else None
            self._held[block.owner] += block.nbytes
            self._notify()

    def close(self) -> None:
        """Unmap what is kept for reuse."""
        with self._changed:
            for blocks in self._idle.values():
                for memory in blocks:
                    self._unmap(memory)
            self._idle.clear()

    def _wait_for_release(
        self, sizes: Sequence[int], me: int, version: int, deadline: float
    ) -> list[StagingBlock] | None:
        """Wait until something changes since `version`; where that cannot help, grow and return the blocks."""
        with self._changed:
            self._waiting.add(me)
            try:
                while self._version == version:
                    # Those who only wait for their turn are not stuck: somebody before them is, or will release.
                    mine = me == next(iter(self._line)) or self._held[me] > 0
                    stuck = mine and all(owner in self._waiting for owner, held in self._held.items() if held)
                    left = deadline - time.monotonic()
                    if stuck or left <= 0:
                        self._grow(sum(map(page_rounded, sizes)))
                        return self._allocate(sizes, me)
                    self._changed.wait(left)
            finally:
                self._waiting.discard(me)
            return None

    # ---------------------------------------------------------------- below: the condition is held
    def _may_take(self, sizes: Sequence[int], owner: int | None) -> bool:
        """There is room, and nobody has waited for longer. A hint (None) never goes before those who wait; a thread
        with borrowed does, or they would wait for each other."""
        first = next(iter(self._line), owner)
        fits = self._held.total() + sum(map(page_rounded, sizes)) <= self.budget_bytes
        return fits and (owner == first or (owner is not None and self._held[owner] > 0))

    def _allocate(self, sizes: Sequence[int], owner: int | None) -> list[StagingBlock]:
        rounded = [page_rounded(size) for size in sizes]
        # What can be reused first: mapping more may unmap what is idle.
        memories = {index: self._idle[size].pop() for index, size in enumerate(rounded) if self._idle.get(size)}
        try:
            for index, size in enumerate(rounded):
                if index not in memories:
                    memories[index] = self._map(size)
        except OSError as error:
            for memory in memories.values():
                self._idle.setdefault(memory.numel(), []).append(memory)
            raise OffloadError(
                f"{sum(rounded)} bytes of host memory for staging are not there ({error.strerror or error}); "
                f"{self.current_bytes} bytes are in use. Lower buffer_size, buffer_count or sub_group_size."
            ) from error
        self._held[owner] += sum(rounded)
        return [StagingBlock(memories[index], owner) for index in range(len(rounded))]

    def _map(self, size: int) -> torch.Tensor:
        self._shrink(size)
        memory = self._memory.allocate(size, fork=False)
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return memory

    def _shrink(self, wanted: int) -> None:
        """Unmap idle blocks until `wanted` more bytes fit in the budget, sizes that were asked for long ago first."""
        for size, blocks in list(self._idle.items()):
            while blocks and self.current_bytes + wanted > self.budget_bytes:
                self._unmap(blocks.pop())
            if not blocks:
                del self._idle[size]

    def _unmap(self, memory: torch.Tensor) -> None:
        self.current_bytes -= memory.numel()
        self._memory.free(memory)

    def _notify(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _grow(self, request: int) -> None:
        """Kept after the request, so that the same one does not wait (or map memory) again at every step."""
        needed = self._held.total() + request
        if not self._warned:
            self._warned = True
            logger.warning(
                "The staging memory of %d bytes is too small: %d bytes are in use and %d more are needed at once. It "
                "grows to %d bytes. Raise buffer_size (elements) or buffer_count to plan for it, or lower "
                "sub_group_size to need less.",
                self.budget_bytes,
                self._held.total(),
                request,
                needed,
            )
        self.budget_bytes = max(self.budget_bytes, needed)
