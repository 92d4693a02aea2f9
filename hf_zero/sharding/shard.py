"""This rank's shard of a flat parameter: in memory, or on a store that lends memory (a disk, or the host)."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_zero.errors import StateError
from hf_zero.layout import Slice, UnitLayout
from hf_zero.storage.base import BorrowedTensors, ShardStore, StagingStore
from hf_zero.storage.kept_content import KeptContent
from hf_zero.storage.memory import MemoryStore


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One NaN of its own, expanded with stride 0: shape, type and device are true, there are no values."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tuple(shape))


def slice_of(full: torch.Tensor, slice_: Slice) -> torch.Tensor:
    """The elements of `slice_` out of its full parameter, or a tensor of that shape: 1-D [slice_.numel]."""
    flat = full.reshape(-1)
    return torch.cat([flat[piece.start : piece.end] for piece in slice_.pieces])


def slices_by_name(layout: UnitLayout, rank: int) -> dict[str, Slice]:
    """Return the slice of each parameter that `rank` owns, without those of which it owns nothing."""
    return {slice_.name: slice_ for slice_ in layout.slices(rank)}


class KeptElements:
    """Elements of a shard on a disk as they were; see StagingStore.keep. Each piece is released when it is read.

    Args:
        parts: In order: a content, and which of its elements.
    """

    def __init__(self, dtype: torch.dtype, parts: Sequence[tuple[KeptContent, int, int]]) -> None:
        self._dtype = dtype
        self._parts = parts

    def chunks(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """All of them, once; see KeptContent.elements."""
        for content, start, end in self._parts:
            yield from content.elements(start, end, self._dtype, memory)
            content.release()

    def release(self) -> None:
        for content, _, _ in self._parts:
            content.release()


class Shard(abc.ABC):
    """One kind of data (parameter, gradient, master weights, a moment) for the elements that this rank owns.

    Invariant: padding elements are zero and stay zero.
    """

    in_full = False  # whether it is a view of memory with the layout of the full flat parameter

    def __init__(self, layout: UnitLayout, rank: int, dtype: torch.dtype) -> None:
        self.layout = layout
        self.rank = rank
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.layout.shard_numel * self.dtype.itemsize

    @abc.abstractmethod
    def chunks(self, start: int, numel: int) -> Iterator[torch.Tensor]:
        """Elements [start, start + numel) of the shard in order; each chunk is valid until the next."""

    @property
    @abc.abstractmethod
    def in_memory(self) -> ShardTensor | None:
        """The shard itself where it stays in memory; None where its store only lends it."""

    @abc.abstractmethod
    def slice_tensors(self, slice_: Slice) -> list[torch.Tensor]:
        """Return what an optimizer holds for the elements of `slice_`, in order: views of them, or one placeholder.

        A slice that is the unsharded parameter and contiguous has the parameter's shape.
        """

    @abc.abstractmethod
    def read_slice(self, slice_: Slice) -> torch.Tensor:
        """The elements of `slice_`, 1-D [slice_.numel]; a view where they are contiguous in memory."""

    @abc.abstractmethod
    def write_slice(self, slice_: Slice, values: torch.Tensor) -> None:
        """Set the elements of `slice_` from `values`, 1-D [slice_.numel], cast to this one's type."""

    def copy_from(self, other: Shard) -> None:
        """Take the values of a shard of the same layout, cast to this one's type."""
        for start, target in self._targets():
            if target.is_meta:
                continue  # there are no values, and a plan of a model has thousands of chunks
            at = 0
            for chunk in other.chunks(start, target.numel()):
                target[at : at + chunk.numel()].copy_(chunk)
                at += chunk.numel()

    @abc.abstractmethod
    def _targets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Memory for all new values of the shard, in order, and the first element of each."""

    @abc.abstractmethod
    def borrow(self) -> tuple[ShardTensor, BorrowedTensors | None]:
        """All of the shard in memory, to be read until what it is borrowed from is released."""

    @abc.abstractmethod
    def borrow_to_write(self) -> BorrowedTensors:
        """Memory for all new values of the shard: one tensor, with `in_full` that of the full flat parameter."""

    def prefetch(self) -> None:
        """Start bringing the shard into memory. A hint: it never waits."""
        return None

    def wait_for_readers(self) -> None:
        """Return when no copy to the device reads the shard's memory any more."""
        return None

    def move(self, layout: UnitLayout, store: ShardStore) -> None:
        """Go on as the shard of `layout` on `store`, which can adopt what the shard is. Nothing is copied."""
        self.layout = layout

    def drop(self) -> None:
        """Give its memory on a store back."""
        return None


class ShardTensor(Shard):
    """A shard in memory, here that of its caller: one part per bucket, one or more slices per parameter.

    Invariants:
      - The parts tile the shard in shard order.
      - A copy to the device may be reading the memory after it was started, and after the device was told to wait for
        it: the host goes on. So whoever writes to the memory, or frees it, calls `wait_for_readers` before. Methods
        that do either call it themselves; who writes to `slice_tensors`, as an optimizer does, has to.
      - A copy from the device may be bringing values: methods that give them to the host call `wait_for_values`.

    Args:
        memory: 1-D [shard_numel], the shard itself, or with `in_full` 1-D [padded_numel], the full tensor of which
            this rank's parts are views: an fp32 parameter that is resident on every rank needs no second copy as
            master.
    """

    def __init__(self, layout: UnitLayout, rank: int, memory: torch.Tensor, *, in_full: bool) -> None:
        super().__init__(layout, rank, memory.dtype)
        want = layout.padded_numel if in_full else layout.shard_numel
        if memory.dim() != 1 or memory.numel() != want:
            raise AssertionError(f"{layout.name}: memory of {memory.numel()} elements, expected {want}")
        self.memory = memory
        self.in_full = in_full
        self.is_away = False  # its memory is freed, and its values are elsewhere; see engine/offloaded_states.py
        self._being_read: torch.Event | None = None  # over when the last copy from the host's memory is
        self._being_written: torch.Event | None = None  # over when the last copy to the host's memory is

    @property
    def nbytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()

    @functools.cached_property
    def parts(self) -> list[torch.Tensor]:
        """Return views of the parts, made by one call: a layer of a large model has hundreds."""
        each = [numel // self.layout.world_size for _, numel in self.layout.buckets()]
        if not self.in_full:
            return list(self.memory.split(each))
        before, behind = self.rank, self.layout.world_size - self.rank - 1
        return list(self.memory.split([size for one in each for size in (before * one, one, behind * one)]))[1::3]

    def chunks(self, start: int, numel: int) -> Iterator[torch.Tensor]:
        self.wait_for_values()
        size = self.layout.bucket_numel // self.layout.world_size  # of every part but the last
        end = start + numel
        while start < end:
            number, inside = divmod(start, size)
            count = min(size - inside, end - start)
            yield self.parts[number][inside : inside + count]
            start += count

    @property
    def in_memory(self) -> ShardTensor:
        return self

    def slice_tensors(self, slice_: Slice) -> list[torch.Tensor]:
        """Views: one tensor where the elements are contiguous in memory."""
        self.wait_for_values()
        if not self.in_full:
            spans = [(slice_.shard_offset, slice_.numel)]
        else:
            spans = []
            for piece in slice_.pieces:
                if spans and sum(spans[-1]) == piece.flat_offset:
                    spans[-1] = (spans[-1][0], spans[-1][1] + piece.numel)
                else:
                    spans.append((piece.flat_offset, piece.numel))
        tensors = [self.memory[start : start + numel] for start, numel in spans]
        return [tensors[0].view(slice_.shape)] if len(tensors) == 1 and slice_.is_unsharded else tensors

    def read_slice(self, slice_: Slice) -> torch.Tensor:
        views = [view.view(-1) for view in self.slice_tensors(slice_)]
        return views[0] if len(views) == 1 else torch.cat(views)

    def write_slice(self, slice_: Slice, values: torch.Tensor) -> None:
        self.wait_for_readers()
        views = [view.view(-1) for view in self.slice_tensors(slice_)]
        for view, chunk in zip(views, torch.split(values, [view.numel() for view in views]), strict=True):
            view.copy_(chunk)

    def _targets(self) -> Iterator[tuple[int, torch.Tensor]]:
        self.wait_for_readers()
        start = 0
        for part in self.parts:
            yield start, part
            start += part.numel()

    def borrow(self) -> tuple[ShardTensor, BorrowedTensors | None]:
        self.check_here()
        return self, None

    def borrow_to_write(self) -> BorrowedTensors:
        self.wait_for_readers()
        return BorrowedTensors([self.memory])

    def copy_from(self, other: Shard) -> None:
        """Copy as Shard.copy_from says. Between host and device copies are only started, on the current stream."""
        source = other.in_memory
        if source is None or source.memory.device.type == self.memory.device.type:
            super().copy_from(other)
        elif self.memory.device.type != "cpu":
            source.copy_parts_to(self.parts)
        else:
            stream = torch.accelerator.current_stream(source.memory.device)
            self.join_copies(stream)
            for mine, part in zip(self.parts, source.parts, strict=True):
                mine.copy_(part.to(self.dtype), non_blocking=True)  # cast on the device: the host would do it itself
            self._being_written = torch.Event(source.memory.device.type)
            self._being_written.record(stream)

    def copy_parts_to(self, places: Sequence[torch.Tensor]) -> torch.Event | None:
        """Start to copy every part to its place, on the current stream of the device that has the places.

        Returns an event that is over when they are there; None: they are, for the host has copied them.
        """
        device = places[0].device if places else self.memory.device
        if device.type != "cpu" and self._being_written is not None:
            self._being_written.wait(torch.accelerator.current_stream(device))
        for place, part in zip(places, self.parts, strict=True):
            if place.dtype != part.dtype:  # cast there: the host would do it itself, and wait
                part = part.to(place.device, non_blocking=True)
            place.copy_(part, non_blocking=True)
        if device.type == "cpu":
            return None
        self._being_read = torch.Event(device.type)
        self._being_read.record(torch.accelerator.current_stream(device))
        return self._being_read

    def check_here(self) -> None:
        """Raise StateError where the values are elsewhere."""
        if self.is_away:
            raise StateError(f"values of {self.layout.name} are on the host: call engine.reload_states() first")

    def wait_for_values(self) -> None:
        """Return when what a copy from the device brings is in the host's memory."""
        self.check_here()
        if self._being_written is not None:
            self._being_written.synchronize()
            self._being_written = None

    def wait_for_readers(self) -> None:
        self.wait_for_values()
        if self._being_read is not None:
            self._being_read.synchronize()
            self._being_read = None

    def join_copies(self, stream: torch.Stream) -> None:
        """Let `stream` wait for readers: what it is given from now on waits, and whoever waits for that."""
        for event in (self._being_read, self._being_written):
            if event is not None:
                event.wait(stream)
        self._being_read = self._being_written = None

    def exchange(self, other: ShardTensor) -> None:
        """Swap the values with those of a shard of the same layout and type, a part at a time."""
        self.wait_for_readers()
        other.wait_for_readers()
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)

    def scale(self, factor: float) -> None:
        self.wait_for_readers()
        if self.parts:  # a flat parameter of empty parameters has none, and torch refuses an empty list
            torch._foreach_mul_(self.parts, factor)

    def zero(self) -> None:
        self.wait_for_readers()
        if self.parts:
            torch._foreach_zero_(self.parts)


class MemoryShard(ShardTensor):
    """A shard of zeros: the tensor LAYOUT/KIND of a store that is memory."""

    def __init__(self, layout: UnitLayout, rank: int, store: MemoryStore, kind: str, dtype: torch.dtype) -> None:
        self._store, self._kind, self._key = store, kind, f"{layout.name}/{kind}"
        store.create(self._key, layout.shard_numel, dtype)
        super().__init__(layout, rank, store.tensor(self._key), in_full=False)

    def move(self, layout: UnitLayout, store: ShardStore) -> None:
        assert isinstance(store, MemoryStore)
        key = f"{layout.name}/{self._kind}"
        store.adopt(key, self._store, self._key)
        self.layout, self._store, self._key = layout, store, key

    def drop(self) -> None:
        self.wait_for_readers()
        self._store.drop(self._key)


@dataclass(frozen=True)
class Tile:
    """A range of a shard that is read, updated and written in one go."""

    key: str  # in the store
    start: int  # elements from the start of the shard
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


class StoredShard(Shard):
    """A shard on a store that lends memory, in tiles.

    Invariant: the tiles tile the shard in shard order.

    Args:
        kind: What it is for, unique in the layout.
        tile_numel: Most elements that are in memory at once; None: all are one tile.
    """

    def __init__(
        self,
        layout: UnitLayout,
        rank: int,
        store: ShardStore,
        kind: str,
        dtype: torch.dtype,
        tile_numel: int | None = None,
    ) -> None:
        super().__init__(layout, rank, dtype)
        self.store = store
        self.tiles: list[Tile] = []
        step = tile_numel or max(layout.shard_numel, 1)
        for start in range(0, layout.shard_numel, step):
            numel = min(step, layout.shard_numel - start)
            self.tiles.append(Tile(f"{layout.name}/{kind}/{len(self.tiles)}", start, numel))
            store.create(self.tiles[-1].key, numel, dtype)

    @property
    def in_memory(self) -> None:
        return None

    def slice_tensors(self, slice_: Slice) -> list[torch.Tensor]:
        return [placeholder(slice_.shape if slice_.is_unsharded else (slice_.numel,), self.dtype, torch.device("cpu"))]

    def chunks(self, start: int, numel: int) -> Iterator[torch.Tensor]:
        for tile, low, high in self._meeting(start, numel):
            with self.store.borrow([tile.key]) as borrow:
                yield borrow.tensors[0][low - tile.start : high - tile.start]

    def read_slice(self, slice_: Slice) -> torch.Tensor:
        return torch.cat([chunk.clone() for chunk in self.chunks(slice_.shard_offset, slice_.numel)])

    def write_slice(self, slice_: Slice, values: torch.Tensor) -> None:
        start = slice_.shard_offset
        for tile, low, high in self._meeting(start, values.numel()):
            all_of_it = high - low == tile.numel
            with self.store.borrow([tile.key], write=True, overwrite=all_of_it) as borrow:
                borrow.tensors[0][low - tile.start : high - tile.start].copy_(values[low - start : high - start])

    def _targets(self) -> Iterator[tuple[int, torch.Tensor]]:
        for tile in self.tiles:
            with self.store.borrow([tile.key], write=True, overwrite=True) as borrow:
                yield tile.start, borrow.tensors[0]

    def borrow(self) -> tuple[ShardTensor, BorrowedTensors | None]:
        borrowed = self.store.borrow(self._keys)  # one tile, or none
        memory = borrowed.tensors[0] if self.tiles else torch.empty(0, dtype=self.dtype, device="cpu")
        return ShardTensor(self.layout, self.rank, memory, in_full=False), borrowed

    def borrow_to_write(self) -> BorrowedTensors:
        borrowed = self.store.borrow(self._keys, write=True, overwrite=True)
        borrowed.tensors[0].zero_()  # padding is zero
        return borrowed

    @property
    def _keys(self) -> list[str]:
        return [tile.key for tile in self.tiles]

    def _meeting(self, start: int, numel: int) -> Iterator[tuple[Tile, int, int]]:
        """The tiles that [start, start + numel) meets, each with the range that it has of it."""
        for tile in self.tiles:
            low, high = max(start, tile.start), min(start + numel, tile.end)
            if low < high:
                yield tile, low, high

    def prefetch(self) -> None:
        self.store.prefetch(self._keys)

    def drop(self) -> None:
        for key in self._keys:
            self.store.drop(key)
        self.tiles = []


class StagedShard(StoredShard):
    """A shard on a store that stages writes (a disk): new values can be undone, and old ones kept for readers."""

    store: StagingStore

    def keep(self, start: int, numel: int) -> KeptElements:
        """Elements [start, start + numel) as they are now, whatever becomes of them."""
        met = self._meeting(start, numel)
        return KeptElements(
            self.dtype, [(self.store.keep(tile.key), low - tile.start, high - tile.start) for tile, low, high in met]
        )

    def stage(self) -> BorrowedTensors:
        """Memory for all new values of the shard, which are kept aside until `commit` or `rollback`."""
        borrowed = self.store.stage(self._keys, overwrite=True)
        borrowed.tensors[0].zero_()  # padding is zero
        return borrowed

    def commit(self) -> None:
        """Take the staged values; see StagingStore.commit."""
        self.store.commit(self._keys)

    def rollback(self) -> None:
        """Forget the staged values."""
        self.store.rollback(self._keys)


def make_stored(
    layout: UnitLayout, rank: int, store: ShardStore, kind: str, dtype: torch.dtype, tile_numel: int | None = None
) -> StoredShard:
    """A shard of zeros in tiles, on whatever store."""
    return (StagedShard if isinstance(store, StagingStore) else StoredShard)(
        layout, rank, store, kind, dtype, tile_numel
    )


def make_shard(layout: UnitLayout, rank: int, store: ShardStore, kind: str, dtype: torch.dtype) -> Shard:
    """A shard of zeros: a tensor for good where the store is memory, else one tile."""
    if isinstance(store, MemoryStore):
        return MemoryShard(layout, rank, store, kind, dtype)
    return make_stored(layout, rank, store, kind, dtype)
