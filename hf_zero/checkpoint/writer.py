"""Writes a checkpoint folder, in phases between which the ranks agree (save.py); no collectives here.

[Note: Commit order]
    0  every rank  check_info(info): what JSON cannot hold is refused before anything is written
    1  rank 0      save_id = prepare_folder(folder)            then broadcast save_id
    2  every rank  record = write_rank_file(folder, rank, slices, buffers, save_id=save_id)
    3  every rank  has every rank written its file? Rank 0 gathers the records
    4  rank 0      commit(folder, build_manifest(info, records), beside); where a rank or this failed, abandon(folder)
    5  every rank  wait for rank 0's result, so that no rank starts the next save into the folder before it is decided

A folder holds a checkpoint exactly if it has a manifest, and the manifest names its files. A save into a folder that
holds a checkpoint already writes rank files under new names, so the old checkpoint stays complete until one rename
replaces the manifest; only then its files are deleted. Whenever the processes die, what the folder holds is the old
checkpoint or the new one (or none, if there was none).

All other files of a save (`beside`: the scripts, a pipeline's config.json, `latest`) are written before that rename
under temporary names, and get their own after it. So a save that fails has replaced none of them, and what takes space
has been taken before anything is replaced. Processes that die between these renames leave the new checkpoint beside
older ones of these files; the next save deletes what has kept its temporary name.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.atomic_files import forget, give_name, staged, temporary_name, written_atomically
from hf_zero.checkpoint.folders import offering, read_manifest
from hf_zero.checkpoint.format import (
    BUFFER_KIND,
    CODES,
    ITEM_BYTES,
    SCALE_MARK,
    FileInfo,
    Manifest,
    SaveInfo,
    TensorInfo,
    check_sizes,
    encode_manifest,
    encode_rank_header,
    file_marks,
    manifest_path,
    package_version,
    version_of,
    zero_folder,
)
from hf_zero.checkpoint.rank_writer import DataWriter
from hf_zero.errors import CheckpointError
from hf_zero.layout import Slice
from hf_zero.progress import progress
from hf_zero.sharding.shard import KeptElements

logger = logging.getLogger(__name__)

_VISIBLE_WITHIN_S = 10.0
_BAR_BYTES = 64 << 20  # written at once where a bar is told of it: a whole tensor may take minutes
_SHARE = (
    "Save to a file system that all nodes share, or let every node keep its own files: "
    '{"checkpoint": {"use_node_local_storage": true}}, under Trainer save_on_each_node=True.'
)
RANK_FILE_PATTERN = "rank-*.safetensors*"  # temporary names included


Scalar = float | int | bool


@dataclass(frozen=True)
class Chunked:
    """A 1-D tensor that comes in chunks from where it is kept, so that it is never in memory in full."""

    numel: int
    dtype: torch.dtype
    chunks: Callable[[], Iterator[torch.Tensor]]  # each chunk is valid until the next is asked for
    keep: Callable[[], KeptElements] | None = None  # of what is on a disk: as it is now, whatever becomes of it


@dataclass(frozen=True)
class SliceState:
    """The slice of one parameter that a rank saves, with its optimizer state."""

    slice: Slice
    # 1-D [slice_.numel] each: "master" or "param", "exp_avg", "exp_avg_sq", ...
    tensors: Mapping[str, torch.Tensor | Chunked]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)  # such as "step": the same on every owner


@dataclass(frozen=True)
class FileRecord:
    """The record of what one rank wrote: small and picklable, as rank 0 gathers them before it writes the manifest."""

    rank: int
    file: FileInfo
    numels: dict[str, int]  # parameter -> elements of it in this file
    kinds: dict[str, dict[str, str]]  # parameter -> kind -> element type
    scalars: dict[str, dict[str, Any]]  # parameter -> optimizer scalars
    buffers: tuple[TensorInfo, ...]
    groups: Mapping[str, int]  # parameter -> index of its group, of those that the rank updates


# -------------------------------------------------------------------- phase 0: every rank
def check_info(info: SaveInfo) -> None:
    """Refuse what JSON cannot hold, before anything is written.

    Raises:
        CheckpointError: A hyperparameter or an extra value is not JSON (all are named).
    """
    problems: list[str] = []
    find_unwritable([dict(group) for group in info.param_groups], "param_groups", problems)
    find_unwritable(info.lr_scheduler, "lr_scheduler", problems)
    if problems:
        raise CheckpointError(
            f"a checkpoint holds JSON and tensors only, and these are neither: {'; '.join(problems)}. "
            "Pass numbers, strings, booleans, None, lists, and dictionaries with string keys."
        )


# -------------------------------------------------------------------- phase 1: rank 0
def prepare_folder(folder: str | Path, beside: Iterable[Path] = ()) -> str:
    """Make `folder` ready for a save and return the save id that every rank must pass to `write_rank_file`.

    Rank 0 only, before any rank writes. The id is empty for a new folder; it sets the file names apart from those of
    the checkpoint that the folder holds already.
    """
    make_folder(zero_folder(folder))
    discard(folder, beside)
    return secrets.token_hex(4) if manifest_path(folder).exists() else ""


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder}: {error.strerror or error}") from error


# -------------------------------------------------------------------- phase 2: every rank
def _wait_for_folder(folder: str | Path) -> None:
    """Wait until this rank sees the folder that rank 0 has made: network file systems have caches.

    Raises:
        CheckpointError: It does not: the file system is another one.
    """
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not zero_folder(folder).is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(f"rank 0 has made {zero_folder(folder)}, and this rank does not see it.\n{_SHARE}")
        time.sleep(0.1)


def write_rank_file(
    folder: str | Path,
    rank: int,
    slices: Iterable[SliceState],
    buffers: Mapping[str, torch.Tensor] | None = None,
    *,
    save_id: str = "",
    info: SaveInfo | None = None,
    groups: Mapping[str, int] | None = None,
    bar: str = "",
) -> FileRecord:
    """Write this rank's shards; they are on the disk when this returns.

    Tensors are written one by one in chunks, from whatever device they are on: no second copy of the state is made.
    Any thread may call, several at once for several files. No collectives, and the GIL is released for the work.

    Args:
        slices: Everything this rank owns. Tensors are 1-D [slice_.numel], in their own dtype.
        buffers: Persistent buffers, unsharded, under their state_dict names; given by rank 0 only.
        info: What the manifest will hold; the file is marked with it.
        groups: See FileRecord.
        bar: The title of a progress bar; without one there is none.
    Raises:
        CheckpointError: The operating system refused; the message names the file, and nothing of it is left.
    """
    _wait_for_folder(folder)
    states = list(slices)
    for state in states:
        _check_state(state)
    infos = [TensorInfo(name, tuple(one.shape), dtype_name(one.dtype)) for name, one in (buffers or {}).items()]
    tensors = [(f"{s.slice.name}::{kind}", tensor) for s in states for kind, tensor in s.tensors.items()]
    tensors += [(f"{name}::{BUFFER_KIND}", one.detach().reshape(-1)) for name, one in (buffers or {}).items()]
    sources = {key: _chunked(tensor) for key, tensor in tensors}
    if len(sources) < len(tensors):
        raise AssertionError(f"a tensor is given twice: {sorted(key for key, _ in tensors)}")
    path = zero_folder(folder) / f"rank-{rank:05d}{'.' if save_id else ''}{save_id}.safetensors"
    marks = {} if info is None else file_marks(info, infos)
    if rank:
        marks.pop("buffers", None)
    file = _write_tensors(path, sources, {"format": "pt", **marks}, bar)
    return FileRecord(
        rank=rank,
        file=file,
        numels={state.slice.name: state.slice.numel for state in states},
        kinds={s.slice.name: {kind: dtype_name(t.dtype) for kind, t in s.tensors.items()} for s in states},
        scalars={state.slice.name: dict(state.scalars) for state in states if state.scalars},
        buffers=tuple(infos),
        groups=groups or {},
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_state(state: SliceState) -> None:
    for key, value in state.scalars.items():
        if not isinstance(value, (bool, int, float)):
            raise AssertionError(f"{state.slice.name} {key}: a scalar must be a number, not {type(value).__name__}")
    for kind, tensor in state.tensors.items():
        if isinstance(tensor, Chunked):
            shape: tuple[int, ...] = (tensor.numel,)
        else:
            shape = tuple(tensor.shape)
            if tensor.numel() > 1 and tensor.stride() == (0,):
                raise AssertionError(f"{state.slice.name} {kind}: this is a placeholder, not the shard")
        if shape != (state.slice.numel,):
            raise AssertionError(f"{state.slice.name} {kind}: shape {shape} instead of ({state.slice.numel},)")


def _chunked(tensor: torch.Tensor | Chunked) -> Chunked:
    """Return a tensor in the form that is written."""
    if isinstance(tensor, Chunked):
        return tensor
    return Chunked(tensor.numel(), tensor.dtype, lambda: iter([tensor]))


def _write_tensors(path: Path, sources: Mapping[str, Chunked], metadata: Mapping[str, str], bar: str) -> FileInfo:
    """Write a file of these tensors. The header, which holds the checksums of all others, is written last."""
    entries = {key: (CODES[dtype_name(source.dtype)], [source.numel]) for key, source in sources.items()}
    ordered, header = encode_rank_header(entries, metadata, None)
    size = len(header) + sum(ITEM_BYTES[code] * numel for code, [numel] in entries.values())
    with written_atomically(path) as file, progress(bar, size - len(header), shown=bool(bar)) as done:
        with DataWriter(file, len(header), size) as data:
            for key in ordered:
                for chunk in sources[key].chunks():
                    for part in chunk.split(max(_BAR_BYTES // chunk.element_size(), 1)) if bar else [chunk]:
                        data.write(part)
                        done(part.numel() * part.element_size())
                data.end_tensor()
        _, header = encode_rank_header(entries, metadata, data.checksums)
        file.write(header, 0)
    return FileInfo(path.name, size, zlib.crc32(header))


# -------------------------------------------------------------------- phase 4: rank 0
def build_manifest(info: SaveInfo, records: Sequence[FileRecord]) -> Manifest:
    """Put together what the ranks wrote, and check that together they wrote every element of every parameter."""
    records = sorted(records, key=lambda record: record.rank)
    if [record.rank for record in records] != list(range(info.world_size)):
        raise AssertionError(f"records of ranks {[r.rank for r in records]} at world size {info.world_size}")
    kinds: dict[str, dict[str, str]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    groups = dict(info.param_group_of)
    for record in records:
        groups |= record.groups
        for name, found in record.kinds.items():
            if kinds.setdefault(name, found) != found:
                raise AssertionError(f"{name}: rank {record.rank} saved {found}, another rank {kinds[name]}")
        for name, values in record.scalars.items():
            others = scalars.setdefault(name, values)
            if any(key.endswith(SCALE_MARK) and values.get(key) != one for key, one in others.items()):
                raise AssertionError(f"{name}: rank {record.rank} saved {values}, another rank {others}")
    manifest = Manifest(
        **vars(replace(info, param_group_of=groups)),
        format_version=version_of(info.layouts, scalars),
        hf_zero_version=package_version(),
        saved_at=time.time(),
        buffers=tuple(buffer for record in records for buffer in record.buffers),
        kinds=kinds,
        scalars=scalars,
        files=tuple(record.file for record in records),
    )
    _check_complete(manifest, records)
    return manifest


def commit(folder: str | Path, manifest: Manifest, beside: Mapping[Path, bytes]) -> None:
    """Publish what the ranks wrote, then delete the files of the checkpoint that it replaces. Rank 0 only."""
    prepare_commit(folder, manifest, range(len(manifest.files)), beside)
    publish(folder)
    follow_up(folder, manifest, beside)


def prepare_commit(folder: str | Path, manifest: Manifest, ranks: Sequence[int], beside: Mapping[Path, bytes]) -> None:
    """Do all that may fail, where the files of these ranks are in the folder; then comes `publish`."""
    for path, content in beside.items():
        if path.is_dir():
            raise CheckpointError(f"cannot write {path}: {os.strerror(errno.EISDIR)}")
        with staged(path) as file:
            file.write(content)
        if content.startswith(b"#!"):
            with suppress(OSError):  # some file systems have no such mark
                temporary_name(path).chmod(0o755)
    _wait_for_files(folder, [manifest.files[rank] for rank in ranks])
    with staged(manifest_path(folder)) as file:
        file.write(encode_manifest(manifest))


def publish(folder: str | Path) -> None:
    """Publish what `prepare_commit` has written, by one rename."""
    give_name(manifest_path(folder))


def follow_up(folder: str | Path, manifest: Manifest, beside: Iterable[Path]) -> None:
    """Name the files beside the manifest, which is published, and delete the rank files that it does not list."""
    for path in beside:
        give_name(path)
    _delete_rank_files(folder, keep={file.name for file in manifest.files})


def _wait_for_files(folder: str | Path, files: Sequence[FileInfo]) -> None:
    """Wait until this rank sees what the others wrote: network file systems have caches."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            with offering(folder):
                return check_sizes(Path(folder), files)
        except CheckpointError as error:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the files of all ranks were written, but the rank that commits does not see them all: {error}\n"
                    f"{_SHARE}"
                ) from error
            time.sleep(0.1)


def discard(folder: str | Path, beside: Iterable[Path] = ()) -> None:
    """Delete what unfinished saves wrote, `beside` it too. Rank 0 only, when no rank is writing.

    A checkpoint that the folder holds is untouched: files that the manifest names are never deleted here.
    """
    keep: set[str] = set()
    if manifest_path(folder).exists():
        try:
            keep = {file.name for file in read_manifest(folder).files}
        except CheckpointError as error:
            logger.warning("nothing is deleted in %s: %s", zero_folder(folder), error)
            return
    _delete_rank_files(folder, keep)
    for path in (*beside, manifest_path(folder)):
        forget(path)


def abandon(folder: str | Path, beside: Iterable[Path] = ()) -> None:
    """Discard a save that failed: where there was no checkpoint before, no file or empty folder stays."""
    discard(folder, beside)
    if not manifest_path(folder).exists():
        delete_empty(folder)


def delete_empty(folder: str | Path) -> None:
    """Delete the folder of a checkpoint if nothing is in it."""
    for path in (zero_folder(folder), Path(folder)):
        with suppress(OSError):  # something is, or there is none
            path.rmdir()


def _delete_rank_files(folder: str | Path, keep: set[str]) -> None:
    for path in zero_folder(folder).glob(RANK_FILE_PATTERN):
        if path.name in keep:
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # The checkpoint is complete without it: not worth failing a training run for.
            logger.warning("cannot delete %s, which no checkpoint needs any more: %s", path, error)


def _check_complete(manifest: Manifest, records: Sequence[FileRecord]) -> None:
    problems = []
    for slot in (slot for layout in manifest.layouts for slot in layout.slots):
        saved = sum(record.numels.get(slot.name, 0) for record in records)
        if saved != slot.numel:
            problems.append(f"{slot.name}: {saved} of {slot.numel} elements")
    if not problems:
        try:
            Manifest.from_json(manifest.to_json())
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise AssertionError("the ranks' files do not make up the model: " + "; ".join(problems))


def find_unwritable(value: Any, where: str, problems: list[str]) -> None:
    """Append to `problems` what JSON cannot hold of `value`, which is called `where`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            find_unwritable(item, f"{where}[{index}]", problems)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                # json would write it as a string without a word, and the reader would not find it.
                problems.append(f"the key {key!r} of {where}")
            find_unwritable(item, f"{where}[{key!r}]", problems)
    else:
        problems.append(f"{where} ({type(value).__name__})")
