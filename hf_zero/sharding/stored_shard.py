"""This rank's shard of a flat parameter on a store that lends memory: a disk, or the host under an update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_zero.layout import Run, UnitLayout
from hf_zero.sharding.shard import ShardTensor
from hf_zero.storage.base import ShardStore


@dataclass(frozen=True)
class Tile:
    """A range of a shard that is read, updated and written in one go."""

    key: str  # in the store
    start: int  # elements from the start of the shard
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


class StoredShard:
    """One kind of data (parameter, master weights, a moment) for the elements that this rank owns, in tiles.

    Invariant: the tiles tile the shard in shard order; padding elements are zero.

    Args:
        kind: What it is for, unique in the layout.
        tile_numel: Most elements that are in memory at once.
    """

    def __init__(
        self, layout: UnitLayout, rank: int, store: ShardStore, kind: str, dtype: torch.dtype, tile_numel: int
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.store = store
        self.dtype = dtype
        self.tiles: list[Tile] = []
        for start in range(0, layout.shard_numel, tile_numel):
            numel = min(tile_numel, layout.shard_numel - start)
            self.tiles.append(Tile(f"{layout.name}/{kind}/{len(self.tiles)}", start, numel))
            store.create(self.tiles[-1].key, numel, dtype)

    @property
    def nbytes(self) -> int:
        return self.layout.shard_numel * self.dtype.itemsize

    def chunks(self, start: int, numel: int) -> Iterator[torch.Tensor]:
        """Elements [start, start + numel) of the shard, a tile at a time; each is valid until the next."""
        for tile, low, high in self._cut(start, numel):
            with self.store.borrow([tile.key]) as borrow:
                yield borrow.tensors[0][low - tile.start : high - tile.start]

    def read_run(self, run: Run) -> torch.Tensor:
        """A copy of the elements of `run`, 1-D [run.numel]."""
        return torch.cat([chunk.clone() for chunk in self.chunks(run.shard_offset, run.numel)])

    def write_run(self, run: Run, values: torch.Tensor) -> None:
        """Set the elements of `run` from `values`, 1-D [run.numel], cast to this one's type."""
        self._write(run.shard_offset, values)

    def copy_from(self, other: ShardTensor | StoredShard) -> None:
        """Take the values of a shard of the same layout, cast to this one's type."""
        if isinstance(other, StoredShard):
            for tile in other.tiles:
                for chunk in other.chunks(tile.start, tile.numel):
                    self._write(tile.start, chunk)
            return
        for tile in self.tiles:
            with self.store.borrow([tile.key], write=True, overwrite=True) as borrow:
                start = 0
                for part in other.parts:
                    low, high = max(start, tile.start), min(start + part.numel(), tile.end)
                    if low < high:
                        borrow.tensors[0][low - tile.start : high - tile.start].copy_(part[low - start : high - start])
                    start += part.numel()

    def copy_into(self, other: ShardTensor) -> None:
        """Set a shard of the same layout from this one."""
        start = 0
        for part in other.parts:
            at = 0
            for chunk in self.chunks(start, part.numel()):
                part[at : at + chunk.numel()].copy_(chunk)
                at += chunk.numel()
            start += part.numel()

    def drop(self) -> None:
        for tile in self.tiles:
            self.store.drop(tile.key)
        self.tiles = []

    def _write(self, start: int, values: torch.Tensor) -> None:
        for tile, low, high in self._cut(start, values.numel()):
            whole = high - low == tile.numel
            with self.store.borrow([tile.key], write=True, overwrite=whole) as borrow:
                borrow.tensors[0][low - tile.start : high - tile.start].copy_(values[low - start : high - start])

    def _cut(self, start: int, numel: int) -> Iterator[tuple[Tile, int, int]]:
        """The tiles that [start, start + numel) meets, each with the range that it has of it."""
        for tile in self.tiles:
            low, high = max(start, tile.start), min(start + numel, tile.end)
            if low < high:
                yield tile, low, high
