"""Messages of failed file operations: where, why, and what to do about that kind of failure."""

from __future__ import annotations

import errno as codes
import os
import shutil
from pathlib import Path

from hf_zero.errors import OffloadError


class AioError(OffloadError):
    """An operation on a file failed.

    Attributes:
        path: The file.
        offset: Of the first byte that was not transferred; None if the file could not be opened.
        nbytes: That were to be transferred from there.
        errno: The system's reason; 0 where the file was simply too short.
    """

    def __init__(self, message: str, *, path: Path, offset: int | None, nbytes: int, errno: int) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.errno = errno


def open_error(path: Path, code: int) -> AioError:
    text = f"cannot open {path}: {describe_errno(code)}.\n{remedy(code, path)}"
    return AioError(text, path=path, offset=None, nbytes=0, errno=code)


def transfer_error(path: Path, code: int, *, write: bool, offset: int, nbytes: int) -> AioError:
    verb = "write" if write else "read"
    text = f"cannot {verb} {nbytes} bytes at offset {offset} of {path}: {describe_errno(code)}.\n{remedy(code, path)}"
    return AioError(text, path=path, offset=offset, nbytes=nbytes, errno=code)


def short_error(path: Path, *, write: bool, start: int, expected: int, arrived: int) -> AioError:
    """The file took or gave `arrived` of the `expected` bytes from `start` on, without an error of the system."""
    verb, done = ("write", "written") if write else ("read", "there")
    text = (
        f"cannot {verb} {expected} bytes at offset {start} of {path}: only {arrived} were {done}, "
        f"as if the file ended at byte {start + arrived}.\n"
        "Something else truncated or replaced the file while it was in use: give every job its own folder, and "
        "keep clean-up scripts away from it."
    )
    return AioError(text, path=path, offset=start + arrived, nbytes=expected - arrived, errno=0)


def describe_errno(code: int) -> str:
    name = codes.errorcode.get(code)
    return f"{os.strerror(code)} ({name})" if name else f"error {code}"


def remedy(code: int, path: Path) -> str:
    """The remedy for a failure of the system with this number."""
    if code == codes.ENOSPC:
        return f"{_free_space(path)} Free some, or point nvme_path at a larger disk."
    if code == codes.EDQUOT:
        return "The user's disk quota is used up: free some space, or point nvme_path at another disk."
    if code == codes.EFBIG:
        return "The file may not grow that far: raise the file size limit (ulimit -f), or use another file system."
    if code == codes.EIO:
        return "The disk itself failed (see dmesg): point nvme_path at another disk; what was on this one is lost."
    if code == codes.EBADF:
        return "Its descriptor was closed by something else in this process, which may now hold another file."
    return _REMEDIES.get(code, "Check the disk and its file system, or point nvme_path elsewhere.")


_REMEDIES = {
    codes.EROFS: "The file system is mounted read-only: point nvme_path at a writable one.",
    codes.EACCES: "This user may not: change the permissions of the folder, or point nvme_path elsewhere.",
    codes.EPERM: "This user may not: change the permissions of the folder, or point nvme_path elsewhere.",
    codes.ENOENT: "The file or its folder does not exist: something removed it, or nvme_path is misspelled.",
    codes.ENOTDIR: "A part of the path is a file: point nvme_path at a folder.",
    codes.EEXIST: "It is a file: point nvme_path at a folder.",
    codes.EISDIR: "That is a folder: name a file.",
    codes.EMFILE: "Too many open files in this process: raise the limit (ulimit -n).",
    codes.ENFILE: "Too many open files on this machine: raise fs.file-max.",
    codes.ENOMEM: "The machine is out of memory: use a smaller aio.queue_depth, block_size or buffer_count.",
    codes.EFAULT: "The memory of the transfer is not there any more: it was freed or unmapped too early.",
    codes.EINVAL: "The file system refuses this kind of access: point nvme_path at a local disk.",
}


def _free_space(path: Path) -> str:
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return "The file system is full."
    return f"The file system is full ({free} bytes are free)."
