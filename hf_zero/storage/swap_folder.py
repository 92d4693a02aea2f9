"""The folder of one process under nvme_path, and the files in it: their space and transfers.

The folder is made, locked while the process lives, and removed at its end or by the next start:

    <nvme_path>/hf_zero_swap/<host>-<pid>-<random>/lock
                                                   rank-00000/...

The lock file is held with flock until the process ends in whatever way, so a folder whose lock can be taken belongs to
nobody and is removed by the next start. Its content, the boot id, says on which running system that test is sound:
another host may share the file system without sharing its locks.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import os
import platform
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from hf_zero.config.resolved import Aio
from hf_zero.errors import OffloadError
from hf_zero.native.aio import AioQueue
from hf_zero.native.aio_errors import remedy

try:
    import fcntl
except ImportError:  # Windows; SwapFolder says so
    fcntl = None  # type: ignore[assignment]

PARENT = "hf_zero_swap"
LOCK = "lock"
# A folder gets its lock under this name, and the name without it after that: a sweep never sees one without a lock.
_UNBORN = ".new-"
_UNBORN_MAX_AGE_S = 3600.0
_NAME = re.compile(r"[A-Za-z0-9_]+-[0-9]+-[0-9a-f]{8}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Keys start at multiples of this, so that their reads and writes can go past the page cache.
ALIGNMENT = 4096
_MAX_STEP = 64 << 20

logger = logging.getLogger(__name__)


class SwapFolder:
    """The folder `path` of this rank; it and all in it are gone after `close`, or when the process ends.

    A forked child may use it, but never removes it. Folders that ended processes left behind are removed first.

    Args:
        nvme_path: A folder of the user's choice; made if it is missing.
        rank: Names the folder; nothing is shared between ranks.
    """

    def __init__(self, nvme_path: str | Path, rank: int) -> None:
        _check_system()
        self._pid = os.getpid()
        self._lock = -1
        parent = _parent_of(nvme_path)
        try:
            self._process_folder, self._lock = _make_locked(parent, f"rank-{rank:05d}")
        except OSError as error:
            raise _refused(nvme_path, error) from error
        self.path = self._process_folder / f"rank-{rank:05d}"
        atexit.register(self.close)
        self.swept = sweep(parent)

    def close(self) -> None:
        """Remove the folder. Files in it that are open stay readable; a second call does nothing."""
        if self._lock < 0 or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        shutil.rmtree(self._process_folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        if self._process_folder.exists():
            logger.warning("%s could not be removed; the next start will try again", self._process_folder)
        with contextlib.suppress(OSError):  # others use it
            self._process_folder.parent.rmdir()


def _check_system() -> None:
    missing = "fcntl.flock" if fcntl is None else "" if hasattr(os, "posix_fallocate") else "os.posix_fallocate"
    if missing:
        raise OffloadError(
            f'offload to disk (device "nvme") needs Linux, and this is {platform.system()} (it has no {missing}): set '
            'the device to "cpu" or "none".'
        )


def sweep(parent: Path) -> list[Path]:
    """Remove the folders in `parent` whose process has ended; return them."""
    swept = []
    for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
        with contextlib.suppress(OSError):  # not ours to read, or just removed by somebody else
            if folder.name.startswith(_UNBORN):
                if time.time() - folder.stat().st_mtime > _UNBORN_MAX_AGE_S:
                    shutil.rmtree(folder, ignore_errors=True)
            elif _NAME.fullmatch(folder.name) and _remove_if_dead(folder):
                swept.append(folder)
    if swept:
        logger.info("removed what ended processes left in %s: %s", parent, ", ".join(one.name for one in swept))
    return swept


def _remove_if_dead(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its owner is removing it, or was killed while it did
        shutil.rmtree(folder)
        return True
    try:
        here = os.read(lock, 64).decode("ascii", "replace") == _boot_id()
        if not here and not folder.name.startswith(f"{_host()}-"):
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
        return True
    finally:
        os.close(lock)


def _parent_of(nvme_path: str | Path) -> Path:
    text = os.fspath(nvme_path)
    if not text.strip() or "\0" in text:
        raise OffloadError(f"nvme_path {text!r} is no path: set it to a folder on a local disk, such as /local_nvme.")
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if path.exists() and not path.is_dir():
        raise _refused(nvme_path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)))
    return path / PARENT


def _make_locked(parent: Path, inner: str) -> tuple[Path, int]:
    """A new folder in `parent` with the folder `inner` in it and its lock held: the folder, the lock's descriptor."""
    name = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    unborn = parent / f"{_UNBORN}{name}"
    for attempt in range(100):
        _make_parent(parent)
        try:
            unborn.mkdir(mode=0o700)
            break
        except FileNotFoundError:  # the last user of `parent` removed it between the two calls
            if attempt == 99:
                raise
    lock = os.open(unborn / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, _boot_id().encode("ascii"))
        (unborn / inner).mkdir(mode=0o700)
        unborn.rename(parent / name)
    except OSError:
        os.close(lock)
        shutil.rmtree(unborn, ignore_errors=True)
        raise
    return parent / name, lock


def _make_parent(parent: Path) -> None:
    if parent.is_dir():
        return
    parent.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # made by others, or removed by them
        parent.mkdir()
        parent.chmod(0o1777)  # as /tmp: several users may share the disk, and each owns its own folders


def _refused(nvme_path: str | Path, error: OSError) -> OffloadError:
    code, path = error.errno or 0, Path(error.filename or nvme_path)
    where = f" (at {error.filename})" if error.filename and str(error.filename) != str(nvme_path) else ""
    return OffloadError(
        f"nvme_path {nvme_path} cannot be used{where}: {error.strerror or error}. {remedy(code, path)}"
    )


def _host() -> str:
    """The name of this host, without characters that would end a file's name or confuse a shell."""
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in socket.gethostname())


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Region(NamedTuple):
    """A range of a file; both numbers are multiples of ALIGNMENT."""

    offset: int
    nbytes: int


class Transfer:
    """A read or write under way, or ended. Several threads may wait for it."""

    def __init__(self, queue: AioQueue, start: Callable[[], int], what: str) -> None:
        self.finished = False
        self.ended_at: float | None = None  # of time.perf_counter; None where it failed
        self.error: OffloadError | None = None
        self._queue = queue
        self._what = what
        self._lock = threading.Lock()
        self._ticket = -1
        try:
            self._ticket = start()
        except (OffloadError, OSError) as error:
            self._end(error)

    def wait(self) -> None:
        with self._lock:
            if self.finished:
                return
            try:
                self.ended_at = self._queue.wait(self._ticket)
            except (OffloadError, OSError) as error:
                self._end(error)
            else:
                self._end(None)

    def poll(self) -> bool:
        """Whether it has ended, without waiting."""
        if not self.finished and self._lock.acquire(blocking=False):  # else another thread waits for it
            try:
                ended = self.finished or self._queue.done(self._ticket)
            finally:
                self._lock.release()
            if ended:
                self.wait()
        return self.finished

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            self.error = OffloadError(f"{self._what}: {error}")
        self.finished = True


class SwapFile:
    """A new file with a queue of its own, and which regions of it are free. Not thread-safe.

    Args:
        preallocate: Reserve the disk space when the file grows, so that a full disk shows here and not at a write.
    """

    def __init__(self, path: Path, *, aio: Aio, preallocate: bool) -> None:
        self.path = path
        self._preallocate = preallocate
        self._size = 0
        self._pid = os.getpid()
        self._damage: str | None = None
        self._end = 0  # of the regions given out; the file is larger, because it grows in steps
        self._free: dict[int, list[int]] = {}  # size -> offsets
        self._queue = AioQueue(aio)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._queue.close()
            if isinstance(error, FileExistsError):
                raise AssertionError(f"two stores have the name {path}") from error
            raise OffloadError(f"{path} cannot be made: {error.strerror}. {remedy(error.errno or 0, path)}") from error
        try:
            self._file = self._queue.open(path, write=True, create=False)
        except BaseException:
            os.close(self._fd)
            self._queue.close()
            raise

    @property
    def is_ours(self) -> bool:
        """False in a forked child, which must leave the file and the queue alone."""
        return os.getpid() == self._pid

    def read(self, memory: torch.Tensor, region: Region, what: str) -> Transfer:
        """Start filling the first bytes of `memory` (uint8) from `region`."""
        used = memory[: region.nbytes]
        start = functools.partial(self._queue.read, self._file, used, region.offset)
        return Transfer(self._queue, start, f"{what} could not be read")

    def write(self, memory: torch.Tensor, region: Region, what: str) -> Transfer:
        """Start writing the first bytes of `memory` (uint8) to `region`."""
        used = memory[: region.nbytes]
        start = functools.partial(self._queue.write, self._file, used, region.offset)
        return Transfer(self._queue, start, f"{what} could not be written")

    def reserve(self, nbytes: int) -> Region:
        """Room for `nbytes`. Its content is whatever a key had there before, or zeros."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size == 0:
            return Region(0, 0)
        if self._free.get(size):
            return Region(self._free[size].pop(), size)
        if self._end + size > self._size:
            self._extend(size)
        self._end += size
        return Region(self._end - size, size)

    def release(self, region: Region) -> None:
        if region.nbytes:
            self._free.setdefault(region.nbytes, []).append(region.offset)

    def check(self) -> None:
        """Raise OffloadError if somebody else removed or truncated the file, from then on at every call."""
        if self._damage is None:
            status = os.fstat(self._fd)
            if status.st_nlink == 0:
                self._damage = "was removed"
            elif status.st_size < self._size:
                self._damage = f"was truncated to {status.st_size} of {self._size} bytes"
        if self._damage is not None:
            raise OffloadError(
                f"{self.path} {self._damage} while it was in use. Nothing else may touch nvme_path during training: "
                "start again from the last checkpoint."
            )

    def close(self) -> None:
        if self._fd >= 0:
            self._queue.close()
            self._file.close()
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _extend(self, size: int) -> None:
        needed = self._end + size - self._size
        step = max(needed, min(_MAX_STEP, self._size // 4 // ALIGNMENT * ALIGNMENT))
        for nbytes in dict.fromkeys((step, needed)):
            error = self._grow(nbytes)
            if error is None:
                self._size += nbytes
                return
        assert error is not None
        disk = os.statvfs(self.path.parent)
        raise OffloadError(
            f"{self.path} cannot grow: {needed} bytes are needed and {disk.f_bavail * disk.f_frsize} bytes are free "
            f"({error.strerror}). {remedy(error.errno or 0, self.path)}"
        ) from error

    def _grow(self, nbytes: int) -> OSError | None:
        try:
            if self._preallocate:
                disk = os.fstatvfs(self._fd)
                if disk.f_bavail * disk.f_frsize < nbytes:
                    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.posix_fallocate(self._fd, self._size, nbytes)
            else:
                os.ftruncate(self._fd, self._size + nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # what a half-done allocation left
                os.ftruncate(self._fd, self._size)
            return error
        return None
