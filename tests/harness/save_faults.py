"""Points of a save at which a process is killed or slowed down, by name."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from hf_zero.checkpoint import atomic_files, background, rank_writer, save, writer
from hf_zero.checkpoint.snapshot import SnapshotMemory
from hf_zero.distributed.store_protocol import MessageBox

# Name -> what is called there: an object, and an attribute of it.
POINTS: dict[str, tuple[Any, str]] = {
    "the ranks agree": (save, "_complete"),
    "the folder is made": (save, "prepare_folder"),
    "what is saved is found": (save, "check_info"),
    "the snapshot": (SnapshotMemory, "copy"),
    "a rank file begins": (save, "write_rank_file"),
    "tensors are written": (rank_writer.DataWriter, "write"),
    "the header is written": (writer, "encode_rank_header"),
    "a file is synced": (atomic_files.os, "fsync"),
    "a file gets its name": (atomic_files.os, "replace"),
    "rank 0 is told": (MessageBox, "send"),
    "the manifest is made": (background, "build_manifest"),
    "the manifest is written": (writer, "encode_manifest"),
    "the folder is synced": (atomic_files, "sync_folder"),
    "the manifest gets its name": (writer, "give_name"),
    "old files are deleted": (writer, "_delete_rank_files"),
    "latest is set": (writer, "give_name"),
}
# The number of the call that is meant, where it is not the first: that of the manifest; then come three scripts.
_CALLS = {"the folder is synced": 2, "latest is set": 5}


def at(point: str, act: Callable[[], None], *, call: int | None = None) -> None:
    """Run `act` in this process before the n-th call of `point` from now on, and do nothing else."""
    place, name = POINTS[point]
    original = getattr(place, name)
    left = _CALLS.get(point, 1) if call is None else call

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            act()
        return original(*args, **kwargs)

    setattr(place, name, wrapped)


def kill() -> None:
    """End like `kill -9`: this process is gone at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def slow_down(point: str, seconds: float) -> None:
    """Each call of `point` takes longer."""
    place, name = POINTS[point]
    original = getattr(place, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(place, name, wrapped)
