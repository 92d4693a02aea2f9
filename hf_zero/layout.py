"""Decides which elements of which parameter live on which rank.

Pure integer arithmetic: no torch, no processes, no devices, no IO. The runtime, the checkpoint files and the offline
tools all take offsets from here, so a change in this file is a change of the checkpoint format (checkpoint/format.py),
but for sizes that readers take from the manifest: `padded_numel` and `bucket_numel`.

[Note: Flat layout]
A unit's parameters lie one behind the other in one flat parameter of `padded_numel` elements, each starting at a
multiple of ALIGN. It is split into buckets of `bucket_numel` elements (the last may be shorter); a bucket is what one
collective moves. Rank r owns the r-th of `world_size` equal parts of every bucket, and its shard is those parts one
behind the other:

    flat   | bucket 0: r0 r0 r1 r1 | bucket 1: r0 r0 r1 r1 | bucket 2: r0 r1 |
    rank 0 | r0 r0 | r0 r0 | r0 |          rank 1 | r1 r1 | r1 r1 | r1 |

So a bucket of the flat parameter and the part of it in a shard are both contiguous: an all-gather or a reduce-scatter
needs no copy, whatever the bucket size. Offsets in a shard grow with offsets in the flat parameter, so the elements of
one parameter in one shard are one contiguous slice (of pieces that are apart in the parameter where buckets split it).

`padded_numel` is a multiple of `world_size * ALIGN`, so that the part of every rank starts aligned, with 3 ranks too.
Only a bucket of fewer than ALIGN elements per rank, which somebody must have asked for, has parts that do not.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# Elements. 16 bytes in 16-bit types: what vectorised kernels and NCCL want a tensor to start at.
ALIGN = 8


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a unit's flat parameter."""

    name: str
    shape: tuple[int, ...]
    offset: int  # elements from the start of the flat parameter

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def end(self) -> int:
        return self.offset + self.numel

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of the parameter in the flat buffer, in elements: those of a contiguous tensor."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


@dataclass(frozen=True)
class Piece:
    """A range of one parameter that lies in one shard without a gap."""

    name: str
    start: int  # first element, in the flattened parameter
    numel: int
    shard_offset: int  # elements from the start of the owning rank's shard
    flat_offset: int  # elements from the start of the unit's flat parameter

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Slice:
    """All elements of one parameter in one shard: contiguous in the shard, made of one or more pieces."""

    name: str
    shape: tuple[int, ...]  # of the full parameter
    pieces: tuple[Piece, ...]

    @property
    def shard_offset(self) -> int:
        return self.pieces[0].shard_offset

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @property
    def is_unsharded(self) -> bool:
        return self.numel == math.prod(self.shape)


@dataclass(frozen=True)
class OwnedRange:
    """A range of one parameter and the rank that owns it."""

    rank: int
    piece: Piece


@dataclass(frozen=True)
class UnitLayout:
    """The flat parameter of one unit: where its parameters lie, and which rank owns what. See [Note: Flat layout].

    Invariants: the shards of all ranks tile [0, padded_numel) of the flat parameter; each element of a parameter has
    exactly one owner; two ranks that built the same model compute the same `digest()`.
    """

    name: str  # unique in the model, e.g. "model.layers.3/float32"
    dtype: str  # "float32", "bfloat16", ...: of the parameters, without "torch."
    trainable: bool
    world_size: int
    bucket_numel: int  # a multiple of world_size
    slots: tuple[Slot, ...]
    padded_numel: int  # a multiple of world_size; of world_size * ALIGN in what `build` makes
    first_rank: int = 0  # in a checkpoint: shard r is in the file of rank first_rank + r
    _by_name: dict[str, Slot] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {slot.name: slot for slot in self.slots})
        if self.padded_numel % self.world_size or self.bucket_numel % self.world_size:
            raise AssertionError(f"{self.name}: {self.padded_numel}, {self.bucket_numel} do not divide evenly")

    @classmethod
    def build(
        cls,
        name: str,
        shapes: Mapping[str, Sequence[int]],
        *,
        dtype: str,
        trainable: bool,
        world_size: int,
        max_bucket_numel: int | None = None,
    ) -> UnitLayout:
        """Lay parameters out in the order of `shapes`.

        Args:
            max_bucket_numel: Most elements that one collective may move; None means no limit. A limit below the world
                size means one element per rank, the least that a collective can move.
        """
        slots = []
        offset = 0
        for param, shape in shapes.items():
            slots.append(Slot(param, tuple(int(n) for n in shape), offset))
            offset = _round_up(slots[-1].end, ALIGN)
        used = slots[-1].end if slots else 0
        padded = _round_up(used, world_size * ALIGN)
        if max_bucket_numel is not None and padded > max_bucket_numel:
            bucket = _bucket_numel(max_bucket_numel, world_size)
        else:
            bucket = max(padded, world_size)
        return cls(name, dtype, trainable, world_size, bucket, tuple(slots), padded)

    # ---------------------------------------------------------------- sizes
    @cached_property
    def numel(self) -> int:
        """The number of elements of the parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """[start, end) of what is no parameter's: between slots, and behind the last."""
        ends = [0, *(slot.end for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.padded_numel]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.world_size

    @property
    def num_buckets(self) -> int:
        return -(-self.padded_numel // self.bucket_numel)

    def buckets(self) -> Iterator[tuple[int, int]]:
        """(start, numel) of every bucket in the flat parameter; in a shard both are divided by world_size."""
        for start in range(0, self.padded_numel, self.bucket_numel):
            yield start, min(self.bucket_numel, self.padded_numel - start)

    # ---------------------------------------------------------------- ownership
    def shard_range(self, rank: int) -> list[tuple[int, int]]:
        """(start, end) in the flat parameter of every part that `rank` owns, in shard order."""
        ranges = []
        for start, numel in self.buckets():
            part = numel // self.world_size
            ranges.append((start + rank * part, start + (rank + 1) * part))
        return ranges

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces that `rank` owns, in shard order. Padding is not a piece."""
        pieces: list[Piece] = []
        shard_offset = 0
        ends = [slot.end for slot in self.slots]
        for start, end in self.shard_range(rank):
            for slot in self.slots[bisect.bisect_right(ends, start) :]:
                if slot.offset >= end:
                    break
                low, high = max(start, slot.offset), min(end, slot.end)
                if low < high:
                    pieces.append(Piece(slot.name, low - slot.offset, high - low, shard_offset + low - start, low))
            shard_offset += end - start
        return pieces

    def slices(self, rank: int) -> list[Slice]:
        """The slices that `rank` owns, one per parameter, in shard order."""
        grouped: dict[str, list[Piece]] = {}
        for piece in self.pieces(rank):
            grouped.setdefault(piece.name, []).append(piece)
        return [Slice(name, self._by_name[name].shape, tuple(pieces)) for name, pieces in grouped.items()]

    def locate(self, name: str, start: int = 0, end: int | None = None) -> list[OwnedRange]:
        """The owners of elements [start, end) of the flattened parameter `name`, in element order."""
        slot = self._by_name[name]
        end = slot.numel if end is None else end
        found = []
        position = slot.offset + start
        while position < slot.offset + end:
            bucket_start = position - position % self.bucket_numel
            bucket = min(self.bucket_numel, self.padded_numel - bucket_start)
            part = bucket // self.world_size
            rank, inside = divmod(position - bucket_start, part)
            numel = min(part - inside, slot.offset + end - position)
            shard_offset = bucket_start // self.world_size + inside
            found.append(OwnedRange(rank, Piece(name, position - slot.offset, numel, shard_offset, position)))
            position += numel
        return found

    def slot(self, name: str) -> Slot:
        return self._by_name[name]

    # ---------------------------------------------------------------- identity and files
    def digest(self) -> str:
        """Equal on two ranks exactly if they cut the same parameters in the same way."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "trainable": self.trainable,
            "world_size": self.world_size,
            "bucket_numel": self.bucket_numel,
            "padded_numel": self.padded_numel,
            "slots": [[slot.name, list(slot.shape), slot.offset] for slot in self.slots],
            **({"first_rank": self.first_rank} if self.first_rank else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> UnitLayout:
        slots = tuple(Slot(name, tuple(shape), offset) for name, shape, offset in data["slots"])
        return cls(
            data["name"],
            data["dtype"],
            data["trainable"],
            data["world_size"],
            data["bucket_numel"],
            slots,
            data["padded_numel"],
            data.get("first_rank", 0),
        )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _bucket_numel(limit: int, world_size: int) -> int:
    """The largest bucket of at most `limit` elements that splits evenly, its parts aligned where the limit allows."""
    part = max(limit // world_size, 1)
    if part >= ALIGN:
        part -= part % ALIGN
    return part * world_size
