"""The file `latest`: which of the tags in a folder was saved last, as DeepSpeed writes it. No torch here.

A save with a tag writes it after the commit, and one without a tag removes it: a folder that is named without a tag
always means the newest checkpoint in it.
"""

from __future__ import annotations

from pathlib import Path

from hf_zero.checkpoint.files import written_atomically
from hf_zero.errors import CheckpointError

LATEST_NAME = "latest"


def chosen(folder: str | Path, tag: str | None = None) -> Path:
    """Where the checkpoint is that is meant by `folder` and `tag`: without a tag the one that `latest` names, if any.

    Raises:
        CheckpointError: `latest` names no folder.
    """
    folder = Path(folder)
    if tag:
        return folder / tag
    file = folder / LATEST_NAME
    if not file.is_file():
        return folder
    named = file.read_text(encoding="utf-8").strip()
    if not named or not (folder / named).is_dir():
        raise CheckpointError(
            f"{file} names {named!r}, but there is no such folder beside it: pass the tag of one that is there."
        )
    return folder / named


def set_latest(folder: Path, tag: str | None) -> None:
    """Say in `folder` that `tag` was saved last, or without one that the checkpoint of the folder itself was.

    Raises:
        CheckpointError: The operating system refused.
    """
    file = folder / LATEST_NAME
    if tag:
        with written_atomically(file) as out:
            out.write(tag.encode())
        return
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot remove {file}: {error.strerror or error}") from error
