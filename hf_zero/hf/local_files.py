"""Work that one rank does alone with files: all ranks hear of it at once if it fails."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch

from hf_zero.distributed.comm import Comm
from hf_zero.errors import CheckpointError, ZeroError

_T = TypeVar("_T")
# A disk that is full or gone raises these in the libraries that write to it; torch.save: RuntimeError
_WRITE_ERRORS = (OSError, RuntimeError, ValueError, safetensors.SafetensorError)


class _LocalError(CheckpointError):
    """This rank alone could not read or write; the others do not know yet."""


@contextlib.contextmanager
def writing(path: Any) -> Iterator[None]:
    """Name the file where a write inside fails; the innermost block knows it best."""
    try:
        yield
    except (ZeroError, torch.OutOfMemoryError):
        raise
    except _WRITE_ERRORS as error:
        raise _LocalError(f"cannot write {path}: {_reason(error)}{_room(path)}") from error


@contextlib.contextmanager
def writing_alone(path: Any) -> Iterator[None]:
    """Do the same as `writing` where nothing inside talks to other ranks: every error is this rank's own."""
    try:
        with writing(path):
            yield
    except CheckpointError as error:
        raise _LocalError(str(error)) from error


@contextlib.contextmanager
def reading(path: Any) -> Iterator[None]:
    """Name the file where a read inside fails: it is damaged."""
    try:
        yield
    except ZeroError as error:
        raise _LocalError(str(error)) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise _LocalError(f"cannot read {path}, it is damaged: {_reason(error)}") from error


def on_all_ranks(comm: Comm, block: AbstractContextManager[None], work: Callable[[], _T]) -> _T:
    """Run `work` inside `writing(path)` or `reading(path)`; return what it gives on this rank. All ranks must call.

    Collectives inside must come before the first write: a rank that cannot write leaves for the end.

    Raises:
        CheckpointError: On every rank, if any rank could not write or read. It names rank, path and reason.
    """
    results: list[_T] = []  # they do not travel

    def act() -> None:
        with block:
            results.append(work())

    comm.agree("files", act, CheckpointError, catch=_LocalError)
    return results[0]


def _reason(error: BaseException) -> str:
    """Return the message in one line: those of the libraries in between may have several."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _room(path: Any) -> str:
    """The free space, because torch.save does not report why it failed."""
    folder = Path(str(path))
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f" ({free:,} bytes are free there)"
