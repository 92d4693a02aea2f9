"""zero/manifest.json: its content, how it is written to JSON and read back, and whether the files agree with it.

The manifest is the commit mark: a folder without one holds no checkpoint, whatever else lies in it. It also holds the
layouts, so that a reader finds any element of any parameter from the manifest and the rank files alone. No torch here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.resources
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_zero.checkpoint import consolidate
from hf_zero.checkpoint.consolidate import (
    ConsolidateError,
    RankFiles,
    check_sizes,
    content_crc32,
    decode_manifest,
    file_marks,
)
from hf_zero.errors import CheckpointError
from hf_zero.layout import UnitLayout

ZERO_FOLDER = "zero"
MANIFEST_NAME = "manifest.json"
SCRIPT_NAME = "consolidate.py"

BUFFER_KIND = "buffer"
# In the folder of a checkpoint, where a pipeline was made of a model: its layers' names -> the model's own.
ORIGINAL_NAMES = "original_names.json"
# In names of buffers that are no buffers of the model, but optimizer state: PARAMETER::state::KIND.
STATE_MARK = "::state::"

# In `extra`, where nodes save into folders of their own: by rank, the host that has its file (consolidate.hosts_of).
HOSTS = "hosts"
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

    def to_json(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "stage": self.stage,
            "global_step": self.global_step,
            "params": [_tensor_json(info) for info in self.params],
            "tied": dict(self.tied),
            "param_groups": [dict(group) for group in self.param_groups],
            "client_state": self.client_state,
            "extra": dict(self.extra),
            "layouts": [layout.to_json() for layout in self.layouts],
        }


@dataclass(frozen=True, kw_only=True)
class Manifest(SaveInfo):
    """SaveInfo, and what the ranks wrote: all that zero/manifest.json holds."""

    format_version: int
    hf_zero_version: str
    saved_at: float  # seconds since 1970
    buffers: tuple[TensorInfo, ...]
    kinds: Mapping[str, Mapping[str, str]]
    scalars: Mapping[str, Mapping[str, Any]]
    files: tuple[FileInfo, ...]  # by rank

    @property
    def skipped_steps(self) -> int:
        """How many of the steps were left out because a gradient was not finite."""
        return int(self.extra.get("step_guard", {}).get("skipped_steps", 0))

    @property
    def nbytes(self) -> int:
        """Of the ranks' files."""
        return sum(file.size for file in self.files)

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
            "files": [dict(vars(file)) for file in self.files],
            "buffers": [_tensor_json(info) for info in self.buffers],
            "kinds": {name: dict(kinds) for name, kinds in self.kinds.items()},
            "scalars": {name: dict(scalars) for name, scalars in self.scalars.items()},
            **super().to_json(),
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
    """What rank files hold of the manifest that they belong to: see consolidate.file_marks."""
    return file_marks({**info.to_json(), "buffers": [_tensor_json(buffer) for buffer in buffers]})


def zero_folder(folder: str | Path) -> Path:
    return Path(folder) / ZERO_FOLDER


def scripts(folder: Path, *names: str) -> dict[Path, bytes]:
    """Copies of consolidate.py in `folder`; under another name it does what DeepSpeed's script of that name does."""
    return {folder / name: _script(name) for name in names}


def _script(name: str) -> bytes:
    script = importlib.resources.files("hf_zero.checkpoint").joinpath(SCRIPT_NAME).read_bytes()
    return script if name == SCRIPT_NAME else b"#!/usr/bin/env python3\n" + script


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
    return json.dumps({**content, "crc32": content_crc32(content)}, indent=1).encode("ascii")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        CheckpointError: There is none, it is damaged, or of a newer format. The newest complete checkpoint beside
            it is offered.
    """
    with offering(folder):
        return Manifest.from_json(consolidate.read_manifest(Path(folder)))


def _tensor_json(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "shape": list(info.shape), "dtype": info.dtype}


def _tensor_info(data: Mapping[str, Any]) -> TensorInfo:
    return TensorInfo(data["name"], tuple(data["shape"]), data["dtype"])


# -------------------------------------------------------------------- do the files agree?
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
        sizes = {file.name: file.size for file in manifest.files}
        check_sizes(Path(folder), sizes, consolidate.hosts_of({"extra": manifest.extra}))


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
            if newest is None or manifest["saved_at"] > newest[0]:
                with contextlib.closing(RankFiles(child, manifest)) as files:
                    for rank in range(files.count):
                        files.header(rank)
                newest = (manifest["saved_at"], child)
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
