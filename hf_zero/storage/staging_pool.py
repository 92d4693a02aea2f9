"""The bounded pool of host memory that disk stores share."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from hf_zero.errors import OffloadError
from hf_zero.native.block_pool import BlockPool
from hf_zero.native.host_memory import page_rounded
from hf_zero.native.pinning import HostMemory

# Seconds a request waits for memory that others borrow before it is served beyond the budget: they may be waiting for
# the very thread that asks.
PATIENCE_S = 10.0

logger = logging.getLogger(__name__)


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
    """Lends at most `nbytes` of page-aligned host memory to the borrowed tensors of one or more stores.

    It lends pieces of one block that is as large as the budget, and of further ones where that was too small; they
    stay until the last store has left, unless the budget grows. A request that cannot be met waits
    for memory that the stores can reclaim, then for other threads to release what they borrow. The first request is
    served first. If waiting cannot help, because the request alone is too large or because everybody with memory waits
    for more, the budget grows to what is needed, with one warning.
    """

    def __init__(self, nbytes: int, *, device: torch.device, pin: bool) -> None:
        self.budget_bytes = nbytes
        self._blocks = BlockPool(HostMemory(device, pin=pin))  # the lock guards it
        self._held: collections.Counter[int | None] = collections.Counter()  # owner -> bytes in use
        self._line: dict[int, None] = {}  # threads with a request that had no room, in their order
        self._waiting: set[int] = set()  # those of them that can do nothing but wait for others
        self._reclaimers: list[Reclaimer] = []
        self._warned = False
        self._changed = threading.Condition()
        self._version = 0  # counts what a waiting thread would want to look at

    @property
    def current_bytes(self) -> int:
        """The bytes in use, and kept for reuse."""
        return self._blocks.nbytes

    @property
    def peak_bytes(self) -> int:
        return self._blocks.peak_bytes

    @property
    def allocations(self) -> int:
        """The number of times that memory was asked of the system."""
        return self._blocks.allocations

    def register(self, reclaimer: Reclaimer) -> None:
        with self._changed:
            self._reclaimers.append(reclaimer)

    def unregister(self, reclaimer: Reclaimer) -> None:
        """The user leaves; with the last one all memory goes, what is still in use as it is given back."""
        with self._changed:
            self._reclaimers.remove(reclaimer)
            self._close_unless_used()

    def try_acquire(self, nbytes: int) -> StagingBlock | None:
        """One block of at least `nbytes`; None if there is no room now."""
        with self._changed:
            return self._allocate([nbytes], None)[0] if self._may_take([nbytes], None) else None

    def acquire(self, sizes: Sequence[int]) -> list[StagingBlock]:
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

    def release(self, block: StagingBlock) -> None:
        """Back to the pool. Nothing may use the memory any more, the disk included."""
        with self._changed:
            self._held[block.owner] -= block.nbytes
            self._blocks.release(block.memory)
            self._close_unless_used()
            self._notify()

    def change_owner(self, block: StagingBlock, *, to_thread: bool) -> None:
        """The block belongs to the borrow of this thread from now on, or to a transfer."""
        with self._changed:
            self._held[block.owner] -= block.nbytes
            block.owner = threading.get_ident() if to_thread else None
            self._held[block.owner] += block.nbytes
            self._notify()

    def close(self) -> None:
        """Give back to the system what is kept for reuse."""
        with self._changed:
            self._blocks.release_idle()

    def _wait_for_release(
        self, sizes: Sequence[int], me: int, version: int, deadline: float
    ) -> list[StagingBlock] | None:
        """Wait until something changes since `version`; where that cannot help, grow and return the blocks."""
        with self._changed:
            self._waiting.add(me)
            try:
                while self._version == version:
                    # A thread that only waits for its turn is not stuck: somebody before it is, or will release.
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
        rounded = [page_rounded(size) for size in sizes]
        fits = self._held.total() + sum(rounded) <= self.budget_bytes and self._has_room(rounded)
        return fits and (owner == first or (owner is not None and self._held[owner] > 0))

    def _has_room(self, rounded: list[int]) -> bool:
        """Whether there are pieces of these sizes in memory that is mapped, or nothing is mapped yet."""
        return not self.current_bytes or self._blocks.fits(rounded)

    def _allocate(self, sizes: Sequence[int], owner: int | None) -> list[StagingBlock]:
        rounded = [page_rounded(size) for size in sizes]
        memories: list[torch.Tensor] = []
        if not self._blocks.fits(rounded):
            self._blocks.release_idle()
        try:
            for size in rounded:
                memories.append(self._blocks.acquire(size, block_bytes=self.budget_bytes - self.current_bytes))
        except OSError as error:
            for memory in memories:
                self._blocks.release(memory)
            raise OffloadError(
                f"{sum(rounded)} bytes of host memory for staging are not there ({error.strerror or error}); "
                f"{self.current_bytes} bytes are in use. Lower buffer_size, buffer_count or sub_group_size."
            ) from error
        self._held[owner] += sum(rounded)
        return [StagingBlock(memory, owner) for memory in memories]

    def _close_unless_used(self) -> None:
        if not self._reclaimers:
            self._blocks.release_idle()

    def _notify(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _grow(self, request: int) -> None:
        """Kept after the request, so that the same one does not wait (or map memory) again at every step."""
        needed = self._held.total() + request
        if needed <= self.budget_bytes:  # there is enough, but not in one piece
            needed = self.budget_bytes + request
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
