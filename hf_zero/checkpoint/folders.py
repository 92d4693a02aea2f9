"""Checkpoint folders: which one is meant by a folder and a tag, whether it is complete, and what else there is.

A checkpoint is in `FOLDER/TAG`, and the file `latest` in FOLDER names a tag, as DeepSpeed has them. Every save has a
tag, and `latest` names that of the last one: a folder that is named without a tag always means the newest checkpoint
in it. A folder may also be a checkpoint itself, as those of the Trainer are. No torch here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from hf_zero.checkpoint.consolidate import DEEPSPEEDS_NAME
from hf_zero.checkpoint.format import (
    ConsolidateError,
    Manifest,
    check_sizes,
    decode_manifest,
    foreign,
    load_manifest,
    manifest_path,
    zero_folder,
)
from hf_zero.checkpoint.rank_reader import RankFiles
from hf_zero.checkpoint.stand_alone import scripts
from hf_zero.errors import CheckpointError

LATEST_NAME = "latest"


def tagged(folder: str | Path | None, tag: str | int | None, default: str) -> tuple[Path, str]:
    """Return where a save goes: (the folder as it was given, the tag inside it).

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
    """Return the folder of the checkpoint that is meant: without a tag the one that `latest` names, if any.

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
    """Return the file that notes in `folder` that `tag` was saved last, and zero_to_fp32.py, as DeepSpeed has it."""
    return {**scripts(folder, [DEEPSPEEDS_NAME]), folder / LATEST_NAME: tag.encode()}


# -------------------------------------------------------------------- is it complete?
def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        CheckpointError: There is none, it is damaged, or of a newer format. The newest complete checkpoint beside
            it is offered.
    """
    with offering(folder):
        return load_manifest(Path(folder))


@contextlib.contextmanager
def offering(folder: str | Path) -> Iterator[None]:
    """An error of reading rank files inside becomes a CheckpointError that offers the newest complete checkpoint."""
    try:
        yield
    except ConsolidateError as error:
        raise CheckpointError(f"{error}.{offer(folder)}") from error


def check_files(folder: str | Path, manifest: Manifest) -> None:
    """Every file of the manifest is there with its size.

    Raises:
        CheckpointError: Files are missing or truncated; all are listed, and the newest complete checkpoint is offered.
    """
    with offering(folder):
        check_sizes(Path(folder), manifest.files, manifest.hosts)


def newest_complete_checkpoint(parent: str | Path, exclude: str | Path | None = None) -> Path | None:
    """The folder in `parent` whose checkpoint was committed last, among those with all files, whose headers fit."""
    excluded = None if exclude is None else Path(exclude).resolve()
    newest: tuple[float, Path] | None = None
    try:
        children = sorted(Path(parent).iterdir())
    except OSError:
        return None
    for child in children:
        if child.resolve() == excluded:
            continue
        try:
            manifest = decode_manifest(manifest_path(child).read_bytes())
            if newest is None or manifest.saved_at > newest[0]:
                with contextlib.closing(RankFiles(child, manifest)) as files:
                    for rank in range(files.count):
                        files.header(rank)
                newest = (manifest.saved_at, child)
        except (OSError, ValueError, ConsolidateError):
            continue
    return None if newest is None else newest[1]


def offer(folder: str | Path) -> str:
    """A sentence that names the newest complete checkpoint in `folder` or beside it; empty where there is none."""
    folder = Path(folder)
    inside = newest_complete_checkpoint(folder)
    if inside is not None:
        return f" The newest complete checkpoint inside it is {inside}."
    beside = newest_complete_checkpoint(folder.resolve().parent, exclude=folder)
    return "" if beside is None else f" The newest complete checkpoint beside it is {beside}."
