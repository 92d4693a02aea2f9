"""Shards in a file, behind host memory that is read ahead of use and written behind it.

[Note: Who has the memory]
A block of the staging pool is in one of three hands: of a borrow, of a write that a release started, or of a read that
`prefetch` started. Blocks of the last two can be reclaimed by whoever needs memory, so neither a pool full of them nor
a prefetch that nobody uses can stop a borrow. A borrow takes over the block of its key where there is one: its read is
under way already, or what is being written is the content.

`_lock` guards the tables and is never held while a transfer or memory is waited for.

[Note: Kept contents]
A save in the background reads contents of the step that it saves, while updates go on. `keep` marks the region of a
content: what is written to its key from then on gets another region, as a staged write does, and the marked one is
free again when its last reader has released it. Nothing is copied. Where the disk has no room for the other region,
the write waits for the readers in its place.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from hf_zero.config.resolved import Aio
from hf_zero.errors import OffloadError
from hf_zero.storage.base import BorrowedTensors, StagingStore, StoreStats
from hf_zero.storage.kept_content import KeptContent
from hf_zero.storage.staging_pool import StagingBlock, StagingPool
from hf_zero.storage.swap_folder import Region, SwapFile, SwapFolder, Transfer


@dataclasses.dataclass(eq=False)
class Entry:
    """One key."""

    key: str
    numel: int
    dtype: torch.dtype
    region: Region
    blank: bool = True  # never written: zeros, whatever the region holds
    borrowed: bool = False
    changing: bool = False  # by a borrow, at its end
    aside: bool = False  # a borrow writes the staged content without looking at this one
    flight: Flight | None = None  # of the content: read ahead, or being written
    staged: Region | None = None
    staged_flight: Flight | None = None
    room: Region | None = None  # where a borrow writes to, since the content at `region` is kept
    failure: str | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def check(self) -> None:
        if self.failure is not None:
            raise OffloadError(self.failure)

    def tensor(self, block: StagingBlock | None) -> torch.Tensor:
        if block is None:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        return block.memory[: self.nbytes].view(self.dtype)


@dataclasses.dataclass(eq=False)
class Flight:
    """A transfer of a key, and the memory it uses."""

    entry: Entry
    block: StagingBlock
    transfer: Transfer
    is_write: bool

    @property
    def borrowed(self) -> bool:
        """A borrow has taken the block over, so it is not to be given back."""
        return self.entry.borrowed and self.entry.flight is self

    def leave(self) -> None:
        """The entry must not find it any more; it may have another one by now."""
        if self.entry.flight is self:
            self.entry.flight = None
        if self.entry.staged_flight is self:
            self.entry.staged_flight = None


class DiskStore(StagingStore):
    """Keeps keys in one file; borrowed are CPU tensors in the memory of a staging pool.

    A write borrow that ends with an exception is not written: the key keeps its content. Contents live as long as the
    process. A failed transfer makes its key unusable; a file that somebody removed or truncated, the store.

    Args:
        folder: Where the file is made, as `<name>.swap`.
        pool: Memory of the borrowed; may be shared with other stores.
        preallocate: Reserve disk space in `create`, so that a full disk shows there; else a key gets its space when
            it is first written.
        read_ahead: Whether `prefetch` does anything.
        write_behind: Whether a write goes on after `release` has returned.
    """

    def __init__(
        self,
        folder: SwapFolder,
        name: str,
        *,
        aio: Aio,
        pool: StagingPool,
        preallocate: bool,
        read_ahead: bool = True,
        write_behind: bool = True,
    ) -> None:
        self.path = folder.path / f"{name}.swap"
        self._pool = pool
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._file = SwapFile(self.path, aio=aio, preallocate=preallocate)
        self._lock = threading.Lock()
        self._readers_left = threading.Condition(self._lock)  # a kept region has lost its last reader
        self._kept: collections.Counter[Region] = collections.Counter()  # readers
        self._retired: set[Region] = set()  # of those kept, which no key has any more
        self._entries: dict[str, Entry] = {}
        self._ahead: dict[Flight, None] = {}  # reads without a borrow, in the order they were asked for
        self._writes: dict[Flight, None] = {}  # in the order of their start
        self._stats = StoreStats()
        # Called with each transfer as it begins, under the store's lock: they must not use the store.
        self.observers: list[Callable[[Flight], None]] = []
        self._closed = False
        pool.register(self)

    def stats(self) -> StoreStats:
        with self._lock:
            return dataclasses.replace(self._stats, memory_allocations=self._pool.allocations)

    def usage(self) -> dict[str, int]:
        with self._lock:
            return {key: entry.nbytes for key, entry in self._entries.items()}

    def create(self, key: str, numel: int, dtype: torch.dtype) -> None:
        with self._lock:
            if key in self._entries:
                raise AssertionError(f"{key} exists already")
            self._entries[key] = Entry(key, numel, dtype, self._file.reserve(numel * dtype.itemsize))

    def prefetch(self, keys: Sequence[str]) -> None:
        if not self._read_ahead:
            return
        with self._lock:
            for flight in [one for one in self._writes if one.transfer.poll()]:
                self._settle(flight)
            for key in keys:
                entry = self._entries[key]
                if entry.borrowed or entry.flight or entry.blank or entry.failure or not entry.nbytes:
                    continue
                block = self._pool.try_acquire(entry.region.nbytes)
                if block is None:
                    return
                entry.flight = self._read(entry, block)
                self._ahead[entry.flight] = None

    def borrow(self, keys: Sequence[str], *, write: bool = False, overwrite: bool = False) -> BorrowedTensors:
        if overwrite and not write:
            raise AssertionError("overwrite=True needs write=True")
        return self._borrow(keys, write=write, overwrite=overwrite, staged=False)

    def stage(self, keys: Sequence[str], *, overwrite: bool = False) -> BorrowedTensors:
        return self._borrow(keys, write=True, overwrite=overwrite, staged=True)

    def _borrow(self, keys: Sequence[str], *, write: bool, overwrite: bool, staged: bool) -> BorrowedTensors:
        aside = staged and overwrite
        entries = self._claim(keys, write=write, staged=staged, aside=aside)
        blocks: dict[Entry, StagingBlock] = {}
        try:
            if write and not staged:
                self._make_room_beside_kept(entries)
            self._take_over(entries, blocks, aside=aside)
            if not aside:
                self._fill(entries, blocks, read=not overwrite, write=write)
            if staged:
                self._make_room_for_staged(entries)
        except BaseException:
            self._finish(entries, blocks, keep=False, staged=False, aside=aside)
            raise
        tensors = [entry.tensor(blocks.get(entry)) for entry in entries]
        return BorrowedTensors(
            tensors, lambda keep: self._finish(entries, blocks, keep=write and keep, staged=staged, aside=aside)
        )

    def _claim(self, keys: Sequence[str], *, write: bool, staged: bool, aside: bool) -> list[Entry]:
        with self._lock:
            self._check_file()
            entries = [self._entries[key] for key in keys]
            for entry in entries:
                for flight in (entry.flight, entry.staged_flight):
                    if flight is not None and flight.transfer.poll():
                        self._record(flight)
                entry.check()
                if (entry.aside if aside else entry.borrowed) or keys.count(entry.key) > 1:
                    raise AssertionError(f"{entry.key} is borrowed already")
                if write and not staged and entry.staged is not None:
                    raise AssertionError(f"{entry.key} has a staged write: commit or roll back first")
            for entry in entries:
                if aside:
                    entry.aside = True
                    continue
                entry.borrowed = True
                entry.changing = write and not staged
                if entry.flight is not None:
                    self._ahead.pop(entry.flight, None)
            return entries

    def _take_over(self, entries: list[Entry], blocks: dict[Entry, StagingBlock], *, aside: bool) -> None:
        """Memory for every key: that of its read or write under way, or new memory, which may be waited for."""
        for entry in entries:
            if entry.flight is not None and not aside:
                blocks[entry] = entry.flight.block
                self._pool.change_owner(entry.flight.block, to_thread=True)
        missing = [entry for entry in entries if entry.nbytes and entry not in blocks]
        started = time.perf_counter()
        blocks.update(zip(missing, self._pool.acquire([entry.region.nbytes for entry in missing]), strict=True))
        with self._lock:
            self._stats.memory_wait_s += time.perf_counter() - started

    def _fill(self, entries: list[Entry], blocks: dict[Entry, StagingBlock], *, read: bool, write: bool) -> None:
        """Return when the blocks hold the contents (`read`) and nothing but the borrow uses them (`write`)."""
        with self._lock:
            for entry in entries:
                if read and entry.flight is None and entry in blocks and not entry.blank:
                    entry.flight = self._read(entry, blocks[entry])
        for entry in entries:
            flight = entry.flight
            if flight is None:
                if read and entry.blank:
                    entry.tensor(blocks.get(entry)).zero_()
            elif write or not flight.is_write:  # what is being written may be looked at, but not changed
                self._await(flight)

    def _await(self, flight: Flight) -> None:
        """Wait for a transfer of a borrowed key; after that its block is the borrow's alone."""
        self._wait(flight)
        with self._lock:
            self._writes.pop(flight, None)
            flight.entry.flight = None
            self._record(flight)
        flight.entry.check()

    def _make_room_for_staged(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.staged_flight is not None:  # the new write replaces it
                self._end_write(entry.staged_flight)
                entry.check()
            with self._lock:
                entry.staged = entry.staged or self._reserve(entry.nbytes)

    def _make_room_beside_kept(self, entries: list[Entry]) -> None:
        """No memory is held yet, so that nobody waits for it while this waits for a reader."""
        for entry in entries:
            with self._lock:
                if entry.region in self._kept:
                    entry.room = self._reserve(entry.nbytes, instead=entry.region)

    def _finish(
        self, entries: list[Entry], blocks: dict[Entry, StagingBlock], *, keep: bool, staged: bool, aside: bool
    ) -> None:
        """The end of a borrow: start its writes, or hand back its memory."""
        writes = []
        for entry in entries:
            # The borrow failed while it was read.
            if not aside and entry.flight is not None and not entry.flight.is_write:
                entry.flight.transfer.wait()
                entry.flight = None
        with self._lock:
            for entry in entries:
                if aside:
                    entry.aside = False
                else:
                    entry.borrowed = entry.changing = False
                if entry.room is not None and not keep:
                    self._file.release(entry.room)
                    entry.room = None
                block = blocks.get(entry)
                if block is None:
                    continue
                if entry.flight is not None and not aside:  # a write that this borrow only looked at
                    self._pool.change_owner(block, to_thread=False)
                    if entry.flight.transfer.finished:
                        self._settle(entry.flight)
                elif keep and not self._closed:
                    self._pool.change_owner(block, to_thread=False)
                    writes.append(self._write(entry, block, staged=staged))
                else:
                    self._pool.release(block)
        if not self._write_behind:
            for flight in writes:
                self._end_write(flight)

    def commit(self, keys: Sequence[str]) -> None:
        with self._lock:
            entries = [self._not_borrowed(key) for key in keys]
            for entry in entries:
                entry.check()
                if entry.staged is None:
                    raise AssertionError(f"nothing is staged for {entry.key}")
            old = [(entry.flight, entry.region) for entry in entries]
            for entry in entries:
                assert entry.staged is not None  # or the key was given twice
                entry.region, entry.staged = entry.staged, None
                entry.flight, entry.staged_flight = entry.staged_flight, None
                entry.blank = False
        for flight, region in old:
            self._retire(flight, region)

    def rollback(self, keys: Sequence[str]) -> None:
        with self._lock:
            entries = [self._not_borrowed(key) for key in keys]
            old = [(entry.staged_flight, entry.staged) for entry in entries]
            for entry in entries:
                entry.staged = entry.staged_flight = None
        for flight, region in old:
            self._retire(flight, region)

    def drop(self, key: str) -> None:
        with self._lock:
            entry = self._not_borrowed(key)
            del self._entries[key]
        self._retire(entry.flight, entry.region)
        self._retire(entry.staged_flight, entry.staged)

    def keep(self, key: str) -> KeptContent:
        with self._lock:
            self._check_file()
            entry = self._entries[key]
            entry.check()
            if entry.changing:
                raise AssertionError(f"{key} is borrowed to be changed")
            region = None if entry.blank or not entry.nbytes else entry.region
            written = entry.flight.transfer if entry.flight is not None and entry.flight.is_write else None
            if region is not None:
                self._kept[region] += 1
        return KeptContent(
            region, written, functools.partial(self._read_kept, key), functools.partial(self._release_kept, region)
        )

    def _read_kept(self, key: str, memory: torch.Tensor, region: Region) -> Transfer:
        with self._lock:
            self._check_file()
            return self._file.read(memory, region, key)

    def _release_kept(self, region: Region | None) -> None:
        with self._lock:
            if region is None:
                return
            self._kept[region] -= 1
            if not self._kept[region]:
                del self._kept[region]
                if region in self._retired:
                    self._retired.remove(region)
                    self._file.release(region)
                self._readers_left.notify_all()

    def close(self) -> None:
        if self._closed or not self._file.is_ours:
            return
        with self._lock:
            self._closed = True
            flights = [*self._ahead, *self._writes]
        for flight in flights:
            self._retire(flight, None)
        self._pool.unregister(self)
        self._file.close()

    # ---------------------------------------------------------------- memory for others (Reclaimer)
    def reclaim_written(self) -> bool:
        with self._lock:
            usable = [flight for flight in self._writes if not flight.borrowed]
            flight = next((one for one in usable if one.transfer.poll()), usable[0] if usable else None)
        if flight is not None:
            self._end_write(flight)
        return flight is not None

    def reclaim_prefetched(self) -> bool:
        with self._lock:
            if not self._ahead:
                return False
            flight, _ = self._ahead.popitem()  # the last one is needed latest
            flight.leave()
        flight.transfer.wait()
        self._pool.release(flight.block)
        return True

    def _end_write(self, flight: Flight) -> None:
        self._wait(flight)
        with self._lock:
            self._settle(flight)

    def _wait(self, flight: Flight) -> None:
        started = time.perf_counter()
        flight.transfer.wait()
        waited = time.perf_counter() - started
        with self._lock:
            if flight.is_write:
                self._stats.write_wait_s += waited
            else:
                self._stats.read_wait_s += waited

    def _retire(self, flight: Flight | None, region: Region | None) -> None:
        """Give back the memory of a transfer, and the room of a content that is no longer needed."""
        if flight is not None:
            flight.transfer.wait()
        with self._lock:
            if flight is not None and flight in self._ahead:
                del self._ahead[flight]
                flight.leave()
                self._pool.release(flight.block)
            elif flight is not None:
                self._settle(flight)
            if region is not None:
                self._free(region)

    # ---------------------------------------------------------------- below: the lock is held
    def _settle(self, flight: Flight) -> None:
        """Note the result of a write that has ended, and give its memory back unless a borrow has it."""
        self._record(flight)
        if flight in self._writes and not flight.borrowed:
            del self._writes[flight]
            flight.leave()
            self._pool.release(flight.block)

    def _not_borrowed(self, key: str) -> Entry:
        entry = self._entries[key]
        if entry.borrowed or entry.aside:
            raise AssertionError(f"{key} is borrowed")
        return entry

    def _record(self, flight: Flight) -> None:
        if flight.transfer.error is not None and flight.entry.failure is None:
            flight.entry.failure = str(flight.transfer.error)

    def _read(self, entry: Entry, block: StagingBlock) -> Flight:
        self._stats.reads += 1
        self._stats.bytes_read += entry.nbytes
        return self._notify(
            Flight(entry, block, self._file.read(block.memory, entry.region, entry.key), is_write=False)
        )

    def _write(self, entry: Entry, block: StagingBlock, *, staged: bool) -> Flight:
        self._stats.writes += 1
        self._stats.bytes_written += entry.nbytes
        if not staged and entry.room is not None:
            self._free(entry.region)
            entry.region, entry.room = entry.room, None
        region = entry.staged if staged else entry.region
        assert region is not None
        flight = self._notify(Flight(entry, block, self._file.write(block.memory, region, entry.key), is_write=True))
        self._writes[flight] = None
        if staged:
            entry.staged_flight = flight
        else:
            entry.flight = flight
            entry.blank = False
        return flight

    def _notify(self, flight: Flight) -> Flight:
        for observer in self.observers:
            observer(flight)
        return flight

    def _reserve(self, nbytes: int, *, instead: Region | None = None) -> Region | None:
        """Room in the file; where the disk is full and readers keep some, once they have let go of enough of it.

        `instead`: as good as room, as soon as nobody keeps it: then None.
        """
        while instead is None or instead in self._kept:
            try:
                return self._file.reserve(nbytes)
            except OffloadError:
                if not self._kept:
                    raise
                self._readers_left.wait()
        return None

    def _free(self, region: Region) -> None:
        """No key has it any more; somebody may read it still."""
        if region in self._kept:
            self._retired.add(region)
        else:
            self._file.release(region)

    def _check_file(self) -> None:
        if self._closed:
            raise AssertionError(f"{self.path} is closed")
        self._file.check()
