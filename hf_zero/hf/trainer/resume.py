"""Which `checkpoint-N` folders of a Trainer are whole, and which one a resume takes.

A folder is whole when `trainer_state.json`, which Trainer writes last, is there, and the sharded state in `zero/` was
committed with all its files, unless only the model was saved.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_zero.checkpoint.manifest import FROZEN_DIGESTS, check_files, manifest_path, offer, read_manifest, zero_folder
from hf_zero.checkpoint.published_weights import damaged_files
from hf_zero.distributed.processes import all_ranks_give
from hf_zero.errors import CheckpointError

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def has_sharded_state(folder: str | Path) -> bool:
    """Whether masters and optimizer state were committed to `folder`."""
    return manifest_path(folder).is_file()


def lacks_frozen_weights(folder: str | Path) -> bool:
    """Whether the sharded state in `folder` was committed without the weights that are not trained."""
    return bool(read_manifest(folder).extra.get(FROZEN_DIGESTS))


def why_torn(folder: str | Path) -> str | None:
    """What shows that a save to `folder` was cut off or has been damaged since, or None."""
    if zero_folder(folder).is_dir():
        try:
            check_files(folder, read_manifest(folder))
        except CheckpointError as error:
            return str(error).partition(" The newest whole checkpoint")[0]
    if not (Path(folder) / TRAINER_STATE_NAME).is_file():
        return f"{folder} is not whole: {TRAINER_STATE_NAME}, which is written last, is missing."
    return next(iter(damaged_files(folder, (TRAINER_STATE_NAME, SCHEDULER_NAME))), None)


def agree_on_checkpoint(args: Any, asked: str | bool) -> str:
    """What all ranks resume from: `checkpoint_to_resume` in the folder of the TrainingArguments. All ranks must call.

    Raises CheckpointError on every rank, before training begins, if one of them cannot resume, or from another folder.
    """
    chosen, problem = "", ""
    try:
        chosen = checkpoint_to_resume(args.output_dir, asked, quiet=args.process_index != 0)
    except CheckpointError as error:
        problem = str(error)
    everyone = all_ranks_give((chosen, problem))
    problems = list(dict.fromkeys(text for _, text in everyone if text))
    if problems:
        raise CheckpointError("\n".join(problems))
    folders = [folder for folder, _ in everyone]
    if len(set(folders)) > 1:
        raise CheckpointError(f"ranks would resume from different checkpoints: {folders} (in rank order).")
    return chosen


def checkpoint_to_resume(output_dir: str | Path, asked: str | Path | bool, *, quiet: bool = False) -> str:
    """The folder that `resume_from_checkpoint=asked` means: the newest whole one for True, else the one named.

    Args:
        quiet: Do not say which newer folders are passed over.
    Raises:
        CheckpointError: There is none, or the one named is not whole; the newest whole one is offered.
    """
    if asked is not True:
        folder = Path(str(asked))
        reason = why_torn(folder) if folder.is_dir() else f"there is no folder {folder}."
        if reason is not None:
            raise CheckpointError(f"Can't find a valid checkpoint at {folder}: {reason}{offer(folder)}")
        _check_usable(folder)
        return str(folder)
    for path in _numbered(Path(output_dir)):
        reason = why_torn(path)
        if reason is None:
            _check_usable(path)
            return str(path)
        if not quiet:
            logger.warning("passing over %s: %s", path.name, reason)
    raise CheckpointError(
        f"Can't find a valid checkpoint at {output_dir}: resume_from_checkpoint=True, but it holds no whole "
        "checkpoint-N folder.\n"
        "Leave resume_from_checkpoint out to start from the beginning."
    )


def _check_usable(folder: Path) -> None:
    """Raise CheckpointError for a folder that another tool wrote, or that has no weights to begin from."""
    if has_sharded_state(folder):
        return
    foreign = "Can't find a valid checkpoint at {}: it was written without hf_zero.\n{}"
    if (folder / OPTIMIZER_NAME).is_file():
        remedy = (
            f"{OPTIMIZER_NAME} holds the state of whole parameters. Remove it to go on from the weights with a new "
            "optimizer state."
        )
        raise CheckpointError(foreign.format(folder, remedy))
    if any(folder.glob("global_step*/*_states.pt")):
        remedy = "It holds DeepSpeed's files. Start from its weights: from_pretrained(...) and a new output folder."
        raise CheckpointError(foreign.format(folder, remedy))
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"Can't find a valid checkpoint at {folder}: it holds neither zero/, the sharded state, nor weights."
        )


def _numbered(folder: Path) -> list[Path]:
    """`checkpoint-N` folders, the largest N first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        if match is not None and path.is_dir():
            found.append((int(match.group(1)), path))
    return [path for _, path in sorted(found, reverse=True)]


def state_to_load(project: Any, input_dir: str | None) -> str:
    """The folder that `accelerator.load_state(input_dir)` means; without one, the newest whole one of its project.

    Raises:
        CheckpointError: There is none, or the one named has no sharded state.
    """
    if input_dir is None and project.automatic_checkpoint_naming:
        root = Path(project.project_dir) / "checkpoints"
        numbered = {int(path.name.rpartition("_")[2]): path for path in root.glob("checkpoint_*")}
        for _, path in sorted(numbered.items(), reverse=True):
            if has_sharded_state(path):
                return str(path)
        raise CheckpointError(f"{root} holds no whole checkpoint.")
    if input_dir is None:
        raise CheckpointError("accelerator.load_state needs a folder, or automatic_checkpoint_naming in its project.")
    folder = Path(input_dir).expanduser()
    read_manifest(folder)
    return str(folder)
