"""Files that lie beside `zero/` in a checkpoint folder: whether they can be read at all. No torch here.

Nothing has a checksum of them but what their formats have: JSON must parse, torch's files are zip archives with a
checksum of every part, safetensors files have the length in their headers.
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
# What the three formats raise; RuntimeError includes NotImplementedError and RecursionError.
_DAMAGE = (ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)


def damaged_files(
    folder: str | Path, patterns: Iterable[str] = ("*.json", "*.pt", "*.pth", "*.bin", "*.safetensors")
) -> list[str]:
    """What is wrong with the files of these names: one text each, which names the file."""
    problems = []
    for path in sorted({path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}):
        try:
            _check(path)
        except OSError as error:
            problems.append(f"{path} is damaged: {error.strerror or error}")
        except _DAMAGE as error:
            problems.append(f"{path} is damaged: {str(error) or type(error).__name__}")
    return problems


def _check(path: Path) -> None:
    """Raise OSError or one of _DAMAGE if the file cannot be read."""
    if path.suffix == ".json":
        json.loads(path.read_bytes())
    elif path.suffix == ".safetensors":
        with closing(SafetensorsFile(path)) as weights:
            weights.header()
    else:
        with path.open("rb") as file:
            if file.read(1) == _LEGACY_PICKLE:
                return
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"wrong checksum of {damaged}")
