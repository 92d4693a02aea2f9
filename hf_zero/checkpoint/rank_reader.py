"""Reads the rank files of a checkpoint in parts, and compares the blocks that a part touches with their checksums.

This file needs the standard library only: it is a part of the stand-alone script (stand_alone.py).
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from hf_zero.checkpoint.format import (
    BLOCK_BYTES,
    MAX_HEADER_BYTES,
    ConsolidateError,
    Manifest,
    Stored,
    check_sizes,
    decode_header,
    expect,
    file_marks,
    rank_contents,
    zero_folder,
)

CHUNK_BYTES = 4 << 20
READ_BYTES = 1 << 20
MAX_OPEN_FILES = 96  # with 3 descriptors each: a process may have 1024 by default
BINARY = getattr(os, "O_BINARY", 0)  # without it Windows changes ends of lines

Advance = Callable[[int], None]  # called with the bytes done since the last call


class RankFiles:
    """The rank files of one checkpoint, of which at most MAX_OPEN_FILES stay open. Any thread may read.

    Args:
        kinds: What will be read ("master", "exp_avg", ...), None for all; what else files hold is not looked at.
        verify: Reads of tensors compare checksums. Those of version 1 are compared by `verify` alone.
        crc32: zlib's, or a faster one.
        open_file: What reads a file: SafetensorsFile, or a subclass.
        elsewhere: By rank, files that are not in the folder, and how to read them.
    Raises:
        ConsolidateError: A file is missing, damaged, or not what the manifest lists, here or at a later read.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        kinds: Sequence[str] | None = None,
        *,
        verify: bool = True,
        crc32: Callable[[memoryview, int], int] = zlib.crc32,
        open_file: Callable[[Path], SafetensorsFile] | None = None,
        elsewhere: Mapping[int, SafetensorsFile] | None = None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._kinds = kinds
        self._verify = verify
        self.crc32 = crc32
        self._open_file = open_file or SafetensorsFile
        self._files = dict(elsewhere or {})  # by rank, those that stay open
        self._headers: dict[int, dict[str, Stored]] = {}  # by rank
        self._lock = threading.RLock()  # over both, and over what is decided once
        here = [file for rank, file in enumerate(manifest.files) if rank not in self._files]
        # It is known already that the others are here if some are elsewhere.
        check_sizes(folder, here, () if elsewhere else manifest.hosts)

    @property
    def count(self) -> int:
        return len(self._manifest.files)

    @cached_property
    def _marks(self) -> dict[str, str]:
        return file_marks(self._manifest, self._manifest.buffers)

    @cached_property
    def _contents(self) -> list[dict[str, tuple[str, int]]]:
        return rank_contents(self._manifest)

    def close(self) -> None:
        """Close the files, which nobody reads now; a later read opens them again."""
        for file in self._files.values():
            file.close()

    def verify(self, ranks: Iterable[int], advance: Advance | None = None) -> None:
        """Compare the checksums of all bytes of these files, and name all that are damaged."""
        damaged = []
        for rank in ranks:
            try:
                for count in self._verified_blocks(rank) if self._manifest.has_blocks else self._verified_whole(rank):
                    if advance is not None:
                        advance(count)
            except ConsolidateError as error:
                damaged.append(str(error))
        if damaged:
            raise ConsolidateError("; ".join(damaged))

    def _verified_blocks(self, rank: int) -> Iterator[int]:
        """Yield bytes that were found to be right, as they are read."""
        header = self.header(rank)
        yield self._manifest.files[rank].size - sum(stored.nbytes for stored in header.values())
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for key, stored in header.items():
            tensor = self.tensor(rank, key)
            for offset in range(0, stored.nbytes, CHUNK_BYTES):
                view = buffer[: stored.nbytes - offset]
                tensor.read(view, offset)
                yield len(view)

    def _verified_whole(self, rank: int) -> Iterator[int]:
        """Yield the bytes of a file of version 1 as they are read; at the end they are right."""
        crc, file = 0, self._manifest.files[rank]
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for offset in range(0, file.size, CHUNK_BYTES):
            view = buffer[: file.size - offset]
            self.read(rank, view, offset)
            crc = self.crc32(view, crc)
            yield len(view)
        if crc != file.crc32:
            raise ConsolidateError(f"{self.path(rank)} is damaged: wrong checksum, its content has changed")
        self.header(rank)

    def tensor(self, rank: int, key: str, end: int | None = None) -> RankTensor:
        """A tensor of a rank's file, to be read in parts, up to its byte `end`; `finish` it behind the last part."""
        stored = self.header(rank)[key]
        end = stored.nbytes if end is None else min(stored.nbytes, end + -end % BLOCK_BYTES)
        return RankTensor(self, rank, key, stored, end, self._verify and self._manifest.has_blocks)

    def header(self, rank: int) -> dict[str, Stored]:
        """The tensors in a rank's file, which have been compared with the manifest."""
        with self._lock:
            if rank not in self._headers:
                self._headers[rank] = self._decoded(rank)
            return self._headers[rank]

    def _decoded(self, rank: int) -> dict[str, Stored]:
        with self._opened(rank) as file:
            header = file.header(self._marks, self._manifest.files[rank].crc32 if self._manifest.has_blocks else None)
            held = {key: (tensor.dtype, tensor.nbytes) for key, tensor in header.items()}
            wanted = self._contents[rank]
            other = [key for key in sorted(held.keys() | wanted.keys()) if held.get(key) != wanted.get(key)]
            if self._kinds is not None:
                other = [key for key in other if key.rpartition("::")[2] in self._kinds]
            differences = f"{', '.join(other[:3])} ({len(other)} differences)"
            expect(not other, f"it does not hold what the manifest lists: {differences}")
        return header

    def damage(self, rank: int, key: str, block: int) -> ConsolidateError:
        return ConsolidateError(f"{self.path(rank)} is damaged: wrong checksum, block {block} of {key} has changed")

    def read(self, rank: int, view: memoryview, offset: int, end: int = 0) -> None:
        """Fill `view` from a byte of a rank's file on. Nothing is compared. More will be read, up to `end`."""
        with self._opened(rank) as file:
            file.read(view, offset, end)

    def path(self, rank: int) -> Path:
        file = self._files.get(rank)
        return zero_folder(self._folder) / self._manifest.files[rank].name if file is None else file.path

    @contextmanager
    def _opened(self, rank: int) -> Iterator[SafetensorsFile]:
        path = self.path(rank)
        with self._lock:
            file = self._files.get(rank) or self._open_file(path)
            if len(self._files) < MAX_OPEN_FILES:
                self._files[rank] = file
        try:
            yield file
        except OSError as error:
            raise ConsolidateError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConsolidateError(f"{path} is damaged: {error}") from error
        finally:
            if self._files.get(rank) is not file:
                file.close()


class RankTensor:
    """Reads parts of one tensor of a rank's file, and compares the blocks that they touch with their checksums.

    Parts that are read in order, one behind the other, are read once; where a part begins or ends inside a block, the
    rest of the block is read for its checksum alone. What `read` filled is known to be right after `finish`.
    """

    def __init__(self, files: RankFiles, rank: int, key: str, stored: Stored, end: int, verify: bool) -> None:
        self._files = files
        self._rank = rank
        self._key = key
        self._stored = stored
        self._end = end  # nobody wants what is behind
        self._verify = verify
        self._at = 0  # bytes from the start of the tensor; its block is checksummed up to here
        self._crc = 0

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from a byte of the tensor on."""
        self._move(offset)
        step = READ_BYTES if self._verify else max(len(view), 1)
        for start in range(0, len(view), step):  # what was read is in the cache still, when it is checksummed
            self._read(view[start : start + step])

    def finish(self) -> None:
        """Compare the last block, of which the rest is read."""
        if self._verify and self._at % BLOCK_BYTES:
            self._skip_to(min(self._stored.nbytes, self._at + -self._at % BLOCK_BYTES))

    def _move(self, offset: int) -> None:
        if not self._verify:
            self._at = offset
        elif offset != self._at:
            if not self._at <= offset < self._at + BLOCK_BYTES - self._at % BLOCK_BYTES:  # in another block, or back
                self.finish()
                self._at, self._crc = offset - offset % BLOCK_BYTES, 0
            self._skip_to(offset)

    def _skip_to(self, offset: int) -> None:
        scratch = memoryview(bytearray(min(offset - self._at, READ_BYTES)))
        while self._at < offset:
            self._read(scratch[: offset - self._at])

    def _read(self, view: memoryview) -> None:
        stored = self._stored
        self._files.read(self._rank, view, stored.start + self._at, stored.start + self._end)
        if not self._verify:
            self._at += len(view)
        while self._verify and view:
            part = view[: BLOCK_BYTES - self._at % BLOCK_BYTES]
            self._crc, self._at, view = self._files.crc32(part, self._crc), self._at + len(part), view[len(part) :]
            if self._at % BLOCK_BYTES == 0 or self._at == self._stored.nbytes:
                block = (self._at - 1) // BLOCK_BYTES
                if self._crc != self._stored.checksums[block]:
                    raise self._files.damage(self._rank, self._key, block)
                self._crc = 0


class SafetensorsFile:
    """Reads a safetensors file by offset: pages of a memory map would count as memory of the process.

    It is opened at the first read, also after `close`. Any thread may read. OSError comes from the system; ValueError
    names the damage.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._opening = threading.Lock()

    def read(self, view: memoryview, offset: int, end: int = 0) -> None:
        """Fill `view` from `offset` on. The caller will read up to `end`, which a subclass may do ahead."""
        with self._opening:
            self._open()
        while view:  # the system may give less than asked for (at most 2 GiB at once)
            count = read_at(self._descriptor, view, offset)
            expect(count > 0, f"it ends too early, at byte {offset}: it was truncated")
            view, offset = view[count:], offset + count

    def _open(self) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY | BINARY)

    def size(self) -> int:
        """The bytes of a file that has been read from."""
        return os.fstat(self._descriptor).st_size

    def header(self, marks: Mapping[str, str] | None = None, crc32: int | None = None) -> dict[str, Stored]:
        """The tensors in the file by name; `marks` must not be other ones in its metadata.

        `crc32` is the checksum of the header of a file that has one for each block of its tensors.
        """
        length = bytearray(8)
        self.read(memoryview(length), 0)
        size, begin = self.size(), 8 + int.from_bytes(length, "little")
        fits = 8 < begin <= min(size, MAX_HEADER_BYTES)
        expect(fits, f"it is no safetensors file, or its header was truncated ({size} bytes)")
        text = bytearray(begin - 8)
        self.read(memoryview(text), 8)
        unchanged = crc32 in (None, zlib.crc32(text, zlib.crc32(length)))
        expect(unchanged, "its header has a wrong checksum, so it has changed")
        try:
            return decode_header(text, size, marks or {}, has_blocks=crc32 is not None)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"unreadable header ({error})") from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


_place = threading.Lock()


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view`, or its beginning, from `offset` on; returns how many bytes there were. Any thread may call."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with _place:  # Windows has no read that leaves the file's place alone
        os.lseek(descriptor, offset, os.SEEK_SET)
        found = os.read(descriptor, min(len(view), CHUNK_BYTES))
    view[: len(found)] = found
    return len(found)
