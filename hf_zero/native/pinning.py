"""Host memory in pages, pinned for the device that copies from it and to it. No other file names CUDA.

[Note: Why not torch.empty(pin_memory=True)]
torch's host allocator rounds every block up to a power of two and never gives it back. Here memory is mapped in exact
page-rounded sizes, costs nothing until it is touched (the kernel maps zeros), and is registered with CUDA, or with HIP
under the same name, as it is. Other accelerators have no call for that which torch knows: they get what its allocator
pins.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Protocol

import torch

from hf_zero.native.host_memory import PAGE, page_rounded, transfer_memory

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
_COPIES_NOTHING = ("cpu", "meta")

logger = logging.getLogger(__name__)


class PageRegistrar(Protocol):
    """Tells a driver of pages that must stay where they are."""

    def register(self, block: torch.Tensor) -> str | None:
        """Pin the pages of `block`; returns why that is refused, None if it is not."""

    def unregister(self, block: torch.Tensor) -> None:
        """Undo it. No copy from or to the block may be under way."""


class CudaPages:
    """CUDA's registration of pages, and HIP's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, block: torch.Tensor) -> str | None:
        with torch.cuda.device(self._device):
            status = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), _PORTABLE))
        return self._told(status)

    def unregister(self, block: torch.Tensor) -> None:
        with torch.cuda.device(self._device):
            status = int(torch.cuda.cudart().cudaHostUnregister(block.data_ptr()))
        if refusal := self._told(status):
            logger.warning("%d bytes of host memory could not be unpinned (%s)", block.numel(), refusal)

    def _told(self, status: int) -> str | None:
        if status == 0:
            return None
        # CUDA keeps a failure as its last error, and the next kernel launch would report it as its own.
        try:
            torch.zeros(1, device=self._device)
        except RuntimeError as error:
            logger.debug("cleared: %s", error)
        return f"CUDA error {status}"


def registrar_of(device: torch.device) -> PageRegistrar | None:
    """The registrar that pins pages for `device` in place; None if torch's allocator is all there is."""
    return CudaPages(device) if device.type == "cuda" else None


def wait_for_copies(device: torch.device) -> None:
    """Return when `device` has done all that it was given, before memory that it may use is freed.

    A device that has failed copies nothing, and raises for those who wait for its results.
    """
    if device.type in _COPIES_NOTHING:
        return
    try:
        torch.accelerator.synchronize(device)
    except RuntimeError as error:
        logger.debug("%s has failed: %s", device, error)


class HostMemory:
    """Allocates page-aligned CPU memory that reads as zeros; pins it where `pin` and an accelerator computes.

    See [Note: Why not torch.empty(pin_memory=True)]. Invariant: what is pinned stays mapped. Another mapping at its
    address could not be pinned, and copies would go to pages that nobody sees.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self.pins = pin and device.type not in _COPIES_NOTHING
        self._pages = registrar_of(device) if self.pins else None
        self._pinned: dict[int, torch.Tensor] = {}  # by address
        self._warned = False
        self._device = device
        self._process = os.getpid()
        # For who forgets the memory. At exit it goes with the process.
        weakref.finalize(self, _unpin_all, self._pinned, self._pages, device, self._process).atexit = False

    @property
    def pinned_bytes(self) -> int:
        return sum(block.numel() for block in self._pinned.values())

    def allocate(self, nbytes: int, *, fork: bool = True) -> torch.Tensor:
        """uint8 [nbytes rounded up to pages]; it lives as long as any view of it, if pinned at least until `free`.

        Args:
            fork: As for transfer_memory. What is pinned is kept out of forked children in any case: the first write to
                a page that is shared with a child can move it, and the device would go on with the old one.
        """
        size = page_rounded(nbytes)
        block = self._allocate_pinned(size) if self.pins and size else None
        return transfer_memory(size, fork=fork) if block is None else block

    def free(self, *blocks: torch.Tensor) -> None:
        """Unpin what `allocate` has returned, after all copies that the device was given.

        Their memory goes with the last view of it. The device must not be given it any more.
        """
        addresses = [block.data_ptr() for block in blocks]
        mine = {address: self._pinned.pop(address) for address in addresses if address in self._pinned}
        _unpin_all(mine, self._pages, self._device, self._process)

    def adopt(self, block: torch.Tensor, other: HostMemory) -> None:
        """Become the one that frees a block which `other` allocated."""
        if (mine := other._pinned.pop(block.data_ptr(), None)) is not None:
            self._pinned[block.data_ptr()] = mine

    def _allocate_pinned(self, size: int) -> torch.Tensor | None:
        if self._pages is None:
            try:
                whole = torch.empty(size + PAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._warn(size, str(error).splitlines()[0])
                return None
            start = -whole.data_ptr() % PAGE
            block = whole[start : start + size].zero_()
        else:
            block = transfer_memory(size, fork=False)
            if refusal := self._pages.register(block):
                self._warn(size, refusal)
                return None
        self._pinned[block.data_ptr()] = block
        return block

    def _warn(self, size: int, refusal: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%d bytes of host memory could not be pinned (%s; %d bytes are pinned so far): they and what else "
                "cannot be pinned stay pageable, and copies to and from the device are slower. See `ulimit -l`, the "
                "memory limit of the container, or set pin_memory to false.",
                size,
                refusal,
                self.pinned_bytes,
            )


def _unpin_all(
    pinned: dict[int, torch.Tensor], pages: PageRegistrar | None, device: torch.device, process: int
) -> None:
    """Forget the blocks. In a forked child that is all: the memory is not there, and the device is its parent's."""
    blocks = list(pinned.values())
    pinned.clear()
    # torch's allocator itself keeps what is being copied until the copy is over.
    if pages is None or not blocks or os.getpid() != process:
        return
    wait_for_copies(device)
    for block in blocks:
        pages.unregister(block)
