"""Reads of rank files past the page cache, for loads.

A read through the page cache copies every byte once more and pushes out what others have there; where memory is short,
or a virtual machine's, that takes longer than the disk. What the cache has already is taken from there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from hf_zero.checkpoint.format import BLOCK_BYTES
from hf_zero.checkpoint.rank_reader import READ_BYTES, SafetensorsFile, read_at
from hf_zero.native.host_memory import PAGE, transfer_memory

WINDOW_BYTES = 2 * BLOCK_BYTES + PAGE  # two blocks of a tensor, wherever they begin


class ReadAhead(threading.local):
    """Bytes of one file that were read ahead of those who want them. Each thread has one."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")  # until it is needed
        self._file: DirectFile | None = None
        self._start = self._end = 0

    def copy(self, file: DirectFile, view: memoryview, offset: int) -> int:
        """Fill the beginning of `view` from `offset` on; returns how many bytes are here."""
        if self._file is not file or not self._start <= offset < self._end:
            return 0
        count = min(len(view), self._end - offset)
        view[:count] = self._memory[offset - self._start : offset - self._start + count]
        return count

    def fill(self, file: DirectFile, descriptor: int, offset: int, end: int) -> bool:
        """Read from `offset` on, not beyond the page that `end` is in; returns whether there was anything."""
        start = offset - offset % PAGE
        count = min(WINDOW_BYTES, end - start + -(end - start) % PAGE)
        self.forget()
        try:
            self._memory = self._memory or transfer_memory(WINDOW_BYTES).numpy().data
            found = os.preadv(descriptor, [self._memory[:count]], start)
        except OSError:  # whatever it is: the other way finds it again, or can do it
            return False
        self._file, self._start, self._end = file, start, start + found
        return offset < self._end

    def forget(self) -> None:
        """Read again from the files what was read ahead: they may change until the next read."""
        self._file = None

    def free(self) -> None:
        """Give the memory back."""
        self.forget()
        self._memory = memoryview(b"")


ahead = ReadAhead()


class DirectFile(SafetensorsFile):
    """A SafetensorsFile that is read past the page cache where the system can do that."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._direct = -1
        self._map: mmap.mmap | None = None

    def read(self, view: memoryview, offset: int, end: int = 0) -> None:
        with self._opening:
            self._open()
        while view and end and self._map is not None:
            count = ahead.copy(self, view, offset)
            if not count and self._is_cached(offset, min(end, offset + READ_BYTES)):
                count = read_at(self._descriptor, view[:READ_BYTES], offset)
            if not count and not ahead.fill(self, self._direct, offset, end):
                break
            view, offset = view[count:], offset + count
        super().read(view, offset)

    def _is_cached(self, start: int, end: int) -> bool:
        """Whether the page cache has these bytes. Reading to find out (RWF_NOWAIT) would bring them there."""
        first = start - start % PAGE
        pages = -(-(end - first) // PAGE)
        here = (ctypes.c_ubyte * pages)()
        unknown = self._system.mincore(ctypes.c_void_p(self._address + first), ctypes.c_size_t(end - first), here)
        return not unknown and bytes(here).count(1) == pages

    def _open(self) -> None:
        if self._descriptor < 0:
            super()._open()
            if hasattr(os, "O_DIRECT"):
                with suppress(OSError, ValueError):  # EINVAL where the file system has none; an empty file
                    self._direct = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
                    # Nothing is read through it, so it takes no memory; read-only, so none is set aside either.
                    self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
                    self._address = np.frombuffer(self._map, np.uint8).ctypes.data
                    self._system = ctypes.CDLL(None)

    def close(self) -> None:
        super().close()
        if self._direct >= 0:
            os.close(self._direct)
        self._direct = -1
        self._map = None
