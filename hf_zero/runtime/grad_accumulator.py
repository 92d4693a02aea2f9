"""Accumulates the gradients of one flat parameter until the step. reduce_schedule.py says when they are reduced."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.distributed.work import Pending
from hf_zero.layout import Slice
from hf_zero.runtime.arriving_grads import ArrivingGrads
from hf_zero.runtime.group_sums import GroupSums
from hf_zero.runtime.loss_scale import LossScale
from hf_zero.runtime.reduce_op import Reduction
from hf_zero.runtime.unreduced_grads import UnreducedGrads, UnreducedPool
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.placement import master_dtype_of
from hf_zero.sharding.shard import MemoryShard, ShardTensor
from hf_zero.storage import HostStore

_DENSE = {torch.strided}


@dataclass(frozen=True)
class GradSettings:
    """The types in which gradients are summed."""

    accum_dtype: torch.dtype | None  # None: that of masters
    wire_dtype: torch.dtype | None  # `communication_data_type`; None: the accumulation type
    as_params: bool = False  # see master_dtype_of

    def accumulation_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """Return the type in which the gradients of parameters of a type accumulate."""
        return self.accum_dtype or master_dtype_of(param_dtype, as_params=self.as_params)


class GradState(enum.Enum):
    """The part of the accumulation window that a GradAccumulator has.

    Late gradients (a second backward before the step, a shared module under reentrant checkpointing) change no state:
    they wait in `unreduced` while the state is REDUCING or REDUCED, and the next reduce adds them.
    """

    EMPTY = enum.auto()  # nothing
    ACCUMULATING = enum.auto()  # gradients in `unreduced` only
    SUMMED = enum.auto()  # the group's sums so far in `_sums`; see group_sums.py
    REDUCING = enum.auto()  # a reduce is under way: it fills `shard` or `_sums`, or adds to it
    REDUCED = enum.auto()  # `shard` holds what the reduces so far have given


@dataclass(slots=True)
class _PartUnderWay:
    """The reduce of one bucket, and where it goes."""

    pending: Pending | None
    result: torch.Tensor  # what the reduce gives, on the device
    mine: torch.Tensor  # this rank's part of the shard
    earlier: torch.Tensor | None  # on the device, where `mine` is on the host: what earlier reduces left there
    brought: torch.Event | None  # `earlier` has come


class GradAccumulator(ArrivingGrads):
    """The gradient of one flat parameter: `unreduced` while it arrives, `shard` once it is reduced. See GradState.

    Invariants: after the reduces of a window `shard` is the plain mean over ranks of the sum over micro-steps, each
    scaled (with `gradient_allreduce_op` "sum" their sum); padding is zero.
    """

    unreduced: UnreducedGrads | None  # what has arrived here since the last reduce started
    shard: ShardTensor  # accumulation type; on the host if the update is there, else this rank's parts of `_resident`

    def __init__(
        self,
        flat: FlatParam,
        comm: Comm,
        pool: UnreducedPool,
        settings: GradSettings,
        host: HostStore,
        loss_scale: LossScale,
        *,
        unit: str,
        eager: bool,
        reduction: Reduction,
        allow_unused: bool = True,
    ) -> None:
        """`loss_scale`: what losses were multiplied with; shards are free of it.

        `unit`: its name, see GradReducer.
        `allow_unused`: a parameter may be without gradient on all ranks in an accumulation window.
        """
        super().__init__(flat.params)
        self.flat = flat
        self.unit = unit
        self.eager = eager
        self.allow_unused = allow_unused
        # The rules of its reduces
        self.dtype = settings.accumulation_dtype(flat.dtype)
        self._comm = comm
        self._reduction = reduction
        self._wire = settings.wire_dtype
        self._max_under_way = reduction.buckets_in_flight(comm, self.dtype, self._wire)
        self._mean = 1.0  # see use_scale
        self._loss_scale = loss_scale
        self._stays_local = False  # gradients are not summed over ranks: the optimizer exchanges something smaller
        # The gradients that arrive
        self.unreduced = None
        self.seen: set[int] = set()  # parameters that had a gradient on this rank in this window
        self._written: set[int] = set()  # those that have a value in `unreduced`
        self._free_list = pool.free_list(flat.layout, self.stored_dtype)
        # The reduce under way
        self._state = GradState.EMPTY
        self._under_way: list[_PartUnderWay] = []
        self._reducing: UnreducedGrads | None = None  # what the reduce under way reads
        self._adds = False  # the reduce under way adds to what an earlier one of this window has left
        self.num_reduces = 0  # so far
        self._sums = GroupSums.of(comm, flat.layout, self.dtype) if eager and not reduction.divides else None
        # The copy to the host, where the update is
        self.on_host = not comm.computes_on_host and not flat.placement.master.is_on_device
        if self.on_host and flat.layout.world_size != comm.num_shards:
            raise AssertionError(f"{flat.layout.name} is offloaded, not sharded: its reduce has no memory of its own")
        self._host = host
        self._on_its_way: torch.Event | None = None  # the last copy to the host
        self._sources: list[torch.Tensor] = []  # of copies to the host, by the reduce under way
        # L2 norms of the shard's parts, 0-dim on the device, where the shard is on the host and nobody has changed it.
        self._norms: list[torch.Tensor] | None = None
        # The memory of the shard, and the update that reads it
        self._memories = 0
        self._resident, self.shard = self._make_memory(eager)
        self._spare: tuple[UnreducedGrads | None, ShardTensor] | None = None
        self._reader: Pending | None = None  # an update that still reads `shard`
        self._mean_views: list[torch.Tensor] = []  # see unsharded_mean

    def _make_memory(self, eager: bool) -> tuple[UnreducedGrads | None, ShardTensor]:
        """Return (the unsharded gradient that stays between micro-steps or None, the shard)."""
        layout, rank, device = self.flat.layout, self.flat.rank, self.flat.full.device
        resident = None
        if not eager:
            resident = UnreducedGrads(layout, torch.zeros(layout.padded_numel, dtype=self.dtype, device=device))
        self._memories += 1
        if self.on_host:
            return resident, MemoryShard(layout, rank, self._host, f"grad/{self._memories}", self.dtype)
        if resident is not None:
            return resident, ShardTensor(layout, rank, resident.memory, in_full=True)
        memory = torch.zeros(layout.shard_numel, dtype=self.dtype, device=device)
        return None, ShardTensor(layout, rank, memory, in_full=False)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type of the memory in which gradients accumulate."""
        return self.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of what is kept between micro-steps and steps, on every medium."""
        return self.shard.nbytes + (0 if self._sums is None else self._sums.nbytes)

    @property
    def resident_bytes(self) -> int:
        """The bytes of an unsharded gradient that stays for the run, where the shard is no part of it."""
        if self._resident is None or self.shard.in_full:
            return 0
        return self._resident.memory.nbytes

    # ---------------------------------------------------------------- an update reads the shard
    def lend(self, reader: Pending, *, swap: bool) -> tuple[ShardTensor, torch.Event | None]:
        """The shard, for an update that reads it until `reader` is over, and what to wait for before it is read.

        Args:
            swap: The next window gets memory of its own and does not wait for the reader.
        """
        lent, event = self.shard, self._on_its_way
        if not swap:
            self._reader = reader
            return lent, event
        spare = self._spare or self._make_memory(self.eager)
        self._spare = (self._resident, lent)
        self._resident, self.shard = spare
        self._on_its_way, self._norms = None, None
        return lent, event

    def wait_for_copies(self) -> None:
        """Return when what has been reduced has reached the host, and the host may write there."""
        if self._on_its_way is not None:
            self._on_its_way.synchronize()
            self._on_its_way = None

    def join_copies(self) -> None:
        """Let the compute stream wait for copies of gradients and parameters: the host is about to read `norms`."""
        stream = torch.accelerator.current_stream(self.flat.full.device)
        if self._norms is None:
            self.wait_for_copies()
        elif self._on_its_way is not None:
            self._on_its_way.wait(stream)
            self._on_its_way = None
        for shard in self.flat.owned().values():
            if shard.in_memory is not None:
                shard.in_memory.join_copies(stream)

    def _reclaim(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            reader.wait()

    # ---------------------------------------------------------------- arrival
    def take(self, grads: Mapping[int, torch.Tensor]) -> None:
        """See ArrivingGrads.take."""
        self._loss_scale.check(self.flat.layout.slots, grads)
        place_of = (self.unreduced or self._begin()).of_param.__getitem__
        if torch.is_grad_enabled() or {grad.layout for grad in grads.values()} != _DENSE:
            grads = {index: dense(grad) for index, grad in grads.items()}
        if self._written.isdisjoint(grads):
            torch._foreach_copy_(list(map(place_of, grads)), list(grads.values()))
        else:
            self._add(grads, place_of)
        self._written.update(grads)
        self.seen.update(grads)

    def _add(self, grads: Mapping[int, torch.Tensor], place_of: Callable[[int], torch.Tensor]) -> None:
        """Add those that another one of their parameter has come before; copy the others."""
        for op, chosen in (
            (torch._foreach_add_, grads.keys() & self._written),
            (torch._foreach_copy_, grads.keys() - self._written),
        ):
            if chosen:
                op(list(map(place_of, chosen)), [grads[index] for index in chosen])

    def _begin(self) -> UnreducedGrads:
        """The first gradient since the last reduce, or since the window began, is there."""
        self.unreduced = self._fresh_unreduced()
        if self._state is GradState.EMPTY:
            self._state = GradState.ACCUMULATING
        return self.unreduced

    def _fresh_unreduced(self) -> UnreducedGrads:
        if self._resident is not None and self._state is GradState.EMPTY:
            self._reclaim()
            return self._resident
        unreduced = self._free_list.acquire()
        for gap in unreduced.gaps:  # they travel too: they must be finite, and zero
            gap.zero_()
        return unreduced

    @property
    def has_late_gradients(self) -> bool:
        """Whether something has arrived that no reduce has taken."""
        return bool(self._written)

    def use_scale(self, scale: float) -> None:
        """Multiply gradients by `scale`, 1 / (world size x accumulation steps), from the next accumulation window on.

        The sum over ranks and micro-steps becomes the mean.
        """
        self._mean = scale

    @property
    def is_empty(self) -> bool:
        """Whether nothing of a window is here."""
        return self._state is GradState.EMPTY

    # ---------------------------------------------------------------- reduce
    def reduce_start(self, *, is_last: bool = True) -> None:
        """Start the reduce of what has arrived. All ranks must call, in the same order.

        `is_last`: False where another one will follow in this window, so that it may stay inside the group.
        """
        if self._sums is not None and not is_last and not self.is_reduced:
            self._reduce_in_group(self._sums)
            return
        unreduced = self._begin_reduce()
        if self._sums is not None:
            self._sums.is_filling = False
            self._sums.add_to(unreduced.buckets)
        layout = self.flat.layout
        pending: Pending | None
        brings_back = self._adds and self.on_host
        for bucket, mine in zip(unreduced.buckets, self.shard.parts, strict=True):
            if len(self._under_way) == self._max_under_way:
                self._finish_oldest()
            earlier, brought = self._bring_back(mine, bucket.device) if brings_back else (None, None)
            if layout.world_size == self._comm.num_shards:
                in_place = not self._adds and not self.on_host
                result = mine if in_place else torch.empty_like(mine, device=bucket.device)
                pending = self._reduction.parts(self._comm, result, bucket, layout.name, wire_dtype=self._wire)
            elif self._stays_local:
                result, pending = bucket, None
            else:
                result = bucket
                pending = self._reduction.everything(self._comm, bucket, layout.name, wire_dtype=self._wire)
            self._under_way.append(_PartUnderWay(pending, result, mine, earlier, brought))

    def _reduce_in_group(self, sums: GroupSums) -> None:
        """Start a reduce that is not the last. See [Note: Sums of a group] in group_sums.py."""
        unreduced = self._begin_reduce()
        sums.is_filling = True
        for bucket, mine in zip(unreduced.buckets, sums.parts(), strict=True):
            if len(self._under_way) == self._max_under_way:
                self._finish_oldest()
            result = torch.empty_like(mine) if sums.is_filled else mine
            name = self.flat.layout.name
            pending = self._comm.reduce_scatter_in_group(result, bucket, name, wire_dtype=self._wire)
            self._under_way.append(_PartUnderWay(pending, result, mine, None, None))

    @property
    def awaits_groups(self) -> bool:
        """Whether its last reduce has stayed inside the group, so that it needs another one. The same on all ranks."""
        return self._sums is not None and self._sums.is_filled

    def _begin_reduce(self) -> UnreducedGrads:
        """Return what has arrived, with zeros for what has not; what arrives from now on waits for the next reduce."""
        self.take_waiting()
        unreduced = self.unreduced or self._fresh_unreduced()
        if len(self._written) < len(unreduced.of_param):
            for index, grad in enumerate(unreduced.of_param):
                if index not in self._written:
                    grad.zero_()
        self._written.clear()
        if self._reader is not None:
            self._reclaim()
        self.num_reduces += 1
        self._reducing, self.unreduced = unreduced, None
        self._adds = self.is_reduced
        self._norms = [] if self.on_host else None
        self._state = GradState.REDUCING
        return unreduced

    def _bring_back(self, mine: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Event | None]:
        """Start to copy a part that is on the host to the device, which adds what a further reduce gives."""
        earlier = torch.empty_like(mine, device=device)
        return earlier, self.flat.placement.copies.upload(earlier, mine, after=self._on_its_way)

    @property
    def _scale(self) -> float:
        scale = self._mean / self._loss_scale.value
        return scale * self._comm.world_size if self._stays_local else scale

    def stay_local(self, local: bool) -> None:
        """Let each rank keep the mean of its own micro-steps from the next window on; stage 0 only."""
        self._stays_local = local

    def reduce_finish(self) -> None:
        self._finish_reduces()
        if self._state is GradState.REDUCING:
            self._state = GradState.REDUCED
            if self._sums is not None and self._sums.is_filling:
                self._state, self._sums.is_filled = GradState.SUMMED, True
            if self._sources:
                self.flat.placement.copies.hold(self._sources, self._on_its_way)
                self._sources = []
            self._give_back_reducing()

    def _finish_reduces(self) -> None:
        """Let the reduces that are under way be over, and what they give be in the shard."""
        while self._under_way:
            self._finish_oldest()

    def _give_back_reducing(self) -> None:
        if self._reducing is not None and self._reducing is not self._resident:
            self._free_list.release(self._reducing)
        self._reducing = None

    def _finish_oldest(self) -> None:
        part = self._under_way.pop(0)
        if part.pending is not None:
            part.pending.wait()
        scale = self._scale
        if self._sums is not None and self._sums.is_filling:
            if part.result.data_ptr() != part.mine.data_ptr():
                part.mine.add_(part.result)
        elif self.on_host:
            self._send_to_host(part, scale)
        elif part.result.data_ptr() != part.mine.data_ptr():
            part.mine.add_(part.result, alpha=scale)
        elif scale != 1.0:
            part.mine.mul_(scale)

    def _send_to_host(self, part: _PartUnderWay, scale: float) -> None:
        """Start to move a reduced part to the host, added to what it has there; the norm is taken before."""
        if part.earlier is None:
            total = part.result.mul_(scale)
        else:
            if part.brought is not None:
                part.brought.wait(torch.accelerator.current_stream(part.result.device))
            total = part.earlier.add_(part.result, alpha=scale)
        assert self._norms is not None
        if total.numel():
            self._norms.append(_norms([total])[0])
        self._on_its_way = self.flat.placement.copies.download(part.mine, total)
        self._sources.append(total)

    # ---------------------------------------------------------------- what the shard holds
    def norms(self) -> torch.Tensor:
        """L2 norms of the shard's parts, 1-D, at least fp32: on the device where they were taken there, or the shard
        is there. The sum of their squares is that of the shard: padding is zero."""
        if self._norms is not None:
            return torch.stack(self._norms) if self._norms else torch.empty(0, device="cpu")
        self.wait_for_copies()
        parts = [part for part in self.shard.parts if part.numel()]
        return torch.stack(_norms(parts)) if parts else torch.empty(0, device="cpu")

    def read_slice(self, slice_: Slice) -> torch.Tensor:
        """See Shard.read_slice."""
        self.wait_for_copies()
        return self.shard.read_slice(slice_)

    def write_slice(self, slice_: Slice, values: torch.Tensor) -> None:
        """See Shard.write_slice."""
        self._before_change()
        self.shard.write_slice(slice_, values)

    def scale(self, factor: float) -> None:
        """Multiply the shard by `factor`."""
        self._before_change()
        self.shard.scale(factor)

    def _before_change(self) -> None:
        """The host is about to write to the shard: what is on its way there comes first, and has another norm."""
        self.wait_for_copies()
        self._norms = None

    # ---------------------------------------------------------------- what a user does to it by hand
    @property
    def is_reduced(self) -> bool:
        """Whether something of this window has been reduced, so that the other ranks have a part of it."""
        return self._state is GradState.REDUCED or (self._state is GradState.REDUCING and self._adds)

    @property
    def comm_rank(self) -> int:
        return self._comm.rank

    def unsharded_mean(self) -> list[torch.Tensor] | None:
        """The mean gradient of every parameter, where this rank has all of it: views that do not count as written
        to when the accumulator itself is. None where it does not, or not yet."""
        not_here = self.flat.layout.world_size > 1 or self.on_host or self.flat.placement.native
        if not_here or self._stays_local or not self.is_reduced or self.unreduced is not None:
            return None
        if not self._mean_views:
            slots = self.flat.layout.slots
            self._mean_views = [self.shard.memory[one.offset : one.end].view(one.shape).data for one in slots]
        return self._mean_views

    def set_mean(self, index: int, grad: torch.Tensor) -> bool:
        """Set the mean gradient of a parameter; return False where this rank does not hold all of it."""
        if self.is_empty:
            self.drop_missing()
        mean = self.unsharded_mean()
        if mean is None:
            return False
        mean[index].copy_(grad.to_dense() if grad.layout != torch.strided else grad)
        self.seen.add(index)
        return True

    def drop_gradient(self, index: int) -> bool:
        """Forget the gradient of a parameter in this window; True if the mean over ranks was here already."""
        slot = self.flat.layout.slots[index]
        if self.unreduced is not None and index in self._written:
            self.unreduced.of_param[index].zero_()
            self._written.discard(index)
        self.seen.discard(index)
        if self._sums is not None and self._sums.is_filled:
            self._sums.drop(slot)
            return True
        if not self.is_reduced:
            return False
        if (slice_ := self.flat.slices.get(slot.name)) is not None:
            self.write_slice(slice_, torch.zeros(slice_.numel, dtype=self.dtype, device=self.flat.full.device))
        return True

    def clear(self) -> None:
        """Begin another window: the gradients of this one have been used, or are not wanted."""
        if self.unreduced is not None and self.unreduced is not self._resident:
            self._free_list.release(self.unreduced)
        self.unreduced = None
        self.drop_waiting()
        self.seen.clear()
        self._written.clear()
        self._norms = None
        self._drop_sums()
        self._state = GradState.EMPTY

    def forget_reduce(self) -> None:
        """Forget a reduce that was broken off, and whose connections are closed."""
        if self._under_way and self.on_host:
            self.flat.placement.copies.synchronize()  # they use memory that goes now
        self._under_way.clear()
        self._sources = []
        self._drop_sums()
        self._give_back_reducing()

    def _drop_sums(self) -> None:
        if self._sums is not None:
            self._sums.is_filled = False

    def drop_missing(self) -> None:
        """Let the gradient of the window be zero where none has reached this shard."""
        if not self.is_reduced:
            self._reclaim()
            self._before_change()  # copies of a window that was given up may be under way
            self.shard.zero()
            self._state = GradState.REDUCED


def dense(grad: torch.Tensor) -> torch.Tensor:
    """Return `grad` without a graph (create_graph=True makes one) and strided, which a sparse Embedding's is not."""
    if grad.requires_grad:
        grad = grad.detach()
    return grad if grad.layout is torch.strided else grad.to_dense()


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """L2 norms, 0-dim, in the tensors' type; of 16-bit types in fp32."""
    return list(torch._foreach_norm(tensors, 2, dtype=torch.promote_types(tensors[0].dtype, torch.float32)))
