"""Memory for copies of saved inputs: blocks that go round, or an arena for a fixed number of checkpoints.

A block is taken in forward and given back when autograd has dropped what it stood for. After the first step all of
them are there: `allocations` counts how often the system was asked for more.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch

from hf_zero.native.host_memory import PAGE
from hf_zero.native.pinning import HostMemory

_ALIGNMENT = 512  # bytes; a view of any type starts at a multiple of its size
_STEPS = 8  # sizes of blocks between two powers of two: at most an eighth is unused
_SPARE = 2  # idle host memory goes when there is more than so many times what was in use at once


class InputMemory(abc.ABC):
    """Blocks of one kind of memory (uint8, 1-D), at least as large as asked for."""

    def __init__(self) -> None:
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
        """Nobody uses the block any more but what the current stream, or one that it waits for, was given."""
        self.live_bytes -= block.numel()
        self._give(block)

    @abc.abstractmethod
    def release_idle(self) -> None:
        """Give back to the system what is not in use."""

    @abc.abstractmethod
    def _take(self, nbytes: int) -> torch.Tensor: ...

    @abc.abstractmethod
    def _give(self, block: torch.Tensor) -> None: ...


class DeviceBlocks(InputMemory):
    """From torch's allocator, which pools by itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def release_idle(self) -> None: ...

    def _take(self, nbytes: int) -> torch.Tensor:
        self.allocations += 1
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _give(self, block: torch.Tensor) -> None: ...


class HostBlocks(InputMemory):
    """Pinned host memory. Batches of other lengths reuse blocks of up to twice the size."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
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
        allocate: Makes a uint8 tensor of so many bytes.
        free: Is given such tensors back.
    """

    def __init__(
        self,
        number: int,
        allocate: Callable[[int], torch.Tensor],
        free: Callable[[torch.Tensor], None] = lambda memory: None,
    ) -> None:
        super().__init__()
        self._number = number
        self._allocate, self._free = allocate, free
        self._areas: list[_Slots] = []

    @classmethod
    def on_host(cls, number: int, device: torch.device) -> Arena:
        memory = HostMemory(device, pin=True)
        return cls(number, lambda nbytes: memory.allocate(nbytes, fork=False), memory.free)

    @classmethod
    def on_device(cls, number: int, device: torch.device) -> Arena:
        return cls(number, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device))

    @property
    def total_bytes(self) -> int:
        return sum(area.memory.numel() for area in self._areas)

    def release_idle(self) -> None:
        self._release(lambda area: True)

    def _take(self, nbytes: int) -> torch.Tensor:
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        fitting = [area for area in self._areas if area.size >= size and area.free]
        if not fitting:
            self._release(lambda area: area.size < size)  # of shorter batches
            self.allocations += 1
            fitting = [_Slots(self._allocate(self._number * size), size, self._number)]
            self._areas += fitting
        return min(fitting, key=lambda area: area.size).take()

    def _give(self, block: torch.Tensor) -> None:
        next(area for area in self._areas if area.holds(block)).give(block)

    def _release(self, which: Callable[[_Slots], bool]) -> None:
        idle = [area for area in self._areas if area.is_idle and which(area)]
        self._areas = [area for area in self._areas if area not in idle]
        for area in idle:
            self._free(area.memory)


class _Slots:
    """One area of an arena."""

    def __init__(self, memory: torch.Tensor, size: int, number: int) -> None:
        self.memory, self.size, self._number = memory, size, number
        self.free = list(range(number))

    @property
    def is_idle(self) -> bool:
        return len(self.free) == self._number

    def take(self) -> torch.Tensor:
        start = self.free.pop(0) * self.size
        return self.memory[start : start + self.size]

    def holds(self, block: torch.Tensor) -> bool:
        return 0 <= block.data_ptr() - self.memory.data_ptr() < self.memory.numel()

    def give(self, block: torch.Tensor) -> None:
        self.free.append((block.data_ptr() - self.memory.data_ptr()) // self.size)


def _rounded_up(nbytes: int) -> int:
    """To whole pages, in few different sizes."""
    step = max(PAGE, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step
