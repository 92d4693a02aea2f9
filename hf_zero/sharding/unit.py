"""A unit, its state machine, and the all-gathers that unshard it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from hf_zero.distributed.work import Pending
from hf_zero.sharding.flat_param import FlatParam


class UnitKind(enum.Enum):
    LAYER = "layer"  # gathered around the forward and the backward of its module
    ROOT = "root"  # gathered from root forward to the end of backward
    PERSISTENT = "persistent"  # always unsharded: parameters too small to be worth a gather


class UnitState(enum.Enum):
    """The states of a unit: which memory exists."""

    SHARDED = "sharded"  # the shard only; parameters are placeholders
    UNSHARDING = "unsharding"  # all-gathers are under way; parameters are still placeholders
    UNSHARDED = "unsharded"  # parameters are views of full flat parameters
    SAVING = "saving"  # parameters are full tensors from elsewhere, while this rank saves the model alone
    KEPT = "kept"  # as UNSHARDED, but nobody uses it now: it waits for a use that is near, and may be resharded before


class ShardUnit:
    """Parameters that are gathered and reduced together, around one module.

    SHARDED -> unshard() -> UNSHARDING -> wait_for_unshard() -> UNSHARDED -> reshard() -> SHARDED
    UNSHARDED -> keep() -> KEPT -> use_again() -> UNSHARDED, or KEPT -> reshard() -> SHARDED

    Invariants:
      - No unsharded memory exists in SHARDED. A unit that is not `on_demand` is UNSHARDED for ever.
      - All ranks call unshard in the same order: collectives match by order.
    """

    def __init__(self, name: str, kind: UnitKind, module: nn.Module, flats: list[FlatParam]) -> None:
        self.name = name
        self.kind = kind
        self.module = module
        self.flats = flats
        self.on_demand = any(flat.on_demand for flat in flats)
        self.state = UnitState.UNSHARDED
        self.is_exact = True  # the unsharded values are those of the shards
        self._gathers: list[Pending] = []
        self._measure()

    def _measure(self) -> None:
        self.numel = sum(flat.layout.padded_numel for flat in self.flats)
        self.full_bytes = sum(flat.full_bytes for flat in self.flats)

    def replace(self, old: FlatParam, new: list[FlatParam]) -> None:
        """Replace `old` by flat parameters with the same parameters, in the state of the unit."""
        on_values = old.on_values
        for flat, watch in ((old, None), *((flat, on_values) for flat in new)):
            flat.watch_values(watch)
        place = self.flats.index(old)
        self.flats[place : place + 1] = new
        self._measure()

    @property
    def is_offloaded(self) -> bool:
        """Whether a gather waits for more than the other ranks: a copy from the host, a read, an update there.

        The same on all ranks.
        """
        return any(flat.is_offloaded for flat in self.flats)

    def prefetch(self) -> None:
        """Start bringing the shards near where they are on a slow medium. No communication."""
        for flat in self.flats:
            flat.prefetch()

    def unshard(self, *, may_quantize: bool = False) -> None:
        """Start to unshard the parameters. All ranks must call, in the same order.

        `may_quantize`: for a forward or a backward, which Comm.quantize may give the weights of 8-bit messages.
        """
        self._expect(UnitState.SHARDED)
        self._gathers = _start_gathers(self.name, self.flats, may_quantize=may_quantize)
        self.state = UnitState.UNSHARDING
        self.is_exact = not may_quantize or "weights" not in self.flats[0].comm.quantizes

    def make_exact(self) -> None:
        """Gather an UNSHARDED unit again, in place, after a gather that was quantized. All ranks must call."""
        self._expect(UnitState.UNSHARDED)
        gather(self.flats)
        self.is_exact = True

    def join_gather(self) -> None:
        """Give this rank's shards to a gather that other ranks need for a forward or a backward, and drop what comes.
        All ranks must call this or `unshard`."""
        for pending in _start_gathers(self.name, self.flats, drops=True, may_quantize=True):
            pending.wait()
        for flat in self.flats:
            flat.end_gather()

    def wait_for_unshard(self) -> None:
        self._expect(UnitState.UNSHARDING)
        for pending in self._gathers:
            pending.wait()
        self._gathers.clear()
        for flat in self.flats:
            flat.use_gathered()
        self.state = UnitState.UNSHARDED

    def keep(self) -> None:
        """Nobody uses the unit any more; it stays unsharded for a use to come."""
        self._expect(UnitState.UNSHARDED)
        self.state = UnitState.KEPT

    def use_again(self) -> None:
        self._expect(UnitState.KEPT)
        self.state = UnitState.UNSHARDED

    def reshard(self) -> None:
        if self.state is not UnitState.KEPT:
            self._expect(UnitState.UNSHARDED)
        for flat in self.flats:
            flat.reshard()
        self.state, self.is_exact = UnitState.SHARDED, True

    @contextlib.contextmanager
    def saving_from(self, whole: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Point parameters at `whole`, by their ids, inside the block. No communication; any rank may enter."""
        before, self.state = self.state, UnitState.SAVING
        try:
            for flat in self.flats:
                flat.point_at(whole)
            yield
        finally:
            for flat in self.flats:
                flat.point_back()
            self.state = before

    def forget(self) -> None:
        """A pass was broken off, and its connections are closed: back to SHARDED, whatever the state."""
        self._gathers.clear()
        for flat in self.flats:
            flat.drop_gather()
            flat.reshard()
        self.state, self.is_exact = UnitState.SHARDED, True

    def _expect(self, state: UnitState) -> None:
        if self.state is not state:
            raise AssertionError(f"unit {self.name} is {self.state.value}, expected {state.value}")


def _start_gathers(
    name: str, flats: Sequence[FlatParam], *, drops: bool = False, may_quantize: bool = False
) -> list[Pending]:
    """Start an all-gather per bucket, all of them as one operation where the backend can.

    All ranks must call, in the same order.

    Args:
        drops: This rank does not use what comes.
        may_quantize: See ShardUnit.unshard.
    """
    gathers = []
    for flat in flats:
        if not drops:
            flat.allocate()
    # An operation waits for what is on the stream that starts it.
    from_host = next((flat for flat in flats if flat.on_demand and flat.is_offloaded), None)
    stream = contextlib.nullcontext() if from_host is None else from_host.on_copy_stream()
    with stream, flats[0].comm.coalesced(name, in_background=True):
        for flat in flats:
            full = torch.empty_like(flat.full) if drops else flat.full
            if flat.has_row:
                gathers += flat.gather_in_group(full, may_quantize=may_quantize)
                continue
            for bucket, part in zip(flat.buckets_of(full), flat.parts_on_device(full), strict=True):
                if flat.placement.broadcasts and not flat.on_demand:
                    gathers += _start_broadcasts(flat, bucket, part)
                else:
                    quantize = may_quantize and flat.on_demand
                    gathers.append(flat.comm.all_gather(bucket, part, flat.layout.name, may_quantize=quantize))
    return gathers


def _start_broadcasts(flat: FlatParam, bucket: torch.Tensor, part: torch.Tensor) -> list[Pending]:
    places = bucket.chunk(flat.comm.world_size)
    if places[flat.rank].data_ptr() != part.data_ptr():
        places[flat.rank].copy_(part)
    return [flat.comm.broadcast_start(place, flat.layout.name, src=owner) for owner, place in enumerate(places)]


def gather(flats: Sequence[FlatParam]) -> None:
    """Unshard flat parameters alone, not their units, or bring them up to date where they stay unsharded.

    All ranks must call.
    """
    gathers = []
    for flat in flats:
        flat.finish_update()  # the gather of one runs beside the update of the next
        if flat.on_demand or flat.layout.world_size > 1:
            gathers += _start_gathers(flat.layout.name, [flat])
    for pending in gathers:
        pending.wait()
    for flat in flats:
        flat.use_gathered()


def gather_resident(flats: Sequence[FlatParam]) -> None:
    """Bring parameters that stay unsharded up to date from their owners, whose shards have changed.

    Others are told that theirs have. All ranks must call.
    """
    for flat in flats:
        flat.shard_changed()
    gather([flat for flat in flats if not flat.on_demand])
