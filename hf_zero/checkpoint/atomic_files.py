"""Writes of files that appear complete or not at all.

Owns no knowledge of what is in the files. An OSError becomes a CheckpointError that names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_zero.checkpoint.rank_reader import BINARY
from hf_zero.errors import CheckpointError

TEMPORARY_SUFFIX = ".partial"


class OpenFile:
    """An open file that has no name yet: it is at `path` until it is complete."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def write(self, data: memoryview | bytes, offset: int | None = None) -> None:
        """Write all of `data`: at `offset`, or where the last write ended."""
        if offset is not None:
            os.lseek(self.descriptor, offset, os.SEEK_SET)  # Windows has no pwrite
        view = memoryview(data)  # of bytes: format "B"
        while view:
            view = view[os.write(self.descriptor, view) :]


def temporary_name(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)


@contextmanager
def staged(path: Path) -> Iterator[OpenFile]:
    """Write what will be `path`: on a clean exit it is on the disk, and `give_name` cannot fail for want of space.

    On an exception nothing of it is left.

    Raises:
        CheckpointError: The operating system refused (disk full, no permission, ...).
    """
    temporary = temporary_name(path)
    done = False
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
        try:
            yield OpenFile(temporary, descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        done = True
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if not done:  # the error that led here says more than one of `forget`
            forget(path)


def give_name(path: Path) -> None:
    """Let what was staged for `path` take its place, by one rename. Raises CheckpointError."""
    try:
        os.replace(temporary_name(path), path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def forget(path: Path) -> None:
    """Delete what was staged for `path`, if anything was."""
    with suppress(OSError):
        temporary_name(path).unlink()


@contextmanager
def written_atomically(path: Path) -> Iterator[OpenFile]:
    """Write `path`: on a clean exit it is on the disk and named, on an exception nothing of it is left.

    Raises:
        CheckpointError: The operating system refused (disk full, no permission, ...).
    """
    with staged(path) as file:
        yield file
    try:
        give_name(path)
    except CheckpointError:
        forget(path)
        raise


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
