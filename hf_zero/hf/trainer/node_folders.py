"""Trainer with `save_on_each_node`: who writes the small files and rotates, and a resume from their folders.

transformers lets the first process of each node write and delete. Where nodes share a file system after all, these
would race; so here it is one rank of each file system, which is found by looking.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_zero.checkpoint.committers import find_committers, is_committer
from hf_zero.checkpoint.folders import offering, read_manifest
from hf_zero.checkpoint.format import check_sizes, manifest_path, zero_folder
from hf_zero.checkpoint.published_weights import damaged_files
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.processes import agree, all_ranks_give
from hf_zero.errors import CheckpointError
from hf_zero.hf.trainer.resume import (
    AUTO,
    CHECKPOINT_PREFIX,
    NEWEST,
    RESUME,
    number_of,
    numbered,
    rng_state_file,
    usable,
)

logger = logging.getLogger(__name__)

# TrainingArguments, by id, between whose ranks the writers are agreed: a callback may save inside.
_inside: set[int] = set()


# -------------------------------------------------------------------- saving
@contextlib.contextmanager
def one_writer_each(args: Any, comm: Comm) -> Iterator[None]:
    """Inside, `args.should_save` holds on one rank of each file system. All ranks must enter.

    Raises:
        CheckpointError: On every rank: one that has a file system to itself is not the first process of its node.
    """
    if id(args) in _inside or not args.save_on_each_node:
        yield
        return
    folder = Path(args.output_dir)
    committers = find_committers(comm, folder)

    def check() -> None:
        if is_committer(comm, committers) and args.local_process_index != 0:
            raise CheckpointError(
                f"save_on_each_node: no rank before this one sees the same {folder}, but LOCAL_RANK is "
                f"{args.local_process_index}, and the first process of each node writes. Put the folder on a file "
                "system that all ranks of a node see."
            )

    comm.agree("save_on_each_node", check, CheckpointError)
    args.save_on_each_node = is_committer(comm, committers)  # should_save is false on other ranks than 0 without it
    _inside.add(id(args))
    try:
        yield
    finally:
        _inside.discard(id(args))
        args.save_on_each_node = True


@contextlib.contextmanager
def weights_where_asked(trainer: Any) -> Iterator[None]:
    """Let `save_pretrained` write on every rank that is told to be a main process, inside `one_writer_each`.

    transformers writes weights on rank 0 alone, whatever it is told: other nodes would have a checkpoint without.
    """
    model = trainer.model
    if id(trainer.args) not in _inside or not hasattr(model, "should_save_on_this_rank"):
        yield
        return
    model.should_save_on_this_rank = bool
    try:
        yield
    finally:
        del model.should_save_on_this_rank


# -------------------------------------------------------------------- resuming
@dataclass(frozen=True)
class _View:
    """The view that one rank has of a checkpoint folder."""

    problem: str | None
    identity: str | None = None  # of the sharded state; None where only weights were saved
    missing: frozenset[str] = frozenset()  # rank files


def agree_on_nodes(args: Any, asked: Any) -> str | None:
    """Agree on a checkpoint of which each node has a part; bring the small files to the nodes that lack them.

    A checkpoint is complete if no node has a damaged part, all have parts of one save, and together they have all
    files. None where there is none, and "auto" was asked for. All ranks must call; raises CheckpointError on every
    rank.
    """
    paths = numbered(Path(args.output_dir), CHECKPOINT_PREFIX) if asked in NEWEST else [Path(str(asked))]
    everyone: list[dict[str, _View | None]] = all_ranks_give({str(path): _view(path) for path in paths}, RESUME)
    names = list(dict.fromkeys(name for views in everyone for name in views))
    if asked not in NEWEST and len(names) > 1:
        raise CheckpointError(f"ranks would resume from different checkpoints: {names}.")
    if asked in NEWEST:
        names.sort(key=lambda name: number_of(Path(name), CHECKPOINT_PREFIX), reverse=True)
    for name in names:
        reason = _why_not(name, [views.get(name) for views in everyone])
        if reason is None:
            _bring_small_files(args, Path(name))
            return name
        if asked not in NEWEST:
            raise CheckpointError(f"Can't find a valid checkpoint at {name}: {reason}")
        if args.process_index == 0:
            logger.warning("passing over %s: %s", name, reason)
    # A whole checkpoint, of which another node has a part, is not to be written over.
    is_elsewhere = any(view is not None and view.missing for views in everyone for view in views.values())
    if asked == AUTO and not is_elsewhere:
        return None
    raise CheckpointError(
        f"Can't find a valid checkpoint at {args.output_dir}: resume_from_checkpoint={asked!r}, but the nodes of this "
        "run together hold no complete checkpoint-N folder.\n"
        "Leave resume_from_checkpoint out to start from the beginning."
    )


def _view(folder: Path) -> _View | None:
    """None if there is nothing of the checkpoint here."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    try:
        identity, missing = None, frozenset[str]()
        if zero_folder(folder).is_dir():
            manifest = read_manifest(folder)
            here = [file for file in manifest.files if (zero_folder(folder) / file.name).exists()]
            missing = frozenset(file.name for file in manifest.files) - {file.name for file in here}
            with offering(folder):
                check_sizes(folder, here)
            identity = manifest.identity
        if not (folder / TRAINER_STATE_NAME).is_file():
            return _View(f"{folder} is not complete: {TRAINER_STATE_NAME}, which is written last, is missing.")
        usable(folder)
    except CheckpointError as error:
        return _View(str(error).partition(" The newest complete checkpoint")[0])
    return _View(next(iter(damaged_files(folder, (TRAINER_STATE_NAME, SCHEDULER_NAME))), None), identity, missing)


def _why_not(name: str, views: Sequence[_View | None]) -> str | None:
    """Return why the ranks with these views cannot resume from that folder, or None; every rank finds the same."""
    seen = [(rank, view) for rank, view in enumerate(views) if view is not None]
    if not seen:
        return f"no node of this run has anything of {name}."
    problems = [f"rank {rank}: {view.problem}" for rank, view in seen if view.problem is not None]
    if problems:
        return "\n".join(problems)
    if len({view.identity for _, view in seen}) > 1:
        return "the nodes hold different saves: " + "; ".join(f"rank {rank}: {view.identity}" for rank, view in seen)
    if missing := frozenset.intersection(*(view.missing for _, view in seen)):
        return (
            f"no node of this run has {', '.join(sorted(missing))}. Start the run with the nodes that have them, or "
            f"copy them into {zero_folder(name)} of any node of this run."
        )
    without = [rank for rank, view in enumerate(views) if view is None]
    if without and seen[0][1].identity is None:
        return f"ranks {without} have no such folder, and it holds weights only: copy it to their nodes."
    return None


def _bring_small_files(args: Any, folder: Path) -> None:
    """Bring what a resume reads on every rank, and each rank's random state, to the nodes that lack them."""
    rng = os.path.basename(rng_state_file(args, folder))
    names = [TRAINER_STATE_NAME, SCHEDULER_NAME, str(manifest_path(folder).relative_to(folder)), rng]
    lacking = [name for name in names if not (folder / name).is_file()]
    wanted = sorted({name for one in all_ranks_give(lacking, RESUME) for name in one})
    if not wanted:
        return
    owned: list[list[str]] = all_ranks_give([name for name in wanted if (folder / name).is_file()], RESUME)
    first = {name: rank for rank, mine in reversed(list(enumerate(owned))) for name in mine}
    given: dict[str, bytes] = {}

    def read() -> dict[str, bytes]:
        mine = [name for name, rank in first.items() if rank == args.process_index]
        try:
            return {name: (folder / name).read_bytes() for name in mine}
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error

    def write() -> None:
        for target in (folder / name for name in lacking if name in given):
            # Several ranks of a node write the same.
            temporary = target.with_name(f"{target.name}.{args.process_index}.partial")
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(given[str(target.relative_to(folder))])
                os.replace(temporary, target)
            except OSError as error:
                raise CheckpointError(f"cannot write {error.filename}: {error.strerror}") from error

    for files in agree(RESUME, read, CheckpointError):
        given.update(files)
    agree(RESUME, write, CheckpointError)
