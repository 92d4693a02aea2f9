"""Tensors in safetensors files that are read when they are placed, each rank its own ranges."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.format import TORCH_NAMES
from hf_zero.checkpoint.rank_reader import SafetensorsFile
from hf_zero.errors import CheckpointError


class StoredFile:
    """One open safetensors file. `close` it; `bytes_read` counts what was read of its tensors.

    Raises:
        CheckpointError: It is no safetensors file, or it is shorter or longer than its header says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._file = SafetensorsFile(self.path)
        try:
            with self._named_errors():
                header = self._file.header()
        except CheckpointError:
            self.close()
            raise
        self.tensors = {
            name: StoredTensor(self, name, entry.start, getattr(torch, TORCH_NAMES[entry.dtype]), entry.shape)
            for name, entry in header.items()
        }

    def read_into(self, offset: int, out: torch.Tensor) -> None:
        """Fill `out`, a contiguous CPU tensor, with the bytes from `offset` on. Any thread may call."""
        view = memoryview(out.view(torch.uint8).numpy().data)
        with self._named_errors():
            self._file.read(view, offset)
        with self._lock:
            self.bytes_read += len(view)

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be opened or read: {error.strerror or error}") from error
        except ValueError as error:
            raise CheckpointError(f"{self.path} is damaged: {error}.\nDownload or save it again.") from error


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
        full = torch.empty(self.numel, dtype=self.dtype)
        self.read_range(0, full)
        return full.view(self.shape)


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

    def read(self) -> torch.Tensor:
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
