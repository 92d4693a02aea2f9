"""The bytes of a rank file: copied into aligned memory, checksummed by block in the same pass, written past the page
cache while the next ones are copied. Which tensors a file holds, and when it gets its name, is decided elsewhere.

[Note: Direct writes]
A buffered write copies every byte into the page cache, and fsync then waits for the disk, one after the other. Direct
writes run beside the copies, and leave the page cache to others. They need aligned memory, which tensors seldom have
at the place that a file gives them: so everything goes through a few stages of aligned memory, and the checksum comes
with that copy. Where the file system has no direct access, the stages are written through the page cache. Where the
native library is missing, Python alone does the same, slower.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import zlib
from contextlib import ExitStack
from types import TracebackType

import torch

from hf_zero.checkpoint.atomic_files import OpenFile
from hf_zero.checkpoint.format import BLOCK_BYTES
from hf_zero.config.resolved import Aio
from hf_zero.errors import NativeError
from hf_zero.native import checksum
from hf_zero.native.aio import AioError, AioFile, AioQueue
from hf_zero.native.host_memory import PAGE, page_rounded, transfer_memory
from hf_zero.native.library import library

logger = logging.getLogger(__name__)

STAGE_BYTES = 4 << 20
STAGES = 3  # one is filled while the others are written


class DataWriter:
    """Writes the tensors of one file, in order, from a byte of the file on; `checksums` has one number per block.

    Use as a context manager: on a clean exit all bytes have been handed to the system. Any thread may use one.

    Args:
        start: Where the first tensor begins; a multiple of the page size.
        size: Bytes of the file in the end.
    Raises:
        OSError: The system refused, here or at any later call.
    """

    def __init__(self, file: OpenFile, start: int, size: int) -> None:
        if start % PAGE:
            raise AssertionError(f"tensors at byte {start}, which is no start of a page")
        self.checksums: list[int] = []
        self._crc = 0
        self._in_block = 0  # bytes of the tensor's last block that were written
        self._offset = start  # in the file, of the stage that is being filled
        self._filled = 0  # bytes of it
        stage = min(STAGE_BYTES, page_rounded(max(size - start, 1)))
        self._memory = transfer_memory(stage * STAGES, fork=False).split(stage)
        self._turn = 0
        self._disk: _Direct | _Plain = _Direct(file, size) if _has_library() else _Plain(file)

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            stack.callback(self._disk.close)  # after an error, too: the disk may still read the memory
            if kind is None:
                self._next_stage()
                self._disk.wait_for_all()

    def write(self, tensor: torch.Tensor) -> None:
        """Write a 1-D tensor, or the next part of one, from any device. Nothing refers to it afterwards."""
        tensor = tensor.detach()
        while tensor.numel():
            room = min(len(self._memory[0]) - self._filled, BLOCK_BYTES - self._in_block)
            count = min(tensor.numel(), room // tensor.element_size())
            self._copy(tensor[:count])
            tensor = tensor[count:]

    def end_tensor(self) -> None:
        """End the block: the bytes that are written next belong to another tensor."""
        if self._in_block:
            self.checksums.append(self._crc)
            self._crc = self._in_block = 0

    def _copy(self, part: torch.Tensor) -> None:
        """Copy `part` into the stage; it fits into that and into its block."""
        nbytes = part.numel() * part.element_size()
        target = self._memory[self._turn][self._filled : self._filled + nbytes]
        self._crc = self._disk.copy(part, target, self._crc)
        self._filled += nbytes
        self._in_block += nbytes
        if self._filled == len(self._memory[0]):
            self._next_stage()
        if self._in_block == BLOCK_BYTES:
            self.end_tensor()

    def _next_stage(self) -> None:
        if self._filled:
            self._disk.write(self._turn, self._memory[self._turn][: self._filled], self._offset)
        self._offset += self._filled
        self._filled = 0
        self._turn = (self._turn + 1) % STAGES
        self._disk.wait_for(self._turn)


class _Direct:
    """Writes through the native library, several stages at once."""

    def __init__(self, file: OpenFile, size: int) -> None:
        self._tickets: dict[int, int] = {}  # of stages that are being written
        self._queue = AioQueue(Aio(block_size=1 << 20, queue_depth=8))
        try:
            self._file = _opened(self._queue, file, size)
        except AioError as error:
            self._queue.close()
            raise _system_error(error) from error

    def copy(self, part: torch.Tensor, target: torch.Tensor, crc: int) -> int:
        if part.device.type == "cpu" and part.is_contiguous():
            return checksum.crc32(part, crc, copy_to=target)
        target.view(part.dtype).copy_(part)
        return checksum.crc32(target, crc)

    def write(self, stage: int, data: torch.Tensor, offset: int) -> None:
        try:
            self._tickets[stage] = self._queue.write(self._file, data, offset)
        except AioError as error:
            raise _system_error(error) from error

    def wait_for(self, stage: int) -> None:
        ticket = self._tickets.pop(stage, None)
        try:
            if ticket is not None:
                self._queue.wait(ticket)
        except AioError as error:
            raise _system_error(error) from error

    def wait_for_all(self) -> None:
        for stage in list(self._tickets):
            self.wait_for(stage)

    def close(self) -> None:
        self._queue.close()
        self._file.close()


class _Plain:
    """Writes with Python alone, one stage after the other."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file

    def copy(self, part: torch.Tensor, target: torch.Tensor, crc: int) -> int:
        target.view(part.dtype).copy_(part)
        return zlib.crc32(target.numpy().data, crc)

    def write(self, stage: int, data: torch.Tensor, offset: int) -> None:
        self._file.write(data.numpy().data, offset)

    def wait_for(self, stage: int) -> None:
        pass

    def wait_for_all(self) -> None:
        pass

    def close(self) -> None:
        pass


def _opened(queue: AioQueue, file: OpenFile, size: int) -> AioFile:
    """Open the file once more, for the native library, and take its space on the disk."""
    opened = queue.open(file.path)
    try:
        disk = os.fstatvfs(opened.fd)
        if disk.f_bavail * disk.f_frsize < size:  # found before the disk is filled for everybody
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for its {size} bytes")
        opened.preallocate(size)
    except BaseException:
        opened.close()
        raise
    return opened


def _system_error(error: AioError) -> OSError:
    """Return the system's error, without the words for those who offload to disk."""
    return OSError(error.errno or errno.EIO, os.strerror(error.errno) if error.errno else "the file was cut short")


@functools.cache
def _has_library() -> bool:
    try:
        library()
    except NativeError as error:
        reason = str(error).splitlines()[0]
        logger.warning("Python alone writes checkpoints, with several times the work: %s", reason)
        return False
    return True
