"""Finds the complete `checkpoint-N` folders of a Trainer, the one that a resume takes, and the small files in them.

A folder is complete when `trainer_state.json`, which Trainer writes last, is there, and the sharded state in `zero/`
was committed with all its files, unless only the model was saved.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import reissue_pt_warnings
from transformers.trainer_utils import SaveStrategy, sort_checkpoints

from hf_zero.checkpoint.agreement import refuse_differences
from hf_zero.checkpoint.file_list import SMALL_BYTES, changed_files, read_list
from hf_zero.checkpoint.folders import check_files, offer, read_manifest
from hf_zero.checkpoint.format import manifest_path, zero_folder
from hf_zero.checkpoint.published_weights import damaged_files
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.processes import agree, all_ranks_give, call_site
from hf_zero.errors import CheckpointError
from hf_zero.hf.local_files import on_all_ranks, reading, writing
from hf_zero.optim.schedules.base import Schedule

logger = logging.getLogger(__name__)
_start = logging.getLogger("hf_zero.start")  # shown at every level of verbosity

RESUME = "resume_from_checkpoint"
AUTO = "auto"  # the newest complete checkpoint, or none
NEWEST = (True, AUTO)
CHECKPOINT_PREFIX = "checkpoint-"


def has_sharded_state(folder: str | Path) -> bool:
    """Whether masters and optimizer state were committed to `folder`."""
    return manifest_path(folder).is_file()


def lacks_frozen_weights(folder: str | Path) -> bool:
    """Whether the sharded state in `folder` was committed without the weights that are not trained."""
    return bool(read_manifest(folder).frozen_digests)


def why_torn(folder: str | Path) -> str | None:
    """Return why the save in `folder` is incomplete or damaged, or None."""
    if zero_folder(folder).is_dir():
        try:
            check_files(folder, read_manifest(folder))
        except CheckpointError as error:
            return str(error).partition(" The newest complete checkpoint")[0]
    if not (Path(folder) / TRAINER_STATE_NAME).is_file():
        return f"{folder} is not complete: {TRAINER_STATE_NAME}, which is written last, is missing."
    try:
        listed = read_list(folder) or {}
    except CheckpointError as error:
        return str(error)
    cut = damaged_files(folder, (TRAINER_STATE_NAME, SCHEDULER_NAME)) | damaged_files(
        folder, map(glob.escape, listed), quick=True
    )
    return next((f"{os.path.join(folder, name)} {text}" for name, text in cut.items()), None)


def warn_of_changes(folder: str | Path) -> None:
    """Name the files that are not as they were when the checkpoint was written; on one rank."""
    changed = changed_files(folder, read_list(folder) or {}, largest=SMALL_BYTES)
    if changed:
        texts = "; ".join(f"{name} {text}" for name, text in changed.items())
        logger.warning("resuming from %s all the same: %s", folder, texts)


def agree_on_start(args: Any, asked: str | bool | None, timeout_s: float) -> bool:
    """Whether `train` was asked to resume: on all ranks, or on none. All ranks must call.

    Raises:
        CheckpointError: On every rank: some were asked to, and others were not; or a training that saves has another
            `output_dir` on some of them, where each would look for its checkpoints.
        DivergenceError: Some ranks did not come within `timeout_s` seconds.
    """
    folder = "" if args.save_strategy == SaveStrategy.NO else f"output_dir={os.path.abspath(args.output_dir)}"
    answers = all_ranks_give((asked or None, folder), "Trainer.train", timeout_s)
    refuse_differences("Trainer.train", [theirs for _, theirs in answers], "nothing was trained")
    everyone = [one for one, _ in answers]
    given = {rank: one for rank, one in enumerate(everyone) if one is not None}
    if given and len(given) < len(everyone):
        raise CheckpointError(
            f"train(resume_from_checkpoint=...) was given on some ranks only: rank(s) {list(given)} would resume from "
            f"{next(iter(given.values()))}, and rank(s) {[rank for rank, one in enumerate(everyone) if one is None]} "
            "would start anew.\nGive it on every rank; where it depends on the checkpoints that are there, let rank 0 "
            f"look and tell the others.\nCalled from: {call_site()}"
        )
    return bool(given)


def agree_on_checkpoint(args: Any, asked: Any) -> str | None:
    """Return the folder that all ranks resume from; see `checkpoint_to_resume`. All ranks must call.

    Raises CheckpointError on every rank, before training begins, if one of them cannot resume, or from another folder.
    """

    def find(asked: Any = asked) -> str | None:
        return checkpoint_to_resume(args.output_dir, asked, quiet=args.process_index != 0)

    folders = agree(RESUME, find, CheckpointError)
    if asked in NEWEST and len(set(folders)) > 1 and None not in folders:
        # A file system may show a new folder to one host later than to another.
        oldest = min(folders, key=lambda folder: number_of(Path(str(folder)), CHECKPOINT_PREFIX))
        folders = agree(RESUME, lambda: find(oldest), CheckpointError)
    if len(set(folders)) > 1:
        raise CheckpointError(f"ranks would resume from different checkpoints: {folders} (in rank order).")
    if args.process_index == 0 and folders[0] is not None:
        warn_of_changes(folders[0])
    return folders[0]


def tell_of_start(args: Any, folder: str | None) -> None:
    """Say what "auto" has come to, on one rank."""
    if args.process_index != 0:
        return
    if folder is None:
        _start.info("%s='auto': %s holds no complete checkpoint, training starts anew", RESUME, args.output_dir)
    else:
        _start.info("%s='auto': training goes on from %s", RESUME, folder)


def checkpoint_to_resume(output_dir: str | Path, asked: str | Path | bool, *, quiet: bool = False) -> str | None:
    """The folder that `resume_from_checkpoint=asked` means: the newest complete one for True and "auto", else the one
    named. None where there is no complete one, and "auto" was asked for.

    Args:
        quiet: Do not log which newer folders are passed over.
    Raises:
        CheckpointError: There is none, or the one named is incomplete; the newest complete one is offered.
    """
    if asked not in NEWEST:
        folder = Path(str(asked))
        reason = why_torn(folder) if folder.is_dir() else f"there is no folder {folder}."
        if reason is not None:
            raise CheckpointError(f"Can't find a valid checkpoint at {folder}: {reason}{offer(folder)}")
        return usable(folder)
    for path in numbered(Path(output_dir), CHECKPOINT_PREFIX):
        reason = why_torn(path)
        if reason is None:
            return usable(path)
        if not quiet:
            logger.warning("passing over %s: %s", path.name, reason)
    if asked == AUTO:
        return None
    raise CheckpointError(
        f"Can't find a valid checkpoint at {output_dir}: resume_from_checkpoint=True, but it holds no complete "
        "checkpoint-N folder.\n"
        'Leave resume_from_checkpoint out to start from the beginning, or ask for "auto".'
    )


def delete_older(run: Path, limit: int, keep: set[Path], leave_out: Path) -> None:
    """Delete the oldest `checkpoint-N` in `run` until `limit` are left, but none of `keep`.

    Unlike Trainer's own, it does not take the newest folder for a checkpoint: `leave_out`, if it is none of `keep`, is
    neither counted nor deleted.
    """
    found = [Path(folder) for folder in sort_checkpoints(str(run), use_mtime=True)]
    counted = [folder for folder in found if folder in keep or folder != leave_out]
    old = [folder for folder in counted if folder not in keep]
    for folder in old[: max(len(counted) - limit, 0)]:
        shutil.rmtree(folder, ignore_errors=True)


def usable(folder: Path) -> str:
    """`folder`. Raises CheckpointError if another tool wrote it, or it has no weights to begin from."""
    if has_sharded_state(folder):
        return str(folder)
    if (folder / OPTIMIZER_NAME).is_file():
        problem = (
            f"it was written without hf_zero.\n{OPTIMIZER_NAME} holds the state of full parameters. Remove it to go "
            "on from the weights with a new optimizer state."
        )
    elif any(folder.glob("global_step*/*_states.pt")):
        problem = (
            "it was written without hf_zero.\nIt holds DeepSpeed's files. Convert it, and resume from the result: "
            f"hf-zero convert from-deepspeed {folder} {folder}-converted"
        )
    elif not any(folder.glob("*.safetensors")):
        problem = "it holds neither zero/, the sharded state, nor weights."
    else:
        return str(folder)
    raise CheckpointError(f"Can't find a valid checkpoint at {folder}: {problem}")


def numbered(folder: Path, prefix: str) -> list[Path]:
    """`prefix`N folders, the largest N first."""
    found = [path for path in folder.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal()]
    found.sort(key=lambda path: number_of(path, prefix), reverse=True)
    return [path for path in found if path.is_dir()]


def number_of(folder: Path, prefix: str) -> int:
    """Return the N of a folder `prefix`N."""
    return int(folder.name.removeprefix(prefix))


def rng_state_file(args: Any, folder: str | Path) -> str:
    """Return the path that Trainer gives the file with this rank's random state."""
    return os.path.join(folder, f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth")


def write_scheduler(trainer: Any, folder: str) -> None:
    path = os.path.join(folder, SCHEDULER_NAME)
    with warnings.catch_warnings(record=True) as caught, writing(path):
        torch.save(trainer.lr_scheduler.state_dict(), path)
    reissue_pt_warnings(caught)


def read_scheduler(trainer: Any, comm: Comm, folder: str) -> None:
    """All ranks must call. Raises CheckpointError on every rank: no such file, damaged, or of another schedule."""
    path = os.path.join(folder, SCHEDULER_NAME)

    def read() -> None:
        if not os.path.isfile(path):
            raise CheckpointError(f"cannot resume from {folder}: {SCHEDULER_NAME} is missing.")
        with warnings.catch_warnings(record=True) as caught:
            state = torch.load(path, weights_only=True)
        reissue_pt_warnings(caught)
        # A schedule of the configuration and one of Trainer's keep different states.
        has_block = "last_batch_iteration" in state
        if has_block != isinstance(trainer.lr_scheduler, Schedule):
            raise CheckpointError(
                f"cannot resume from {folder}: it was written {'with' if has_block else 'without'} a scheduler block, "
                f"and this run's schedule is {type(trainer.lr_scheduler).__name__}. Use the same configuration, or "
                "start anew from its weights."
            )
        trainer.lr_scheduler.load_state_dict(state)

    on_all_ranks(comm, reading(path), read)


def state_to_load(project: Any, input_dir: str | None) -> str:
    """The folder that `accelerator.load_state(input_dir)` means; without one, the newest complete one of its project.

    Raises:
        CheckpointError: There is none, or the one named has no sharded state.
    """
    if input_dir is None and project.automatic_checkpoint_naming:
        root = Path(project.project_dir) / "checkpoints"
        newest = next(filter(has_sharded_state, numbered(root, "checkpoint_")), None)
        if newest is not None:
            return str(newest)
        raise CheckpointError(f"{root} holds no complete checkpoint.")
    if input_dir is None:
        raise CheckpointError("accelerator.load_state needs a folder, or automatic_checkpoint_naming in its project.")
    folder = Path(input_dir).expanduser()
    read_manifest(folder)
    return str(folder)
