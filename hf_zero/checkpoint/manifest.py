"""zero/manifest.json: what it says, how it is written to JSON and read back, and whether the files agree with it.

The manifest is the commit mark: a folder without one holds no checkpoint, whatever else lies in it. It also holds the
layouts, so that a reader finds any element of any parameter from the manifest and the rank files alone. No torch here.
"""

from __future__ import annotations

import importlib.metadata
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.atomic_files import Progress, file_crc32
from hf_zero.checkpoint.consolidate import check_manifest, file_marks
from hf_zero.errors import CheckpointError
from hf_zero.layout import FORMAT_VERSION, UnitLayout

ZERO_FOLDER = "zero"
MANIFEST_NAME = "manifest.json"
SCRIPT_NAME = "consolidate.py"

# Kinds that hold the parameter itself: of a trainable parameter its master, of a frozen one the parameter.
WEIGHT_KINDS = ("master", "param")
BUFFER_KIND = "buffer"
# In names of buffers that are no buffers of the model, but optimizer state: PARAMETER::state::KIND.
STATE_MARK = "::state::"

# safetensors' names of element types.
DTYPE_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


# In `extra`: name -> digest of the frozen parameters that were not saved.
FROZEN_DIGESTS = "frozen_digests"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the model: its name in `state_dict()`, shape, and element type without "torch."."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileInfo:
    name: str
    size: int
    crc32: int


@dataclass(frozen=True)
class FileRecord:
    """What one rank wrote. Small and picklable: rank 0 gathers these before it writes the manifest."""

    rank: int
    file: FileInfo
    numels: dict[str, int]  # parameter -> elements of it in this file
    kinds: dict[str, dict[str, str]]  # parameter -> kind -> element type
    scalars: dict[str, dict[str, Any]]  # parameter -> optimizer scalars
    buffers: tuple[TensorInfo, ...]


@dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """What every rank knows about a save. All of it must be JSON: no tensors, no keys but strings."""

    world_size: int
    stage: int
    layouts: tuple[UnitLayout, ...]
    params: tuple[TensorInfo, ...]  # in state_dict order, tied ones under one name, with the model's own dtypes
    tied: Mapping[str, str] = field(default_factory=dict)  # other name -> the name in `params`
    param_groups: Sequence[Mapping[str, Any]] = ()  # the optimizer's hyperparameters
    global_step: int = 0
    client_state: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest(SaveInfo):
    """SaveInfo, and what the ranks wrote: the whole content of zero/manifest.json."""

    format_version: int
    hf_zero_version: str
    saved_at: float  # seconds since 1970
    buffers: tuple[TensorInfo, ...]
    kinds: Mapping[str, Mapping[str, str]]
    scalars: Mapping[str, Mapping[str, Any]]
    files: tuple[FileInfo, ...]  # by rank

    @property
    def identity(self) -> str:
        """One save differs by it from any other, in words for a message."""
        mark = zlib.crc32(repr([(file.name, file.size, file.crc32) for file in self.files]).encode())
        return f"step {self.global_step}, saved at {self.saved_at} with checksum {mark:08x}"

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": self.format_version,
            "hf_zero_version": self.hf_zero_version,
            "saved_at": self.saved_at,
            "world_size": self.world_size,
            "stage": self.stage,
            "global_step": self.global_step,
            "files": [{"name": file.name, "size": file.size, "crc32": file.crc32} for file in self.files],
            "params": [_tensor_json(info) for info in self.params],
            "buffers": [_tensor_json(info) for info in self.buffers],
            "tied": dict(self.tied),
            "kinds": {name: dict(kinds) for name, kinds in self.kinds.items()},
            "scalars": {name: dict(scalars) for name, scalars in self.scalars.items()},
            "param_groups": [dict(group) for group in self.param_groups],
            "client_state": self.client_state,
            "extra": dict(self.extra),
            "layouts": [layout.to_json() for layout in self.layouts],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """`data`: what `check_manifest` has found to be sound."""
        parts: dict[str, Any] = {
            "files": tuple(FileInfo(file["name"], file["size"], file["crc32"]) for file in data["files"]),
            "params": tuple(_tensor_info(info) for info in data["params"]),
            "buffers": tuple(_tensor_info(info) for info in data["buffers"]),
            "layouts": tuple(UnitLayout.from_json(layout) for layout in data["layouts"]),
        }
        plain = {field.name: data[field.name] for field in fields(cls) if field.name not in parts}
        return cls(**plain, **parts)


def marks_of(info: SaveInfo, buffers: Iterable[TensorInfo]) -> dict[str, str]:
    """What rank files say of the manifest that they belong to: see consolidate.file_marks."""
    content = {
        "layouts": [layout.to_json() for layout in info.layouts],
        "params": [_tensor_json(param) for param in info.params],
        "tied": dict(info.tied),
        "buffers": [_tensor_json(buffer) for buffer in buffers],
    }
    return file_marks(content)


def zero_folder(folder: str | Path) -> Path:
    return Path(folder) / ZERO_FOLDER


def manifest_path(folder: str | Path) -> Path:
    return zero_folder(folder) / MANIFEST_NAME


def package_version() -> str:
    try:
        return importlib.metadata.version("hf-zero")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


# -------------------------------------------------------------------- JSON text
def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes: JSON, closed by a checksum of everything else in it."""
    content = manifest.to_json()
    return json.dumps({**content, "crc32": _content_crc32(content)}, indent=1).encode("ascii")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        CheckpointError: There is none, it is damaged, or it is of a newer format. The newest whole checkpoint beside
            it is offered.
    """
    path = manifest_path(folder)
    try:
        return _decode_manifest(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} holds no complete checkpoint: {path} is missing.{offer(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except _UnreadableError as error:
        raise CheckpointError(f"{path} {error}.{offer(folder)}") from error


class _UnreadableError(Exception):
    """The bytes are not a manifest that this version understands; the text says why."""


def _decode_manifest(data: bytes) -> Manifest:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(f"is damaged: {error}") from error
    if not isinstance(content, dict):
        raise _UnreadableError("is damaged: it is not a JSON object")
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise _UnreadableError(
            f"has format version {version}, and this hf_zero reads up to {FORMAT_VERSION}: it was written by hf_zero "
            f"{content.get('hf_zero_version')}, so upgrade to that or later"
        )
    try:
        if content.pop("crc32", None) != _content_crc32(content):
            raise _UnreadableError("is damaged: its checksum is wrong")
        check_manifest(content)
        return Manifest.from_json(content)
    except (ValueError, AssertionError, RecursionError) as error:
        raise _UnreadableError(f"contradicts itself: {error}") from error


def _content_crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode("ascii"))


def _tensor_json(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "shape": list(info.shape), "dtype": info.dtype}


def _tensor_info(data: Mapping[str, Any]) -> TensorInfo:
    return TensorInfo(data["name"], tuple(data["shape"]), data["dtype"])


# -------------------------------------------------------------------- do the files agree?
def check_files(folder: str | Path, manifest: Manifest) -> None:
    """Every file of the manifest is there with its size.

    Raises:
        CheckpointError: Files are missing or truncated; all are listed, and the newest whole checkpoint is offered.
    """
    if problems := _size_problems(folder, manifest):
        raise CheckpointError(f"{folder} is not whole: {'; '.join(problems)}.{offer(folder)}")


def check_checksums(
    folder: str | Path, manifest: Manifest, indices: Iterable[int] | None = None, progress: Progress | None = None
) -> None:
    """Read the files with these indices (ranks that wrote them; None means all) and compare their checksums.

    Raises:
        CheckpointError: Files have changed; all are listed, and the newest whole checkpoint is offered.
    """
    damaged = []
    for index in range(len(manifest.files)) if indices is None else indices:
        file = manifest.files[index]
        path = zero_folder(folder) / file.name
        if file_crc32(path, progress) != file.crc32:
            damaged.append(str(path))
    if damaged:
        raise CheckpointError(f"wrong checksum, the content has changed: {', '.join(damaged)}.{offer(folder)}")


def newest_complete_checkpoint(parent: str | Path, exclude: str | Path | None = None) -> Path | None:
    """The folder in `parent` whose checkpoint was committed last, among those with all files at their size."""
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
            manifest = _decode_manifest(manifest_path(child).read_bytes())
        except (OSError, _UnreadableError):
            continue
        if (newest is None or manifest.saved_at > newest[0]) and not _size_problems(child, manifest):
            newest = (manifest.saved_at, child)
    return None if newest is None else newest[1]


def offer(folder: str | Path) -> str:
    """A sentence that names the newest whole checkpoint in `folder` or beside it; empty where there is none."""
    folder = Path(folder)
    inside = newest_complete_checkpoint(folder)
    if inside is not None:
        return f" The newest whole checkpoint inside it is {inside}."
    beside = newest_complete_checkpoint(folder.resolve().parent, exclude=folder)
    return "" if beside is None else f" The newest whole checkpoint beside it is {beside}."


def _size_problems(folder: str | Path, manifest: Manifest) -> list[str]:
    problems = []
    for file in manifest.files:
        path = zero_folder(folder) / file.name
        try:
            size = path.stat().st_size
        except OSError as error:
            problems.append(f"{path} is missing ({error.strerror})")
            continue
        if size != file.size:
            problems.append(f"{path} is damaged (it has {size} bytes instead of {file.size})")
    return problems
