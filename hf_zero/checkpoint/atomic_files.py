"""Low-level work on files: writes that appear whole or not at all, checksums.

Owns no knowledge of what is in the files. An OSError becomes a CheckpointError that names the file.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_zero.errors import CheckpointError

Progress = Callable[[int], None]  # called with the number of bytes done since the last call

TEMPORARY_SUFFIX = ".partial"
CHUNK_BYTES = 4 << 20
_BINARY = getattr(os, "O_BINARY", 0)  # without it Windows changes ends of lines
_place = threading.Lock()


class ChecksumWriter:
    """A binary file that appears under its name only when it is complete; counts and checksums what is written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = 0
        self.crc32 = 0

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)  # of bytes: format "B"
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += view.nbytes
        while view:
            view = view[os.write(self._descriptor, view) :]


@contextmanager
def written_atomically(path: Path) -> Iterator[ChecksumWriter]:
    """Write `path`: on a clean exit it is on the disk and named, on an exception nothing of it is left.

    Raises:
        CheckpointError: The operating system refused (disk full, no permission, ...).
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    done = False
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o666)
        try:
            yield ChecksumWriter(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        done = True
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if not done:
            with suppress(OSError):  # the error that led here says more
                temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut. Without effect on file systems that cannot do it."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows: a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse; they order renames themselves
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_to_read(path: Path) -> int:
    """A descriptor for `read_at`. Raises OSError."""
    return os.open(path, os.O_RDONLY | _BINARY)


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view`, or its beginning, from `offset` on; returns how many bytes there were. Any thread may call."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with _place:  # Windows has no read that leaves the file's place alone
        os.lseek(descriptor, offset, os.SEEK_SET)
        found = os.read(descriptor, min(len(view), CHUNK_BYTES))
    view[: len(found)] = found
    return len(found)


def file_crc32(path: Path, progress: Progress | None = None) -> int:
    """zlib.crc32 of the content: it is there to find damage, not forgery, so speed decides."""
    crc = 0
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                crc = zlib.crc32(view[:count], crc)
                if progress is not None:
                    progress(count)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return crc
