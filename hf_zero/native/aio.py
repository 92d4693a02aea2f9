"""Reads and writes files in the background, past the page cache where the file system allows it.

Owns the order of calls, the memory of what is under way, and the errors. The work is done by the native library, on
io_uring or on threads; it knows nothing of stores, keys or regions of a file.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import threading
import weakref
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from hf_zero.config.resolved import Aio
from hf_zero.errors import ConfigError, OffloadError, StateError
from hf_zero.native.aio_errors import AioError, describe_errno, open_error, short_error, transfer_error
from hf_zero.native.library import library
from hf_zero.native.machine import usable_cores

__all__ = ["AioError", "AioFile", "AioQueue", "AioStats"]

logger = logging.getLogger(__name__)

ENGINE_VARIABLE = "HF_ZERO_AIO_ENGINE"
_ENGINES = ("auto", "io_uring", "threads")  # hz_aio_engine, in its order
# A wait sleeps at most so long at a time, so that Ctrl-C gets through while a disk hangs.
_WAIT_SLICE_MS = 200
_SHORT = 2  # HZ_AIO_SHORT
_OK = 0


class _Options(ctypes.Structure):  # hz_aio_options
    _fields_ = [
        ("block_size", ctypes.c_int64),
        ("queue_depth", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("single_submit", ctypes.c_int32),
        ("overlap_events", ctypes.c_int32),
        ("engine", ctypes.c_int32),
    ]


class _Result(ctypes.Structure):  # hz_aio_result
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("arrived", ctypes.c_int64),
        ("ended_at", ctypes.c_double),
    ]


class _FileInfo(ctypes.Structure):  # hz_aio_file_info
    _fields_ = [
        ("fd", ctypes.c_int32),
        ("direct", ctypes.c_int32),
        ("alignment", ctypes.c_int64),
        ("memory_alignment", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class AioStats:
    """Counters of a queue since it was made: hz_aio_stats, in its order."""

    submits: int  # system calls that started operations
    operations: int  # started: blocks, and rests of blocks that were transferred in part
    completions: int
    refills: int  # blocks begun while others were under way of which some were through: overlap_events at work
    max_in_flight: int  # blocks under way at once
    bounced: int  # operations through an aligned block of the queue, because memory or offset were not aligned
    buffered: int  # operations through the page cache


class _Stats(ctypes.Structure):
    _fields_ = [(counter.name, ctypes.c_int64) for counter in fields(AioStats)]


@functools.cache
def _native() -> ctypes.CDLL:
    loaded = library()
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.POINTER
    signatures = {
        "create": (i64, [pointer(_Options), pointer(i32), pointer(i32)]),
        "stop": (i32, [i64]),
        "destroy": (i32, [i64]),
        "open": (i64, [ctypes.c_char_p, i32, i32, i32, pointer(_FileInfo)]),
        "file_info_of": (i32, [i64, pointer(_FileInfo)]),
        "preallocate": (i32, [i64, i64]),
        "close": (i32, [i64]),
        "submit": (i64, [i64, i64, i32, ctypes.c_void_p, i64, i64]),
        "wait": (i32, [i64, i64, i32, pointer(_Result)]),
        "done": (i32, [i64, i64]),
        "stats_of": (i32, [i64, pointer(_Stats)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, f"hz_aio_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class AioFile:
    """An open file, made by AioQueue.open. Any queue of the process may use it.

    Reads and writes under way when it is closed still go through. It closes itself when nothing refers to it.
    """

    def __init__(self, path: Path, handle: int, info: _FileInfo, *, writable: bool) -> None:
        self.path = path
        self.writable = writable
        self.fd: int = info.fd  # without O_DIRECT; for fstat, posix_fallocate, ftruncate
        self.alignment: int = info.alignment  # bytes; offsets and lengths at multiples of it need no detour
        self._handle = handle
        self._close = weakref.finalize(self, _native().hz_aio_close, handle)

    @property
    def closed(self) -> bool:
        return not self._close.alive

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is used; becomes False when the file system turns out to refuse it."""
        info = _FileInfo()
        return _native().hz_aio_file_info_of(self._handle, ctypes.byref(info)) == 0 and bool(info.direct)

    def preallocate(self, nbytes: int) -> None:
        """Make the file `nbytes` long, with its space on the disk allocated where the file system can do that.

        Raises:
            AioError: The system refuses: the disk is full, say.
        """
        code = _native().hz_aio_preallocate(self._handle, nbytes)
        if code < 0:
            raise transfer_error(self.path, -code, write=True, offset=0, nbytes=nbytes)

    def close(self) -> None:
        self._close()


@dataclass(frozen=True)
class _Request:
    buffer: torch.Tensor  # keeps the memory alive while the library uses it
    path: Path
    write: bool
    offset: int
    nbytes: int


class AioQueue:
    """Operations on files, carried out in the background in the order of submission, several at once.

    Requests are cut into blocks of block_size bytes, of which queue_depth are under way per thread. Two requests that
    overlap, one of them a write, have no order: wait for the first. Any thread may submit and wait. Close it; one that
    is dropped or left open at exit waits for what is under way, too.

    Args:
        engine: "io_uring", "threads" (pread and pwrite), or "auto": io_uring where the kernel and the container allow
            it. The environment's HF_ZERO_AIO_ENGINE takes the place of "auto".
    Raises:
        OffloadError: engine="io_uring", and the system refuses it.
    """

    engine: str  # what is used: "io_uring" or "threads"

    def __init__(self, settings: Aio | None = None, *, engine: str = "auto") -> None:
        self.settings = mine = settings or Aio()
        wanted, threads = _engine_number(engine), mine.intra_op_parallelism
        _warn_of_many_threads(threads)
        sizes = (mine.block_size, mine.queue_depth, threads)
        options = _Options(*sizes, mine.single_submit, mine.overlap_events, wanted)
        used, ring_error = ctypes.c_int32(), ctypes.c_int32()
        handle = _native().hz_aio_create(ctypes.byref(options), ctypes.byref(used), ctypes.byref(ring_error))
        if handle < 0:
            raise _creation_error(_ENGINES[wanted], threads, -handle)
        if ring_error.value:
            _log_no_io_uring(describe_errno(ring_error.value))
        self.engine = _ENGINES[used.value]
        self._handle = handle
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}
        # The requests go with the finalizer: their memory must outlive the operations, whatever becomes of the queue.
        self._destroy = weakref.finalize(self, _destroy, handle, self._requests)

    def open(self, path: str | Path, *, write: bool = True, create: bool = False, direct: bool = True) -> AioFile:
        """Open a file; `create` makes it if it is missing, with access for this user only.

        Raises:
            AioError: The system refuses.
            ConfigError: O_DIRECT cannot be used with this queue's block_size.
        """
        info = _FileInfo()
        handle = _native().hz_aio_open(os.fsencode(path), write, create, direct, ctypes.byref(info))
        if handle < 0:
            raise open_error(Path(path), -handle)
        file = AioFile(Path(path), handle, info, writable=write)
        if self.settings.block_size % file.alignment:
            file.close()
            raise ConfigError(
                f"aio.block_size={self.settings.block_size} must be a multiple of {info.alignment} bytes "
                f"for direct access to {path}."
            )
        return file

    def read(self, file: AioFile, buffer: torch.Tensor, offset: int) -> int:
        """Start filling `buffer` (contiguous, CPU) with the file's bytes from `offset` on; returns a ticket."""
        return self._submit(file, buffer, offset, write=False)

    def write(self, file: AioFile, buffer: torch.Tensor, offset: int) -> int:
        """Start writing `buffer` (contiguous, CPU) to the file from `offset` on; returns a ticket.

        The buffer must not change before the ticket is done.
        """
        return self._submit(file, buffer, offset, write=True)

    def wait(self, ticket: int) -> float:
        """Wait until the ticket's operation is done; the ticket and the queue's hold on its buffer end with it.

        Returns:
            The time at which it was done, in seconds of time.perf_counter.

        Raises:
            AioError: It failed, or the file ended too early.
        """
        self._check_process()
        result = _Result()
        status = -errno.ETIMEDOUT
        while status == -errno.ETIMEDOUT:
            status = _native().hz_aio_wait(self._handle, ticket, _WAIT_SLICE_MS, ctypes.byref(result))
        if status == -errno.ENOENT:
            raise AssertionError(f"ticket {ticket} was waited for already, or is of another queue")
        if status != _OK:
            raise AssertionError(f"hz_aio_wait: {describe_errno(-status)}")
        with self._lock:
            request = self._requests.pop(ticket)
        if result.kind != _OK:
            raise _request_error(request, result)
        return float(result.ended_at)

    def done(self, ticket: int) -> bool:
        """Whether `wait` would return (or raise) at once."""
        self._check_process()
        status = _native().hz_aio_done(self._handle, ticket)
        if status < 0:
            raise AssertionError(f"ticket {ticket} was waited for already, or is of another queue")
        return bool(status)

    def stats(self) -> AioStats:
        self._check_process()
        stats = _Stats()
        _native().hz_aio_stats_of(self._handle, ctypes.byref(stats))
        return AioStats(*(getattr(stats, counter.name) for counter in fields(AioStats)))

    def close(self) -> None:
        """Wait for everything under way and end the threads. Tickets that are left can still be waited for."""
        if os.getpid() == self._pid:
            _native().hz_aio_stop(self._handle)

    def _submit(self, file: AioFile, buffer: torch.Tensor, offset: int, *, write: bool) -> int:
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise AssertionError(f"only contiguous CPU tensors: {buffer.device}, strides {buffer.stride()}")
        if offset < 0 or (write and not file.writable):
            raise AssertionError(f"offset {offset}, {file.path} opened with write={file.writable}")
        self._check_process()
        nbytes = buffer.numel() * buffer.element_size()
        # With the lock, so that a thread that is handed the ticket finds its request.
        with self._lock:
            ticket = int(_native().hz_aio_submit(self._handle, file._handle, write, buffer.data_ptr(), nbytes, offset))
            if ticket > 0:
                self._requests[ticket] = _Request(buffer, file.path, write, offset, nbytes)
        if ticket < 0:
            if file.closed:
                raise StateError(f"{file.path} was closed: open it again to {'write' if write else 'read'} it.")
            if ticket == -errno.EBADF:
                raise StateError("the queue was closed: make another one.")
            raise transfer_error(file.path, -ticket, write=write, offset=offset, nbytes=nbytes)
        return ticket

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"this AioQueue belongs to process {self._pid}, and process {os.getpid()} was forked from it: "
                "the threads that do the work were not. Make a queue of its own in the forked process."
            )


def _destroy(handle: int, requests: dict[int, _Request]) -> None:
    _native().hz_aio_destroy(handle)
    requests.clear()


def _request_error(request: _Request, result: _Result) -> AioError:
    if result.kind == _SHORT:
        return short_error(
            request.path, write=request.write, start=request.offset, expected=request.nbytes, arrived=result.arrived
        )
    return transfer_error(request.path, result.error, write=request.write, offset=result.offset, nbytes=result.nbytes)


def _engine_number(engine: str) -> int:
    named, source = engine, "engine"
    if engine == "auto" and ENGINE_VARIABLE in os.environ:
        named, source = os.environ[ENGINE_VARIABLE], ENGINE_VARIABLE
    if named not in _ENGINES:
        raise ConfigError(f"{source}={named!r} must be one of {', '.join(_ENGINES)}.")
    return _ENGINES.index(named)


def _creation_error(engine: str, threads: int, code: int) -> OffloadError:
    if engine == "io_uring":
        return OffloadError(
            f"io_uring cannot be used here: {describe_errno(code)}. The kernel lacks it, or the container or "
            "kernel.io_uring_disabled forbids it.\n"
            f"Use engine='auto' (unset {ENGINE_VARIABLE}): it takes threads then."
        )
    return OffloadError(
        f"the threads of file access cannot be started: {describe_errno(code)}.\n"
        f"Use fewer (aio.intra_op_parallelism={threads}), or raise the limit of processes (ulimit -u)."
    )


@functools.cache
def _log_no_io_uring(reason: str) -> None:
    logger.info("files are accessed with threads: io_uring cannot be used here: %s", reason)


@functools.cache
def _warn_of_many_threads(threads: int) -> None:
    cores = usable_cores()
    if threads > 4 * cores:
        logger.warning(
            "aio.intra_op_parallelism=%d is a lot for %d cores: each keeps aio.queue_depth operations under way.",
            threads,
            cores,
        )
