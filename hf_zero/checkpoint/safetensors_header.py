"""The headers of rank files, compared with the manifest: the tensors of a file, their types and sizes. No torch.

A manifest that fits the headers of its files, and whose marks they bear, is the one that was written with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_zero.checkpoint.consolidate import ITEM_BYTES, check_header
from hf_zero.checkpoint.manifest import BUFFER_KIND, DTYPE_CODES, Manifest, marks_of, offer, zero_folder
from hf_zero.errors import CheckpointError

# More than any real header, less than what a damaged length could make us allocate.
_MAX_HEADER_BYTES = 1 << 30


@dataclass(frozen=True)
class StoredTensor:
    code: str  # of the element type, as safetensors names it
    start: int  # bytes from the start of the file
    nbytes: int


class Headers:
    """What the rank files of one checkpoint must hold. Errors are CheckpointErrors that name the file."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._marks = marks_of(manifest, manifest.buffers)

    def path(self, rank: int) -> Path:
        return zero_folder(self._folder) / self._manifest.files[rank].name

    def length(self, rank: int, data: bytes | bytearray) -> int:
        """Bytes of the header, which the file's first 8 bytes say."""
        length = int.from_bytes(data, "little")
        if not 0 < length <= min(self._manifest.files[rank].size - 8, _MAX_HEADER_BYTES):
            raise self._damaged(rank, "impossible header length")
        return length

    def parse(self, rank: int, text: bytes | bytearray) -> dict[str, StoredTensor]:
        """The tensors in the file of `rank`, whose header is `text`."""
        first = 8 + len(text)
        try:
            entries = check_header(json.loads(text), self._manifest.files[rank].size - first, self._marks)
        except (ValueError, RecursionError) as error:
            raise self._damaged(rank, f"unreadable header ({error})") from error
        header = {}
        for key, entry in entries.items():
            begin, end = entry["data_offsets"]
            header[key] = StoredTensor(entry["dtype"], first + begin, end - begin)
        held = {key: (stored.code, stored.nbytes) for key, stored in header.items()}
        said = dict(self._said(rank))
        if held != said:
            differing = sorted(key for key in held.keys() | said.keys() if held.get(key) != said.get(key))
            text_of = f"{', '.join(differing[:3])} ({len(differing)} differences)"
            raise self._damaged(rank, f"it does not hold what the manifest says: {text_of}")
        return header

    def check(self, ranks: Iterable[int]) -> None:
        """Read and check the headers of these files."""
        for rank in ranks:
            try:
                with self.path(rank).open("rb") as file:
                    self.parse(rank, file.read(self.length(rank, file.read(8))))
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path(rank)}: {error.strerror or error}") from error

    def _said(self, rank: int) -> Iterable[tuple[str, tuple[str, int]]]:
        """Key -> (type, bytes) of what the manifest says of a file."""
        for run in (run for unit in self._manifest.layouts for run in unit.runs(rank)):
            kinds: Mapping[str, str] = self._manifest.kinds.get(run.name, {})
            for kind, dtype in kinds.items():
                yield f"{run.name}::{kind}", _stored(dtype, run.numel)
        for info in self._manifest.buffers if rank == 0 else ():
            yield f"{info.name}::{BUFFER_KIND}", _stored(info.dtype, math.prod(info.shape))

    def _damaged(self, rank: int, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path(rank)} is damaged: {reason}.{offer(self._folder)}")


def _stored(dtype: str, numel: int) -> tuple[str, int]:
    code = DTYPE_CODES[dtype]
    return code, numel * ITEM_BYTES[code]
