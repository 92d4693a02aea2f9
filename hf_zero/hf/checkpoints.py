"""Which `checkpoint-N` folders of a Trainer are whole, and which one a resume takes.

A folder is whole when `trainer_state.json`, which Trainer writes last, is there, and `zero/manifest.json`, the commit
mark of the sharded state, unless only the model was saved.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from hf_zero.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "zero/manifest.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def has_sharded_state(folder: str | Path) -> bool:
    """Whether masters and optimizer state were committed to `folder`."""
    return (Path(folder) / MANIFEST).is_file()


def why_torn(folder: str | Path) -> str | None:
    """The file whose absence shows that a save to `folder` was cut off, or None."""
    folder = Path(folder)
    if (folder / "zero").is_dir() and not has_sharded_state(folder):
        return f"{MANIFEST} is missing"
    if not (folder / TRAINER_STATE_NAME).is_file():
        return f"{TRAINER_STATE_NAME} is missing"
    return None


def whole_checkpoints(output_dir: str | Path) -> list[Path]:
    """Whole `checkpoint-N` folders, the newest (largest N) first; says which newer ones are passed over."""
    folder = Path(output_dir)
    numbered = [
        (int(match.group(1)), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and (match := _CHECKPOINT.fullmatch(path.name)) is not None
    ]
    found: list[Path] = []
    for _, path in sorted(numbered, reverse=True):
        reason = why_torn(path)
        if reason is None:
            found.append(path)
        elif not found:
            logger.warning("passing over %s: %s, so its save was cut off", path, reason)
    return found


def checkpoint_to_resume(output_dir: str | Path, asked: str | Path | bool) -> str:
    """The folder that `resume_from_checkpoint=asked` means: the newest whole one for True, else the one named.

    Raises:
        CheckpointError: There is none, or the one named is not whole; the newest whole one is offered.
    """
    if asked is True:
        found = whole_checkpoints(output_dir)
        if not found:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but {output_dir} holds no whole checkpoint-N folder.\n"
                "Leave resume_from_checkpoint out to start from the beginning."
            )
        return str(found[0])
    folder = Path(str(asked))
    reason = why_torn(folder) if folder.is_dir() else "there is no such folder"
    if reason is not None:
        raise CheckpointError(f"cannot resume from {folder}: {reason}.{offer(folder)}")
    return str(folder)


def offer(folder: str | Path) -> str:
    """A sentence that names the newest whole checkpoint beside `folder`, or nothing if there is none."""
    folder = Path(folder)
    others = [path for path in whole_checkpoints(folder.parent) if path != folder]
    return f"\nThe newest whole checkpoint is {others[0]}." if others else ""


def state_to_load(project: Any, input_dir: str | None) -> str:
    """The folder that `accelerator.load_state(input_dir)` means; without one, the newest whole one of its project.

    Raises:
        CheckpointError: There is none, or the one named has no sharded state.
    """
    if input_dir is None and project.automatic_checkpoint_naming:
        root = Path(project.project_dir) / "checkpoints"
        numbered = {int(path.name.rpartition("_")[2]): path for path in root.glob("checkpoint_*")}
        whole = [path for _, path in sorted(numbered.items()) if has_sharded_state(path)]
        if not whole:
            raise CheckpointError(f"{root} holds no whole checkpoint.")
        return str(whole[-1])
    folder = Path(input_dir or "").expanduser()
    if input_dir is None or not has_sharded_state(folder):
        raise CheckpointError(f"cannot load state from {folder}: {MANIFEST} is missing, so no save ended there.")
    return str(folder)
