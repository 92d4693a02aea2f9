"""Which folder a checkpoint goes to and comes from: `FOLDER/TAG`, and the file `latest`, as DeepSpeed has them.

Every save has a tag, and `latest` names that of the last one: a folder that is named without a tag always means the
newest checkpoint in it. A folder may also be a checkpoint itself, as those of the Trainer are. No torch here.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path, PurePath

from hf_zero.checkpoint.consolidate import DEEPSPEEDS_NAME, foreign
from hf_zero.checkpoint.manifest import newest_complete_checkpoint, offer, scripts, zero_folder
from hf_zero.errors import CheckpointError

logger = logging.getLogger(__name__)

LATEST_NAME = "latest"


def tagged(folder: str | Path | None, tag: str | int | None, default: str) -> tuple[Path, str]:
    """Where a save goes: (the folder as it was given, the tag inside it).

    Raises:
        CheckpointError: No folder is named, or the tag leads out of it.
    """
    if folder is None or not str(folder) or "\0" in str(folder):
        raise CheckpointError(f"save_checkpoint: the folder is {folder!r}: expected the path of one.")
    if tag is None or tag == "":
        return Path(folder), default
    name, parts = str(tag), PurePath(str(tag))
    if parts.is_absolute() or not parts.parts or ".." in parts.parts or "\0" in name or name == LATEST_NAME:
        raise CheckpointError(
            f"save_checkpoint: the tag is {name!r}: expected the name of a folder inside {folder}, other than "
            f"{LATEST_NAME!r}."
        )
    return Path(folder), name


def chosen(folder: str | Path | None, tag: str | int | None = None, latest: str = LATEST_NAME) -> Path:
    """Where the checkpoint is that is meant by `folder` and `tag`: without a tag the one that `latest` names, if any.

    Args:
        latest: The name of that file; other tools have others.
    Raises:
        CheckpointError: No folder is named, or `latest` names no folder.
    """
    if folder is None or not str(folder) or "\0" in f"{folder}{tag}":
        raise CheckpointError(f"the folder of the checkpoint is {folder!r}: expected the path of one.")
    folder = Path(folder)
    if tag is not None and tag != "":
        return folder / str(tag)
    file = folder / latest
    if not file.is_file():
        return folder
    try:
        named = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not named or "\0" in named or not os.path.isdir(folder / named):
        raise CheckpointError(
            f"{file} names {named[:100]!r}, but there is no such folder beside it: pass the tag of one that is there."
            f"{offer(folder)}"
        )
    return folder / named


def holds_nothing(folder: Path) -> bool:
    """Whether no save has come to `folder` yet: no checkpoint, complete or not, is in it or one level below."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: expected the folder of a checkpoint.")
    if how := foreign(folder):
        raise CheckpointError(f"{folder} holds no checkpoint of hf_zero{how}")
    return not zero_folder(folder).exists() and newest_complete_checkpoint(folder) is None


def latest_files(folder: Path, tag: str) -> dict[Path, bytes]:
    """What notes in `folder` that `tag` was saved last, and zero_to_fp32.py there, where DeepSpeed has it."""
    return {**scripts(folder, DEEPSPEEDS_NAME), folder / LATEST_NAME: tag.encode()}
