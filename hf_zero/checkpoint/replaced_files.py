"""Keeps what a folder held while other libraries save into it, until the new save is complete.

They write file by file under the final names, so nothing of theirs can be staged. Instead everything in the folder is
moved into a folder inside it before the save, by renames, and moved back if the save fails. The name of that inner
folder says how far it got, so that the next save finishes what a killed process has left. One process of each file
system calls. No torch here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

KEPT = ".replaced"  # everything of before is in there; what is beside it belongs to a save that is not over
_MOVING = ".replaced.moving"  # a part of it is
_OVER = ".replaced.over"  # the save is complete; what it has not written goes back to its place, the rest is deleted
_OURS = frozenset([KEPT, _MOVING, _OVER])


def set_aside(folder: Path) -> None:
    """Prepare `folder` for a save; it is made where there is none. Raises OSError; nothing has changed then."""
    _finish(folder)
    moving = folder / _MOVING
    try:
        moving.mkdir(parents=True)
        for path in _content(folder):
            path.rename(moving / path.name)
        moving.rename(folder / KEPT)
    except OSError:
        put_back(folder)
        raise


def put_back(folder: Path) -> None:
    """Delete what a failed save wrote, and let the folder hold what it held before. Raises OSError."""
    if (folder / KEPT).is_dir():
        for path in _content(folder):
            _delete(path)
        (folder / KEPT).rename(folder / _MOVING)
    _finish(folder)
    with suppress(OSError):  # it holds something
        folder.rmdir()


def drop(folder: Path) -> None:
    """Delete what a complete save has replaced; other files of the folder stay. Raises OSError."""
    (folder / KEPT).rename(folder / _OVER)
    _finish(folder)


def is_kept(name: str) -> bool:
    """Whether a path inside the folder, with slashes, is of a file that was set aside."""
    return name.partition("/")[0] in _OURS


def _finish(folder: Path) -> None:
    """Do what the last call for `folder` was to do, where its process was killed."""
    if (folder / KEPT).is_dir():
        put_back(folder)
    for inner in (folder / _MOVING, folder / _OVER):
        for path in _content(inner):
            if inner.name == _MOVING or not (folder / path.name).exists():
                path.rename(folder / path.name)
        shutil.rmtree(inner, ignore_errors=True)


def _content(folder: Path) -> Iterator[Path]:
    """Everything in `folder` but what was set aside, and empty folders."""
    paths = [*folder.iterdir()] if folder.is_dir() else []
    return (path for path in paths if path.name not in _OURS and (not path.is_dir() or any(path.iterdir())))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
