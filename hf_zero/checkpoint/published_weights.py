"""Files that lie beside `zero/` in a checkpoint folder: whether they can be read at all. No torch here.

Nothing has a checksum of them but what their formats have: JSON must parse, torch's files are zip archives with a
checksum of every part, safetensors files are as long as their headers say.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from hf_zero.checkpoint.consolidate import SafetensorsFile

_LEGACY_PICKLE = b"\x80"  # how files of torch.save begin that are no archives


def damaged_files(
    folder: str | Path, patterns: Iterable[str] = ("*.json", "*.pt", "*.pth", "*.bin", "*.safetensors")
) -> list[str]:
    """What is wrong with the files of these names: one text each, which names the file."""
    problems = []
    for path in sorted({path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}):
        try:
            problem = _problem(path)
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            problems.append(f"{path} is damaged: {problem}")
    return problems


def _problem(path: Path) -> str | None:
    if path.suffix == ".json":
        return _json_problem(path.read_bytes())
    if path.suffix == ".safetensors":
        return _safetensors_problem(path)
    return _archive_problem(path)


def _json_problem(text: bytes) -> str | None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    return None


def _archive_problem(path: Path) -> str | None:
    with path.open("rb") as file:
        if file.read(1) == _LEGACY_PICKLE:
            return None
    try:
        with zipfile.ZipFile(path) as archive:
            part = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return None if part is None else f"wrong checksum of {part}"


def _safetensors_problem(path: Path) -> str | None:
    with closing(SafetensorsFile(path)) as file:
        try:
            file.header()
        except ValueError as error:
            return str(error)
    return None
