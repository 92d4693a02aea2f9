"""Saves the state of a running engine. All ranks call; writer.py writes the files. See [Note: Commit order] there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.background import BackgroundSaves, Job
from hf_zero.checkpoint.committers import commit_everywhere, find_committers, is_committer
from hf_zero.checkpoint.contents import CheckpointContents
from hf_zero.checkpoint.format import SaveInfo, zero_folder
from hf_zero.checkpoint.frozen_digests import full_digests
from hf_zero.checkpoint.optimizer_state import group_numbers
from hf_zero.checkpoint.snapshot import nbytes_of_copy
from hf_zero.checkpoint.stand_alone import scripts
from hf_zero.checkpoint.writer import (
    FileRecord,
    SliceState,
    abandon,
    build_manifest,
    check_info,
    commit,
    prepare_folder,
    write_rank_file,
)
from hf_zero.distributed.comm import Comm
from hf_zero.errors import CheckpointError


@dataclass(frozen=True)
class SaveReply:
    """A rank's reply to the others before anything is written."""

    save_id: str  # of those that commit
    host: tuple[int | None, str]  # the number of the rank's file, and where it is written


def snapshot_bytes(contents: CheckpointContents) -> int:
    """Return the bytes of the copy that a save in the background would make now. No communication.

    They are 0 where it would make none, and where only the save itself finds out what there is to write.
    """
    if contents.file_number is None:
        return 0
    try:
        states = [*contents.slice_states()]
    except CheckpointError:  # state that is no part of its parameter: `file_state`, which communicates, has it
        return 0
    return nbytes_of_copy(states, contents.buffers())


def save(
    contents: CheckpointContents,
    folder: Path,
    client_state: Any,
    *,
    exclude_frozen: bool = False,
    beside: Mapping[Path, bytes] | None = None,
    background: BackgroundSaves | None = None,
) -> None:
    """Write a checkpoint into `folder`, with `exclude_frozen` without the weights of frozen parameters.

    All ranks must call. See [Note: Commit order] in writer.py. `beside`, in which order counts, and the stand-alone
    scripts are written with it by rank 0; with `node_local`, by the first rank of each file system.

    With `background` this returns when everything is copied, and the rest follows: [Note: A save in the background].
    Shards on a disk are not copied, but kept there as they are until they are written.

    Raises CheckpointError on every rank if any rank could not write its file; the folder's old checkpoint, if it held
    one, is then still complete.
    """
    comm, number = contents.comm, contents.file_number
    contents = replace(contents, exclude_frozen=exclude_frozen)
    if contents.optimizer is not None:
        contents.optimizer.check_active("a checkpoint")
        contents = replace(contents, file_state=contents.optimizer.strategy.file_state(contents.optimizer.owned))
    digests = full_digests(comm, contents.frozen_shards()) if exclude_frozen else None
    committers = find_committers(comm, zero_folder(folder)) if contents.node_local else [0] * comm.world_size
    commits = is_committer(comm, committers)
    beside = {**scripts(folder), **(beside or {})}
    states: list[SliceState] = []
    buffers: dict[str, torch.Tensor] = {}
    groups: dict[str, int] = {}

    def prepare() -> SaveReply:
        nonlocal states, buffers, groups
        if number is not None:
            states, buffers = [*contents.slice_states()], contents.buffers()
        check_info(contents.info(client_state))
        groups = {} if contents.optimizer is None else group_numbers(contents.optimizer)
        return SaveReply(prepare_folder(folder, beside) if commits else "", (number, socket.gethostname()))

    with _discarding(folder, beside, commits):
        replies = comm.agree("checkpoint contents", prepare, CheckpointError)
        buffers = contents.in_first_file(buffers)
    info = _complete(contents, contents.info(client_state), digests, replies)
    save_id = next((one.save_id for one in replies if one.save_id), "")  # one for all nodes: a file has one name
    write_as = partial(write_rank_file, folder, save_id=save_id, info=info, groups=groups)
    write = None if number is None else partial(write_as, number)
    if background is not None:
        background.start(Job(folder, info, _write_of_copy(write, background, states, buffers), beside, committers))
        return
    bar = f"Saving {folder.name}" if comm.rank == 0 else ""
    with _discarding(folder, beside, commits):
        records = _records(comm, None if write is None else partial(write, states, buffers, bar=bar))
        build = partial(build_manifest, info, records)
        if not contents.node_local:
            publish = (lambda: commit(folder, build(), beside)) if comm.rank == 0 else None
            comm.agree("checkpoint manifest", publish, CheckpointError)
    if contents.node_local:
        commit_everywhere(comm, folder, build, committers, beside)


def _records(comm: Comm, write: Callable[[], FileRecord] | None) -> list[FileRecord]:
    """Write this rank's file; return the records of all files, on rank 0. All ranks must call."""
    mine: list[FileRecord] = []
    comm.agree("checkpoint files", None if write is None else lambda: mine.append(write()), CheckpointError)
    return [record for of_rank in comm.gather_object(mine, "records of checkpoint files") for record in of_rank]


def _write_of_copy(
    write: Callable[..., FileRecord] | None,
    background: BackgroundSaves,
    states: Sequence[SliceState],
    buffers: Mapping[str, torch.Tensor],
) -> Callable[[], FileRecord] | None:
    """Copy now what is saved; the result writes the copy, or raises why there is none. No communication.

    A copy that fails is told with what could not be written: the ranks need not wait for each other here.
    """
    try:
        copied = background.copy(states, buffers)
    except Exception as error:
        problem = error  # the name in `except` ends with it

        def refuse() -> FileRecord:
            raise problem

        return refuse
    return None if write is None else partial(write, *copied)


def _complete(
    contents: CheckpointContents, info: SaveInfo, digests: dict[str, str] | None, replies: Sequence[SaveReply]
) -> SaveInfo:
    """Return `info` with the fields that the ranks make together."""
    hosts = dict(one.host for one in replies)
    return replace(
        info,
        frozen_digests=digests,
        hosts=[hosts[number] for number in range(contents.num_writers)] if contents.node_local else (),
    )


@contextlib.contextmanager
def _discarding(folder: Path, beside: Iterable[Path], commits: bool) -> Iterator[None]:
    """Delete what was written if the ranks fail inside."""
    try:
        yield
    except CheckpointError:
        if commits:
            with contextlib.suppress(OSError):  # as what failed here has been
                abandon(folder, beside)
        raise
