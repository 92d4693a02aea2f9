"""checksums.json: the files beside `zero/` in a checkpoint folder, as they were when the checkpoint was complete.

Other libraries write these files and have no checksums of their own. The list is set aside before a save writes into
the folder (replaced_files.py), and written after all else, by one rename: a folder without it is of before, or of a
save that broke off. It vouches for nothing that a load needs: files may be edited, added and deleted by whoever has a
reason, and then `hf-zero inspect --verify` names them, and a resume warns. No torch here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.atomic_files import written_atomically
from hf_zero.checkpoint.format import ZERO_FOLDER, parse_json
from hf_zero.checkpoint.replaced_files import is_kept
from hf_zero.errors import CheckpointError

LIST_NAME = "checksums.json"
# A resume compares the content of files up to this size, which are read anyway.
SMALL_BYTES = 16 << 20
_CHUNK = 4 << 20
_Crc32 = Callable[[memoryview, int], int]  # as zlib.crc32


@dataclass(frozen=True)
class Listed:
    """One file of the list."""

    size: int
    crc32: int


def write_list(folder: str | Path, crc32: _Crc32 = zlib.crc32) -> None:
    """List all files that are in `folder` now, but for those of `zero/`, which have checksums in its manifest.

    Args:
        crc32: zlib's, or one that is faster.
    Raises:
        CheckpointError, OSError: A file cannot be read, or the list cannot be written.
    """
    root = Path(folder)
    files = {name: [path.stat().st_size, _crc32(path, crc32)] for name, path in sorted(_present(root))}
    with written_atomically(root / LIST_NAME) as file:
        file.write(_encoded(files))


def read_list(folder: str | Path) -> dict[str, Listed] | None:
    """Path in `folder`, with slashes -> what was written there; None where the folder has no list.

    Raises:
        CheckpointError: The list is damaged, or cannot be read.
    """
    path = Path(folder) / LIST_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        files: dict[str, Any] = parse_json(data)["files"]
        if data != _encoded(files):
            raise ValueError("its checksum is wrong")
        return {name: Listed(int(size), int(crc32)) for name, (size, crc32) in files.items() if _is_inside(name)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def changed_files(folder: str | Path, listed: dict[str, Listed], *, largest: int | None = None) -> dict[str, str]:
    """File -> how it differs from the list, a text that follows its name.

    Args:
        largest: Of larger files only the size is compared.
    """
    changed = {}
    for name, was in listed.items():
        path = Path(folder) / name
        try:
            size = path.stat().st_size
            if size != was.size:
                changed[name] = f"has {size} bytes, and had {was.size} when the checkpoint was written"
            elif (largest is None or size <= largest) and _crc32(path) != was.crc32:
                changed[name] = "has changed since the checkpoint was written: its checksum is another"
        except FileNotFoundError:
            changed[name] = "is missing: it was there when the checkpoint was written"
        except OSError as error:
            changed[name] = f"cannot be read: {error.strerror or error}"
    return changed


def _present(root: Path) -> Iterator[tuple[str, Path]]:
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        own = name.startswith((f"{ZERO_FOLDER}/", LIST_NAME)) or is_kept(name)
        if path.is_file() and not own:
            yield name, path


def _is_inside(name: str) -> bool:
    """Nothing outside the folder is ever looked at, whatever a list says."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def _crc32(path: Path, crc32: _Crc32 = zlib.crc32) -> int:
    crc = 0
    buffer = memoryview(bytearray(min(_CHUNK, max(path.stat().st_size, 1))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = crc32(buffer[:count], crc)
    return crc


def _encoded(files: dict[str, Any]) -> bytes:
    """One form only, so that no byte can change unseen."""
    content = json.dumps(files, sort_keys=True, separators=(",", ":"))
    return f'{{"files":{content},"crc32":{zlib.crc32(content.encode("ascii"))}}}'.encode("ascii")
