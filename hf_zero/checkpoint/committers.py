"""Finds out which ranks see the same file system, where the nodes save into folders of their own.

Exactly one rank of each file system commits what the ranks there have written; two would race.
Names of hosts say nothing of that, so the ranks look for what the others have written. All ranks must call.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hf_zero.checkpoint.format import Manifest
from hf_zero.checkpoint.writer import abandon, delete_empty, follow_up, make_folder, prepare_commit, publish
from hf_zero.distributed.comm import Comm
from hf_zero.errors import CheckpointError


def find_committers(comm: Comm, folder: Path) -> list[int]:
    """Return by rank the first one that sees the same `folder`, which is made where there is none.

    Raises:
        CheckpointError: On every rank: one could not write there, or what they see is not the same both ways.
    """
    # The names are fresh, so no cache of a network file system holds that there is no such file.
    mark = comm.all_gather_object(secrets.token_hex(4), "checkpoint folder")[0]

    def token(rank: int) -> Path:
        return folder / f"rank-{rank:05d}.{mark}.safetensors.token"  # `discard` knows it by this name

    def write() -> None:
        make_folder(folder)
        try:
            token(comm.rank).touch()
        except OSError as error:
            raise CheckpointError(f"cannot write into {folder}: {error.strerror or error}") from error

    def delete_token() -> None:
        with suppress(OSError):
            token(comm.rank).unlink()

    def look() -> int:
        return next(rank for rank in range(comm.world_size) if token(rank).exists())

    try:
        comm.agree("checkpoint folder", write, CheckpointError)
        # All have looked before a token is deleted.
        committers = comm.agree("checkpoint folder", look, CheckpointError)
    except CheckpointError:
        delete_token()
        delete_empty(folder.parent)  # whoever comes last finds it empty
        raise
    delete_token()
    strange = [rank for rank, first in enumerate(committers) if committers[first] != first]
    if strange:
        delete_empty(folder.parent)
        raise CheckpointError(
            f"ranks {strange} see what others have written into {folder}, and those do not see the same: a folder "
            "must be on one file system for all ranks that see it."
        )
    return committers


def is_committer(comm: Comm, committers: Sequence[int]) -> bool:
    return committers[comm.rank] == comm.rank


def commit_everywhere(
    comm: Comm,
    folder: Path,
    build: Callable[[], Manifest],
    committers: Sequence[int],
    beside: Mapping[Path, bytes],
) -> None:
    """Publish the manifest that rank 0 builds, in the folder of each file system.

    Everything that may fail for want of space comes before the first rename, and old files go after the last: where
    the processes die in between, every folder has all files of the manifest that it holds.
    """
    commits = is_committer(comm, committers)
    whole = comm.agree("checkpoint manifest", build if comm.rank == 0 else None, CheckpointError)[0]
    here = [rank for rank in range(whole.world_size) if committers[rank] == comm.rank]
    try:
        prepare = functools.partial(prepare_commit, folder, whole, here, beside)
        comm.agree("checkpoint manifest", prepare if commits else None, CheckpointError)
    except CheckpointError:
        if commits:
            abandon(folder, beside)
        raise
    comm.agree("checkpoint manifest", lambda: publish(folder) if commits else None, CheckpointError)
    comm.agree("replaced files", lambda: follow_up(folder, whole, beside) if commits else None, CheckpointError)
