"""Master weights and moments of one flat parameter on a store, and one native Adam update of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.native.adam import AdamRule, AdamSpan, adam_step
from hf_zero.native.machine import default_threads
from hf_zero.optim.offload.param_writer import ParamWriter
from hf_zero.optim.param_groups import OwnedSlice
from hf_zero.optim.update_rule import MOMENTS
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.sharding.shard import ShardTensor, StoredShard, make_stored
from hf_zero.storage import StagingStore


@dataclass(frozen=True)
class Hyper:
    """The numbers of a param group that decide an update, as they were when the step was asked for."""

    rule: AdamRule
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyper:
        return cls(AdamRule.of(group), bool(group.get("maximize", False)))


@dataclass(frozen=True)
class _Slice:
    """Elements of a parameter that are contiguous everywhere, and lie in one tile."""

    number: int | None  # of the owned slice; None: the optimizer does not hold the parameter
    start: int  # in the tile
    numel: int
    in_shard: int
    in_full: int
    in_param: int


class HostState:
    """The optimizer state of one flat parameter that the native rule keeps.

    Invariant: `steps` counts the updates of each slice that have been committed.
    """

    def __init__(self, grads: GradAccumulator, owned: list[OwnedSlice], moments_dtype: torch.dtype | None) -> None:
        self.grads = grads
        self.flat = grads.flat
        self.owned = owned
        master = self.flat.master
        assert isinstance(master, StoredShard)
        self.master = master
        dtype = moments_dtype or master.dtype
        placement = self.flat.placement
        self.moments = [
            make_stored(self.flat.layout, self.flat.rank, placement.master, kind, dtype, placement.tile_numel)
            for kind in MOMENTS
        ]
        self.steps = [0] * len(owned)

    @functools.cached_property
    def slices(self) -> list[list[_Slice]]:
        """The elements to update, by tile."""
        return [list(self._slices(tile.start, tile.end)) for tile in self.master.tiles]

    def _slices(self, start: int, end: int) -> Iterator[_Slice]:
        numbers = {owned.slice.name: number for number, owned in enumerate(self.owned)}
        for piece in (piece for slice_ in self.flat.slices.values() for piece in slice_.pieces):
            low, high = max(start, piece.shard_offset), min(end, piece.shard_offset + piece.numel)
            skipped = low - piece.shard_offset
            in_full, in_param = piece.flat_offset + skipped, piece.start + skipped
            if low < high:
                yield _Slice(numbers.get(piece.name), low - start, high - low, low, in_full, in_param)

    @property
    def staging(self) -> StagingStore | None:
        """The store of master and moments, if it can stage writes."""
        store = self.master.store
        return store if isinstance(store, StagingStore) else None

    def keys(self, tile: int) -> list[str]:
        return [shard.tiles[tile].key for shard in (self.master, *self.moments)]

    def drop(self) -> None:
        for moment in self.moments:
            moment.drop()


class UpdateJob:
    """One native update of one flat parameter, on the worker's thread.

    Args:
        hypers: By owned slice; None leaves it alone, as torch leaves a parameter without gradient.
        factor: Multiplies the gradient: the clip coefficient.
        swap: See GradAccumulator.lend.
        staged: States go to another region of the store, so that `rollback` can undo the update.
    """

    def __init__(
        self,
        state: HostState,
        hypers: list[Hyper | None],
        factor: float,
        writer: ParamWriter,
        *,
        staged: bool,
        swap: bool,
    ) -> None:
        self.state = state
        self.hypers = hypers
        self.factor = factor
        self._staging = state.staging if staged else None
        self._writer = writer
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._published = False
        self._committed = False
        self._grads: ShardTensor | None
        self._grads, self._arriving = state.grads.lend(self, swap=swap)  # an event: the gradient is on the host
        self._reduces = state.grads.num_reduces

    @property
    def gradient_is_unchanged(self) -> bool:
        """Nothing has been added to the gradient since it was borrowed."""
        return self.state.grads.num_reduces == self._reduces

    # ---------------------------------------------------------------- the worker's side
    def prefetch(self) -> None:
        if self.state.slices:
            self.state.master.store.prefetch(self.state.keys(0))

    def run(self, look_ahead: Callable[[], None]) -> None:
        state, store = self.state, self.state.master.store
        grads = self._grads
        assert grads is not None
        if self._arriving is not None:
            self._arriving.synchronize()
        out = self._writer.open() if state.slices else None
        # Beside the update another thread launches kernels: a device that waits for it computes nothing.
        threads = default_threads(spare=0 if state.flat.comm.computes_on_host else 1)
        for tile in range(len(state.slices)):
            keys = state.keys(tile)
            with self._staging.stage(keys) if self._staging else store.borrow(keys, write=True) as borrow:
                if tile + 1 < len(state.slices):
                    store.prefetch(state.keys(tile + 1))
                else:
                    look_ahead()
                master, exp_avg, exp_avg_sq = borrow.tensors
                self._write_unchanged(tile, master, out)
                for maximize in {hyper.maximize for hyper in self.hypers if hyper is not None}:
                    spans = list(self._spans(tile, grads.in_full, maximize))
                    if spans:
                        scale = -self.factor if maximize else self.factor
                        state_of_tile = (master, exp_avg, exp_avg_sq, grads.memory)
                        adam_step(spans, *state_of_tile, grad_scale=scale, out=out, threads=threads)
        if state.slices:
            self._writer.close()
        self._grads = None
        self._over.set()

    def _write_unchanged(self, tile: int, master: torch.Tensor, out: torch.Tensor | None) -> None:
        """Write the parameters that are not updated: they are their masters, rounded."""
        for part in self.state.slices[tile]:
            if out is not None and self._hyper_of(part) is None:
                place = part.in_full if self._writer.in_full else part.in_shard
                out[place : place + part.numel].copy_(master[part.start : part.start + part.numel])

    def _hyper_of(self, part: _Slice) -> Hyper | None:
        return None if part.number is None else self.hypers[part.number]

    def _spans(self, tile: int, grads_in_full: bool, maximize: bool) -> Iterator[AdamSpan]:
        out_in_full = self._writer.in_full
        for part in self.state.slices[tile]:
            hyper = self._hyper_of(part)
            if part.number is None or hyper is None or hyper.maximize != maximize:
                continue
            grad_start = part.in_full if grads_in_full else part.in_shard
            out_start = part.in_full if out_in_full else part.in_shard
            step = self.state.steps[part.number] + 1
            yield AdamSpan(part.start, part.numel, grad_start, out_start, part.in_param, step, *hyper.rule)

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._over.set()

    # ---------------------------------------------------------------- the trainer's side
    def join(self) -> None:
        """Return when the update is over; raise what stopped it."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def commit(self) -> None:
        """The step is taken: what the job has done, or will have done, stands."""
        self._committed = True

    def wait(self) -> None:
        """Finish the update and let gathers see the new parameters."""
        self.join()
        if not self._published and self._committed:
            self._published = True
            self._settle_states()
            self._writer.publish()

    def rollback(self) -> None:
        """Undo a staged update whose step was not taken."""
        self.join()
        assert self._staging is not None
        for tile in range(len(self.state.slices)):
            self._staging.rollback(self.state.keys(tile))
        if self.state.slices:
            self._writer.discard()

    def _settle_states(self) -> None:
        for number, hyper in enumerate(self.hypers):
            self.state.steps[number] += hyper is not None
        if self._staging is not None:
            for tile in range(len(self.state.slices)):
                self._staging.commit(self.state.keys(tile))
