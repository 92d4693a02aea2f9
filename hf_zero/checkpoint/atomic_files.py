"""Writes of files that appear complete or not at all, with their checksums.

Owns no knowledge of what is in the files. An OSError becomes a CheckpointError that names the file.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_zero.checkpoint.consolidate import BINARY
from hf_zero.errors import CheckpointError

TEMPORARY_SUFFIX = ".partial"


class ChecksumWriter:
    """Counts and checksums what it writes to an open file."""

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
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
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
