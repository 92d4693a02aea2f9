"""The content of a key on a disk as it was, for a thread that reads it while the key gets another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hf_zero.storage.swap_folder import ALIGNMENT, Region, Transfer


class KeptContent:
    """See [Note: Kept contents] in disk.py. Any thread may use it, one at a time.

    Args:
        region: Where it is; None: it is zeros.
        written: The write that brings it there, which may be under way.
        read: Starts a read of a region into uint8 memory.
        release: Called once, when nobody reads it any more.
    """

    def __init__(
        self,
        region: Region | None,
        written: Transfer | None,
        read: Callable[[torch.Tensor, Region], Transfer],
        release: Callable[[], None],
    ) -> None:
        self._region = region
        self._written = written
        self._read = read
        self._release: Callable[[], None] | None = release

    def elements(self, start: int, end: int, dtype: torch.dtype, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """Elements [start, end) in pieces, which lie in `memory` until the next is asked for.

        Args:
            memory: uint8, page-aligned, of a multiple of ALIGNMENT bytes.
        Raises:
            OffloadError: The content could not be written, or read.
        """
        if self._release is None:
            raise AssertionError("this content is released already")
        if self._written is not None:
            _wait(self._written)
        at, last = start * dtype.itemsize, end * dtype.itemsize
        while at < last:
            block = at // ALIGNMENT * ALIGNMENT
            stop = min(last, block + memory.numel())
            if self._region is None:
                memory[: stop - block].zero_()
            else:
                nbytes = -(-(stop - block) // ALIGNMENT) * ALIGNMENT
                _wait(self._read(memory, Region(self._region.offset + block, nbytes)))
            yield memory[at - block : stop - block].view(dtype)
            at = stop

    def release(self) -> None:
        """Its room may be used again. A second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


def _wait(transfer: Transfer) -> None:
    transfer.wait()
    if transfer.error is not None:
        raise transfer.error
