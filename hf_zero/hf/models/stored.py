"""Reads ranges of tensors out of safetensors files, by offset into the caller's memory.

Mapped pages of a file count as memory of the process that touches them, and a mapping cannot be read past its rank's
share without them; so files are parsed here and read by offset.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.atomic_files import open_to_read, read_at
from hf_zero.errors import CheckpointError

# The names that the format gives to types.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library


class StoredFile:
    """One open safetensors file. `close` it; `bytes_read` counts what was read of its tensors.

    Raises:
        CheckpointError: It is no safetensors file, or it is shorter or longer than its header says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self._lock = threading.Lock()
        try:
            self._fd = open_to_read(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be opened: {error.strerror}") from error
        try:
            self.tensors = dict(self._parse())
        except BaseException:
            self.close()
            raise

    def _parse(self) -> Iterator[tuple[str, StoredTensor]]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(self._head(8, 0), "little") if size >= 8 else -1
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{self.path} is no safetensors file, or its header was cut off ({size} bytes)")
        try:
            header: dict[str, Any] = json.loads(self._head(length, 8))
        except ValueError as error:
            raise CheckpointError(f"{self.path} has a damaged header: {error}") from error
        header.pop("__metadata__", None)
        end = 8 + length
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{self.path}: {name} has type {entry['dtype']}, which torch does not know here")
            start, stop = entry["data_offsets"]
            yield name, StoredTensor(self, name, 8 + length + start, DTYPES[entry["dtype"]], tuple(entry["shape"]))
            end = max(end, 8 + length + stop)
        if end != size:
            raise CheckpointError(
                f"{self.path} has {size} bytes, but its header describes {end}: it was cut off or overwritten.\n"
                "Download or save it again."
            )

    def _head(self, nbytes: int, offset: int) -> bytes:
        text = bytearray(nbytes)
        view, done = memoryview(text), 0
        while done < nbytes and (got := read_at(self._fd, view[done:], offset + done)):
            done += got
        return bytes(text[:done])

    def read_into(self, offset: int, out: torch.Tensor) -> None:
        """Fill `out`, a contiguous CPU tensor, with the bytes from `offset` on. Any thread may call."""
        view = memoryview(out.view(torch.uint8).numpy().data)
        done = 0
        while done < len(view):
            got = read_at(self._fd, view[done:], offset + done)
            if got == 0:
                raise CheckpointError(f"{self.path} ended at byte {offset + done} while it was read: it was cut off")
            done += got
        with self._lock:
            self.bytes_read += done

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. To transformers' loader it looks like a safetensors slice: `tensor[...]` reads all of it."""

    file: StoredFile
    name: str
    offset: int  # bytes from the start of the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read_range(self, start: int, out: torch.Tensor) -> None:
        """Fill `out`, 1-D of this type on the CPU, with elements from `start` on."""
        if out.numel():
            self.file.read_into(self.offset + start * self.dtype.itemsize, out)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if index is not Ellipsis:
            raise TypeError("only all of a stored tensor can be taken: tensor[...]")
        whole = torch.empty(self.numel, dtype=self.dtype)
        self.read_range(0, whole)
        return whole.view(self.shape)


class LazyTensor:
    """A stored tensor on its way through transformers' loader, to be read where it is placed, and in that type."""

    def __init__(self, stored: StoredTensor, dtype: torch.dtype | None = None) -> None:
        self.stored = stored
        self.dtype = dtype if dtype is not None else stored.dtype
        self.shape = torch.Size(stored.shape)

    def __getitem__(self, index: Any) -> LazyTensor:
        return self

    def to(self, *, device: Any = None, dtype: torch.dtype | None = None) -> LazyTensor:
        return self if dtype is None else LazyTensor(self.stored, dtype)

    def whole(self) -> torch.Tensor:
        return self.stored[...].to(self.dtype)


def open_files(paths: Iterable[str | os.PathLike[str]]) -> list[StoredFile]:
    """Open every file.

    Raises:
        CheckpointError: Names every file that cannot be used; none is left open.
    """
    files: list[StoredFile] = []
    problems = []
    for path in paths:
        try:
            files.append(StoredFile(path))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        for file in files:
            file.close()
        raise CheckpointError("\n".join(problems))
    return files
