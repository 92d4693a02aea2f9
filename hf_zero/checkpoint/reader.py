"""Reads any element of any parameter from a checkpoint folder, whatever layout the reader has.

Which file holds an element follows from the stored layouts alone, so the world size, stage and bucket size of the
reader do not matter. Bytes go from the file straight into the destination, where their checksums are compared: several
threads read large tensors, so that the disk has more than one thing to do, and reads while others are compared. No
collectives: each rank opens the folder for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.direct_reads import DirectFile, ahead
from hf_zero.checkpoint.folders import offering, read_manifest
from hf_zero.checkpoint.format import (
    BLOCK_BYTES,
    BUFFER_KIND,
    SCALE_MARK,
    STATE_MARK,
    WEIGHT_KINDS,
    Manifest,
    Segment,
    TensorInfo,
    segments,
)
from hf_zero.checkpoint.rank_reader import RankFiles, SafetensorsFile
from hf_zero.errors import CheckpointError
from hf_zero.layout import Piece, Slice, Slot, UnitLayout
from hf_zero.native.checksum import crc32_of_bytes
from hf_zero.progress import Done, ignore

_THREADS = 2
_PART_BYTES = 2 * BLOCK_BYTES  # what a thread reads at once: one window


def open_checkpoint(folder: str | Path) -> CheckpointReader:
    """Open a checkpoint folder and check that it is complete (all files there, at their size).

    Raises:
        CheckpointError: No manifest, a damaged one, files missing or truncated (all are listed); the newest complete
            checkpoint beside it is offered.
    """
    return CheckpointReader(Path(folder), read_manifest(folder))


@dataclass(frozen=True)
class _Part:
    """Some blocks of one file: which of their bytes are read, and the memory where these belong."""

    rank: int
    reads: list[tuple[int, memoryview]]  # from which byte of the parameter's slice in the rank file on

    def read(self, files: RankFiles, key: str) -> int:
        """Returns how many bytes were read, and are right."""
        tensor = files.tensor(self.rank, key, max(start + len(view) for start, view in self.reads))
        for start, view in self.reads:
            tensor.read(view, start)
        tensor.finish()
        ahead.forget()  # the next read may be much later
        return sum(len(view) for _, view in self.reads)


class CheckpointReader:
    """An open checkpoint folder. Files are opened at the first read of them; use as a context manager, or close().

    Tied parameters are found under each of their names. See `open_checkpoint`; `elsewhere`: see RankFiles.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, elsewhere: Mapping[int, SafetensorsFile] | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.on_read: Done = ignore  # told the bytes of every read
        with offering(folder):
            self._files = RankFiles(folder, manifest, crc32=crc32_of_bytes, open_file=DirectFile, elsewhere=elsewhere)
        # Files elsewhere come over the process group, which one thread may use.
        self._in_parallel = not elsewhere
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._files.close()
        ahead.free()

    # ---------------------------------------------------------------- what there is
    @cached_property
    def _units(self) -> dict[str, UnitLayout]:
        return {slot.name: layout for layout in self.manifest.layouts for slot in layout.slots}

    @cached_property
    def _buffers(self) -> dict[str, TensorInfo]:
        return {info.name: info for info in self.manifest.buffers}

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has the parameter, by this name or one that is tied to it."""
        return self._canonical(name) in self._units

    def names_beside(self, names: Iterable[str]) -> list[str]:
        """The parameters of the checkpoint that are none of `names`."""
        wanted = {self._canonical(name) for name in names}
        return [name for name in self._units if name not in wanted]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slot(name).shape

    def kinds(self, name: str) -> Mapping[str, str]:
        """Kind -> element type in which a parameter's kinds are read. Empty for a parameter of no elements."""
        stored = self._stored(name)
        return {kind: dtype if self._scale(name, kind) is None else "float32" for kind, dtype in stored.items()}

    def _stored(self, name: str) -> Mapping[str, str]:
        return self.manifest.kinds.get(self._slot(name).name, {})

    def _scale(self, name: str, kind: str) -> float | None:
        """The scale of a kind that is stored with one; None for others. It is a power of two."""
        scale = self.manifest.scalars.get(self._slot(name).name, {}).get(kind + SCALE_MARK)
        return None if scale is None else float(scale)

    def weight_kind(self, name: str) -> str | None:
        """The kind that holds the parameter itself: the master where there is one. None if it is not stored."""
        return next((kind for kind in WEIGHT_KINDS if kind in self.kinds(name)), None)

    def weight_dtype(self, name: str) -> torch.dtype | None:
        """The element type that the parameter itself is stored in; None if it is not stored."""
        kind = self.weight_kind(name)
        return None if kind is None else getattr(torch, self.kinds(name)[kind])

    def scalars(self, name: str) -> Mapping[str, Any]:
        """Optimizer scalars of a parameter, such as "step"."""
        scalars = self.manifest.scalars.get(self._slot(name).name, {})
        return {key: value for key, value in scalars.items() if not key.endswith(SCALE_MARK)}

    # ---------------------------------------------------------------- checks
    def check_against(
        self, layouts: Iterable[UnitLayout], buffers: Mapping[str, Sequence[int]] | None = None, *, strict: bool = True
    ) -> None:
        """Every parameter of these layouts is stored with the same shape, and nothing else is stored; buffers alike.

        Args:
            buffers: Name -> shape of the model's own; None: they are not compared.
            strict: With False, only what both have must fit.
        Raises:
            CheckpointError: Lists everything that is missing, of another shape, or unknown.
        """
        shapes = {slot.name: slot.shape for layout in layouts for slot in layout.slots}
        missing = [name for name in shapes if not self.holds(name)]
        unknown = self.names_beside(shapes)
        other = [(name, shape, self.shape(name)) for name, shape in shapes.items() if self.holds(name)]
        if buffers is not None:
            stored = {name: info.shape for name, info in self._buffers.items() if STATE_MARK not in name}
            missing += [name for name in buffers if name not in stored]
            unknown += [name for name in stored if name not in buffers]
            other += [(name, tuple(shape), stored[name]) for name, shape in buffers.items() if name in stored]
        problems = [f"{name}: not in the checkpoint" for name in missing if strict]
        problems += [
            f"{name}: shape {mine} in the model, {its} in the checkpoint" for name, mine, its in other if mine != its
        ]
        problems += [f"{name}: not in the model" for name in unknown if strict]
        if not problems:
            return
        remedy = (
            "\nstrict=False (load_module_strict=False) loads what both have."
            if strict and (missing or unknown)
            else ""
        )
        raise CheckpointError(
            f"{self.folder} does not fit the model ({len(problems)} differences):\n  " + "\n  ".join(problems) + remedy
        )

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Check all bytes of this rank's share of the files (all of them at world size 1).

        Raises:
            CheckpointError: Files have changed, or differ from the manifest; the newest complete checkpoint is
                offered.
        """
        with offering(self.folder):
            self._files.verify(range(rank, len(self.manifest.files), world_size))

    def verify_before_reading(self, ranks: Iterable[int] | None = None) -> None:
        """Check what reads do not: the headers of the files of these ranks, or of all.

        Files of version 1 are checked whole: a read cannot tell whether its bytes are right there. Raises as `verify`.
        """
        ranks = range(len(self.manifest.files)) if ranks is None else ranks
        with offering(self.folder):
            if not self.manifest.has_blocks:
                return self._files.verify(ranks)
            for rank in ranks:
                self._files.header(rank)

    # ---------------------------------------------------------------- reading
    def read(self, name: str, kind: str, pieces: Slice | Sequence[Piece]) -> torch.Tensor:
        """1-D CPU tensor of these elements, one piece behind the other, in the type that `kinds` has.

        Args:
            pieces: Ranges of the flattened parameter; only their start and numel count, so they may come from any
                layout.
        Raises:
            CheckpointError: The parameter or the kind is not stored, or a file is damaged: also what was read was
                changed since it was written (in files of version 1 `verify` finds that, a read does not).
        """
        numel = sum(piece.numel for piece in _ranges(pieces))
        result = torch.empty(numel, dtype=self.dtype(name, kind))
        self.read_into([result], name, kind, pieces)
        return result

    def read_into(
        self, targets: Sequence[torch.Tensor], name: str, kind: str, pieces: Slice | Sequence[Piece]
    ) -> None:
        """Read into memory that is there: `targets`, contiguous CPU tensors of the stored element type, hold as many
        elements together. After an error a part of them is overwritten. See `read`."""
        name, ranges = self._slot(name).name, _ranges(pieces)
        numel = sum(piece.numel for piece in ranges)
        if not self.fits(targets, name, kind) or sum(one.numel() for one in targets) != numel:
            raise AssertionError(f"{name} {kind}: these tensors are not what is read")
        if not numel:
            return
        found = [one for piece in ranges for one in segments(self._units[name], name, piece.start, piece.end)]
        scale, flat = self._scale(name, kind), [one.view(-1) for one in targets]
        if scale is None:
            return self._read_into(flat, f"{name}::{kind}", _merged(found))
        stored = torch.empty(numel, dtype=getattr(torch, self._stored(name)[kind]))
        self._read_into([stored], f"{name}::{kind}", _merged(found))
        for target, part in zip(flat, stored.split([one.numel() for one in flat]), strict=True):
            target.copy_(part).mul_(1 / scale)

    def fits(self, targets: Sequence[torch.Tensor], name: str, kind: str) -> bool:
        """Whether `read_into` can read into such memory."""
        dtype = self.dtype(name, kind)
        return all(one.dtype == dtype and one.device.type == "cpu" and one.is_contiguous() for one in targets)

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """The element type that a kind of a parameter is stored in. Raises CheckpointError if it is not."""
        stored = self.kinds(name)
        if kind not in stored:
            raise CheckpointError(f"{self.folder} holds no {kind!r} of {name}, only {sorted(stored)}")
        dtype: torch.dtype = getattr(torch, stored[kind])
        return dtype

    def read_weights(self, name: str, pieces: Slice | Sequence[Piece], dtype: torch.dtype) -> torch.Tensor:
        """1-D CPU tensor of these elements of the parameter itself, converted to `dtype`; see `weight_kind`."""
        kind = self.weight_kind(name)
        if kind is None:
            if self._slot(name).numel:
                raise CheckpointError(f"{self.folder} holds no weights of {name}, only {sorted(self.kinds(name))}")
            return torch.empty(0, dtype=dtype)
        return self.read(name, kind, pieces).to(dtype)

    def read_full(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The full parameter in its own shape, converted to `dtype`."""
        slot = self._slot(name)
        return self.read_weights(name, [Piece(slot.name, 0, slot.numel, 0, 0)], dtype).view(slot.shape)

    def read_buffer(self, name: str) -> torch.Tensor:
        """A persistent buffer, unsharded, in its own shape and element type."""
        info = self._buffers.get(name)
        if info is None:
            raise CheckpointError(f"{self.folder} holds no buffer {name!r}")
        result = torch.empty(math.prod(info.shape), dtype=getattr(torch, info.dtype))
        if result.numel():
            self._read_into([result], f"{name}::{BUFFER_KIND}", [(0, 0, result.numel())])
        return result.view(info.shape)

    def _read_into(self, targets: Sequence[torch.Tensor], key: str, found: Sequence[Segment]) -> None:
        """Fill `targets`, one behind the other, and compare the checksums of what was read for them."""
        parts = _parts(found, targets)
        with offering(self.folder):
            # A small tensor costs less than a second thread with files of its own.
            if sum(target.nbytes for target in targets) <= _PART_BYTES or not self._in_parallel:
                for part in parts:
                    self.on_read(part.read(self._files, key))
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "read-checkpoint")
            reads = [self._pool.submit(part.read, self._files, key) for part in parts]
            try:
                for read in reads:
                    self.on_read(read.result())
            finally:  # nobody writes to the targets any more
                for read in reads:
                    read.cancel()
                wait(reads)

    # ---------------------------------------------------------------- names
    def _canonical(self, name: str) -> str:
        return self.manifest.tied.get(name, name)

    def _slot(self, name: str) -> Slot:
        name = self._canonical(name)
        if name not in self._units:
            raise CheckpointError(f"{self.folder} holds no parameter {name!r}")
        return self._units[name].slot(name)


def _ranges(pieces: Slice | Sequence[Piece]) -> Sequence[Piece]:
    return pieces.pieces if isinstance(pieces, Slice) else pieces


def _merged(found: Sequence[Segment]) -> list[Segment]:
    """Make one segment of neighbours in a file, so that a rank reads its own slice at once."""
    merged: list[Segment] = []
    for rank, start, numel in found:
        if merged and (rank, start) == (merged[-1][0], merged[-1][1] + merged[-1][2]):
            _, start, before = merged.pop()
            numel += before
        merged.append((rank, start, numel))
    return merged


def _parts(found: Sequence[Segment], targets: Sequence[torch.Tensor]) -> Sequence[_Part]:
    """Divide segments into parts for threads, which meet where blocks do, so that one thread reads each block."""
    size = targets[0].itemsize
    most = _PART_BYTES // size
    parts: dict[tuple[int, int], _Part] = {}
    target = 0
    for rank, at, numel in found:
        end = at + numel
        while at < end:
            until = min(end, at - at % most + most)
            part = parts.setdefault((rank, at // most), _Part(rank, []))
            byte = at * size
            for view in _views(targets, target, until - at):
                part.reads.append((byte, view))
                byte += len(view)
            target += until - at
            at = until
    return list(parts.values())


def _views(targets: Sequence[torch.Tensor], start: int, numel: int) -> Iterator[memoryview]:
    """The bytes of these elements of `targets`, 1-D each, counted through all of them."""
    for target in targets:
        low, high = max(start, 0), min(start + numel, target.numel())
        if low < high:
            yield target.detach()[low:high].view(torch.uint8).numpy().data
        start -= target.numel()
