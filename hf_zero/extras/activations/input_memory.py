"""Memory for copies of saved inputs: blocks that go round, or an arena for a fixed number of checkpoints.

A block is taken in forward and given back when autograd has dropped what it stood for. After the first step all of
them are there: `allocations` counts how often the system was asked for more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_zero.native.area import Area
from hf_zero.native.host_memory import PAGE
from hf_zero.native.pinning import HostMemory

_ALIGNMENT = 512  # bytes; a view of any type starts at a multiple of its size
_STEPS = 8  # sizes of blocks between two powers of two: at most an eighth is unused
_SPARE = 2  # idle host memory goes when there is more than so many times what was in use at once


class InputMemory:
    """Gives blocks of memory (uint8, 1-D) at least as large as asked for: from torch's allocator, which pools."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocations = 0
        self.live_bytes = 0  # of blocks that are in use
        self.peak_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A block with any content. What used it last is ordered before what the current stream does next."""
        block = self._take(nbytes)
        self.live_bytes += block.numel()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return block

    def give(self, block: torch.Tensor) -> None:
        """Take a block back that nobody uses but the current stream, and streams that it waits for."""
        self.live_bytes -= block.numel()
        self._give(block)

    def release_idle(self) -> None:
        """Give back to the system what is not in use."""

    def _take(self, nbytes: int) -> torch.Tensor:
        self.allocations += 1
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _give(self, block: torch.Tensor) -> None: ...


class HostBlocks(InputMemory):
    """Pinned host memory. Batches of other lengths reuse blocks of up to twice the size."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._memory = HostMemory(device, pin=True)
        self._idle: list[torch.Tensor] = []

    def release_idle(self) -> None:
        self._memory.free(*self._idle)
        self._idle.clear()

    def _take(self, nbytes: int) -> torch.Tensor:
        size = _rounded_up(nbytes)
        fitting = [index for index, block in enumerate(self._idle) if size <= block.numel() <= 2 * size]
        if fitting:
            return self._idle.pop(min(fitting, key=lambda index: self._idle[index].numel()))
        idle = sum(block.numel() for block in self._idle)
        if idle and idle + self.live_bytes + size > _SPARE * max(self.peak_bytes, self.live_bytes + size):
            self.release_idle()
        self.allocations += 1
        return self._memory.allocate(size, fork=False)

    def _give(self, block: torch.Tensor) -> None:
        self._idle.append(block)


class Arena(InputMemory):
    """Contiguous areas of `number` equal slots each; one area for inputs of one size.

    It grows in the first step only, or when larger inputs come. So inputs do not fragment the memory around them.

    Args:
        on_host: The areas are pinned host memory, not memory of the device.
    """

    def __init__(self, number: int, device: torch.device, *, on_host: bool) -> None:
        super().__init__(device)
        self._number = number
        self._memory = HostMemory(device, pin=True) if on_host else None
        self._areas: list[tuple[int, Area]] = []  # with the size of their slots, smallest first

    def release_idle(self) -> None:
        self._release(lambda size: True)

    def _take(self, nbytes: int) -> torch.Tensor:
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for slot, area in self._areas:
            if slot >= size and (block := area.carve(slot)) is not None:
                return block
        self._release(lambda slot: slot < size)  # of shorter batches
        total = self._number * size
        self.allocations += 1
        if self._memory is None:
            memory = torch.empty(total, dtype=torch.uint8, device=self._device)
        else:
            memory = self._memory.allocate(total, fork=False)[:total]
        self._areas.append((size, area := Area(memory)))
        self._areas.sort(key=lambda one: one[0])
        block = area.carve(size)
        assert block is not None
        return block

    def _give(self, block: torch.Tensor) -> None:
        next(area for _, area in self._areas if area.holds(block)).fill(block)

    def _release(self, which: Callable[[int], bool]) -> None:
        idle = [area for size, area in self._areas if area.is_idle and which(size)]
        self._areas = [one for one in self._areas if one[1] not in idle]
        if self._memory is not None:
            self._memory.free(*(area.memory for area in idle))


def _rounded_up(nbytes: int) -> int:
    """Round up to whole pages, so that few different sizes occur."""
    step = max(PAGE, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step
