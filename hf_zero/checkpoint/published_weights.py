"""Files that lie beside `zero/` in a checkpoint folder: whether they can be read at all. No torch here.

What their formats tell: JSON must parse, torch's files are zip archives with a checksum of every part, safetensors
files have the length in their headers. So a file that was cut short is found without a list of checksums.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from hf_zero.checkpoint.format import parse_json
from hf_zero.checkpoint.rank_reader import SafetensorsFile

_LEGACY_PICKLE = b"\x80"  # how files of torch.save begin that are no archives
# The readers of the three formats raise these; RuntimeError includes NotImplementedError.
_DAMAGE = (ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)


def damaged_files(
    folder: str | Path,
    patterns: Iterable[str] = ("*.json", "*.pt", "*.pth", "*.bin", "*.safetensors"),
    *,
    quick: bool = False,
) -> dict[str, str]:
    """File -> what is wrong with it, a text that follows its name, for files of these names.

    Args:
        quick: Look for files that were cut short only, which takes no reading of all their bytes.
    """
    problems = {}
    for path in sorted({path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}):
        try:
            _check(path, quick)
        except OSError as error:
            problems[path.relative_to(folder).as_posix()] = f"is damaged: {error.strerror or error}"
        except _DAMAGE as error:
            problems[path.relative_to(folder).as_posix()] = f"is damaged: {str(error) or type(error).__name__}"
    return problems


def _check(path: Path, quick: bool) -> None:
    """Raise OSError or one of _DAMAGE if the file cannot be read. Files of other formats pass."""
    if path.suffix == ".json":
        parse_json(path.read_bytes())
    elif path.suffix == ".safetensors":
        with closing(SafetensorsFile(path)) as weights:
            weights.header()
    elif path.suffix in (".pt", ".pth", ".bin"):
        with path.open("rb") as file:
            if file.read(1) == _LEGACY_PICKLE:
                return
        with zipfile.ZipFile(path) as archive:
            damaged = None if quick else archive.testzip()
        if damaged is not None:
            raise ValueError(f"wrong checksum of {damaged}")
