"""Memory that is used again: blocks that are kept and lent in pieces, and a count of what torch's allocator keeps."""

from __future__ import annotations

import collections
import itertools

import torch

from hf_zero.native.pinning import HostMemory

_ALIGNMENT = 64  # bytes: a cache line, and a multiple of the size of any type


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class BlockPool:
    """Lends pieces of blocks of memory (uint8, 1-D), and keeps the blocks for what is asked next.

    Fresh memory costs a page fault for every page; pinning locks them all, and unpinning waits for the device. So a
    piece is taken from any gap that is large enough, whatever size its block was made for. Where none is, the blocks
    that nobody uses go, which are too small, before a new one is made: what is kept follows the sizes in use.

    A piece of the same size is lent again as it came back, which costs next to nothing. When another size is asked
    for, pieces become gaps, and gaps that touch become one.

    One thread at a time may call; `release` may come at any moment, of a finalizer too.

    Args:
        source: The maker of blocks: host memory, or torch's allocator for a device.
    """

    def __init__(self, source: HostMemory | torch.device) -> None:
        self._source = source
        self._blocks: list[_Block] = []  # oldest first: the same requests again find the same places
        self._returned: collections.deque[torch.Tensor] = collections.deque()  # by any thread
        self._idle: dict[int, collections.deque[torch.Tensor]] = collections.defaultdict(collections.deque)  # by size
        self.allocations = 0  # how often a block was made
        self.peak_bytes = 0
        self.live_bytes = 0  # of pieces in use
        self.peak_live_bytes = 0

    @property
    def blocks(self) -> list[torch.Tensor]:
        """The memory of all blocks."""
        return [block.memory for block in self._blocks]

    @property
    def nbytes(self) -> int:
        return sum(block.memory.numel() for block in self._blocks)

    def acquire(self, nbytes: int, *, block_bytes: int = 0) -> torch.Tensor:
        """A piece of at least `nbytes` with any content.

        Args:
            block_bytes: The least size of the block that is made for it where no gap is large enough.
        Raises:
            OSError: The system has no memory.
        """
        size = _aligned(max(nbytes, 1))
        piece = self._take(size)
        if piece is None:
            self.release_idle()
            piece = self._add_block(max(size, block_bytes)).carve(size)
            assert piece is not None
        self.live_bytes += size
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        return piece

    def release(self, piece: torch.Tensor) -> None:
        """Keep a piece for reuse; nobody may use it any more but the current stream, and streams that it waits for."""
        self.live_bytes -= piece.numel()
        self._returned.append(piece)

    def fits(self, sizes: list[int]) -> bool:
        """Whether pieces of these sizes can be acquired together without a new block."""
        tried = [self._take(_aligned(size)) for size in sizes]
        found = [piece for piece in tried if piece is not None]
        self._returned.extend(found)
        return len(found) == len(tried)

    def release_idle(self) -> None:
        """Give the blocks that nobody uses back to the system."""
        self._fill_gaps()
        idle = [block.memory for block in self._blocks if block.is_idle]
        self._blocks = [block for block in self._blocks if not block.is_idle]
        if isinstance(self._source, HostMemory):
            self._source.free(*idle)

    def _add_block(self, nbytes: int) -> _Block:
        if isinstance(self._source, HostMemory):
            memory = self._source.allocate(nbytes, fork=False)
        else:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._source)
        self._blocks.append(block := _Block(memory))
        self.allocations += 1
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return block

    def _take(self, size: int) -> torch.Tensor | None:
        self._sort_returned()
        if same := self._idle.get(size):
            return same.popleft()
        self._fill_gaps()
        return next((piece for block in self._blocks if (piece := block.carve(size)) is not None), None)

    def _sort_returned(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._idle[piece.numel()].append(piece)

    def _fill_gaps(self) -> None:
        self._sort_returned()
        for piece in itertools.chain.from_iterable(self._idle.values()):
            next(block for block in self._blocks if block.holds(piece)).fill(piece)
        self._idle.clear()  # or every size that was ever asked for would be looked at each time


class _Block:
    """One allocation that is lent in pieces: each is taken from the first gap that is large enough."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._gaps = [(0, memory.numel())]  # in order; between two of them something is in use

    @property
    def is_idle(self) -> bool:
        """Whether no piece is in use."""
        return self._gaps == [(0, self.memory.numel())]

    def carve(self, size: int) -> torch.Tensor | None:
        """A piece of `size` bytes, or None if no gap is large enough."""
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                return self.memory[start : start + size]
        return None

    def holds(self, piece: torch.Tensor) -> bool:
        """Whether `piece` is one of this block."""
        return bool(piece.untyped_storage()._cdata == self.memory.untyped_storage()._cdata)

    def fill(self, piece: torch.Tensor) -> None:
        """Take a piece back."""
        start = int(piece.storage_offset() - self.memory.storage_offset())  # a plan has no addresses
        gaps: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (start, start + piece.numel())]):
            if gaps and gaps[-1][1] == gap[0]:
                gaps[-1] = (gaps[-1][0], gap[1])
            else:
                gaps.append(gap)
        self._gaps = gaps


class Demand:
    """Counts requests to torch's allocator that nothing given back before can meet.

    An allocator that pools, as CUDA's does, asks the system for those only.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._free: collections.Counter[int] = collections.Counter()  # size in bytes -> how many were given back

    def add(self, nbytes: int) -> None:
        """Count a request."""
        if self._free[nbytes]:
            self._free[nbytes] -= 1
        else:
            self.allocations += 1

    def remove(self, nbytes: int) -> None:
        """Count memory that was given back."""
        self._free[nbytes] += 1
