"""Puts values into the shards of units that were built without any: each rank its own slices, nothing unsharded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from transformers.utils import logging as bars

from hf_zero.hf.models.stored import LazyTensor, StoredTensor
from hf_zero.layout import Piece
from hf_zero.native.machine import usable_cores
from hf_zero.progress import progress
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.param_index import ParamIndex, ParamPlace
from hf_zero.sharding.shard import ShardTensor
from hf_zero.sharding.unit import ShardUnit

# Bytes of a file that one read takes where they cannot go straight into the shard (another type, another device).
_CHUNK_BYTES = 1 << 24
_MAX_THREADS = 8


class ShardPlacer:
    """Writes parameters into the shards of `units`, by parameter.

    Full tensors are sharded and written at once. Stored ones are noted, and `read` reads this rank's slices of all.
    """

    def __init__(self, units: Iterable[ShardUnit]) -> None:
        self._index = ParamIndex(units)
        self._noted: list[tuple[ParamPlace, StoredTensor]] = []
        self._shards: dict[FlatParam, ShardTensor] = {}  # in memory

    def place(self, param: nn.Parameter, value: torch.Tensor | LazyTensor) -> None:
        """Give `param` its values: a full tensor of its shape, or a stored one that `read` will read."""
        place = self._index.get(param)
        if place is None:
            return
        if isinstance(value, LazyTensor):
            self._noted.append((place, value.stored))
        else:
            flat = value.detach().reshape(-1)
            for piece, view in self._spots(place):
                view.copy_(flat[piece.start : piece.end])

    def read(self, *, show: bool) -> float:
        """Read what was noted; returns the seconds it took. `show` draws a progress bar. No communication."""
        start = time.monotonic()
        jobs = [(stored, piece.start, view) for place, stored in self._noted for piece, view in self._spots(place)]
        total = sum(view.numel() * stored.dtype.itemsize for stored, _, view in jobs)
        num_threads = max(1, min(_MAX_THREADS, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        # In the order of the files, whatever the order of the parameters.
        jobs.sort(key=lambda job: (str(job[0].file.path), job[0].offset, job[1]))
        shown = show and bars.is_progress_bar_enabled()  # transformers' switch counts here too
        with progress("Reading shards", total, shown=shown) as done, ThreadPoolExecutor(num_threads) as pool:
            for nbytes in pool.map(lambda job: _read_piece(*job), jobs):
                done(nbytes)
        self._noted.clear()
        for flat, shard in self._shards.items():
            if shard is not flat.shard:
                flat.shard.copy_from(shard)
        self._shards.clear()
        return time.monotonic() - start

    def _spots(self, place: ParamPlace) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Every slice of a parameter that this rank owns, and its place in the shard, 1-D."""
        if place.slice is None:
            return
        flat = place.flat
        if flat not in self._shards:
            shard = flat.shard.in_memory
            if shard is None:  # on disk: written in one go, by `read`
                memory = torch.zeros(flat.layout.shard_numel, dtype=flat.dtype)
                shard = ShardTensor(flat.layout, flat.rank, memory, in_full=False)
            self._shards[flat] = shard
        shard = self._shards[flat]
        for piece in place.slice.pieces:
            start = piece.flat_offset if shard.in_full else piece.shard_offset
            yield piece, shard.memory[start : start + piece.numel]


def _read_piece(stored: StoredTensor, start: int, view: torch.Tensor) -> int:
    if view.dtype == stored.dtype and view.device.type == "cpu":
        stored.read_range(start, view)
        return view.numel() * stored.dtype.itemsize
    step = _CHUNK_BYTES // stored.dtype.itemsize
    chunk = torch.empty(min(step, view.numel()), dtype=stored.dtype)
    for at in range(0, view.numel(), step):
        part = chunk[: min(step, view.numel() - at)]
        stored.read_range(start + at, part)
        view[at : at + part.numel()].copy_(part)
    return view.numel() * stored.dtype.itemsize
