"""When gradients are reduced, and where they accumulate until the step.

[Note: One reduce per unit and backward]
Every rank starts exactly one reduce per buffer in a backward (stages 2-3) or in the boundary's backward (stages 0-1),
with zeros where a parameter got none. Where nothing else communicates in backward, a reduce starts when the gradients
of its buffer, and of all before it in one fixed order, are there. Where units are gathered in backward, that moment
would come between other gathers on every rank, as the data decides; so there a unit's reduce starts when backward has
left the unit, and at the end of backward for what has no such moment. What arrives after a buffer's reduce has started
(a shared module under reentrant checkpointing, a second backward before the step) waits in memory of its own; the vote
of the step tells all ranks which buffers have such a rest, and they reduce it then.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_zero.comm import Comm, Pending
from hf_zero.shards.buffer import FlatBuffer
from hf_zero.shards.tensors import ShardTensor
from hf_zero.store import DeviceStore, HostStore

_MAX_IN_FLIGHT = 2


class MemoryPool:
    """Whole-gradient memory of buffers whose reduce is over, for the next buffer of the same size.

    On the CPU fresh memory costs page faults, more than the reduce of a small unit; CUDA's allocator pools by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = collections.defaultdict(list)
        self.live_bytes = 0
        self.peak_live_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        free = self._free[(numel, dtype)]
        tensor = free.pop() if free else torch.empty(numel, dtype=dtype, device=self._device)
        self.live_bytes += tensor.numel() * tensor.element_size()
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        return tensor

    def give(self, tensor: torch.Tensor) -> None:
        self.live_bytes -= tensor.numel() * tensor.element_size()
        free = self._free[(tensor.numel(), tensor.dtype)]
        if self._device.type == "cpu" and len(free) < _MAX_IN_FLIGHT:
            free.append(tensor)

    def clear(self) -> None:
        self._free.clear()


@dataclass(frozen=True)
class GradSettings:
    """How gradients are summed."""

    accum_dtype: torch.dtype | None  # None: fp32, fp64 for fp64 parameters
    wire_dtype: torch.dtype | None  # `communication_data_type`; None: the accumulation type
    scale: float  # 1 / (world size x accumulation steps): the sum over ranks and micro-steps becomes the mean


class GradBuffer:
    """The gradient of one flat buffer: `whole` while it arrives, `shard` once it is reduced.

    Invariants: after the reduces of a window `shard` is the plain mean over ranks of the sum over micro-steps, each
    scaled; padding is zero.
    """

    whole: torch.Tensor | None  # 1-D [padded_numel]: what has arrived here since the last reduce started
    shard: ShardTensor  # accumulation type; on the host if the update is there, else parts of a resident whole

    def __init__(
        self,
        flat: FlatBuffer,
        comm: Comm,
        pool: MemoryPool,
        settings: GradSettings,
        host: HostStore,
        *,
        eager: bool,
    ) -> None:
        self.flat = flat
        self.eager = eager
        self._comm = comm
        self._pool = pool
        self._scale = settings.scale
        self._wire = settings.wire_dtype
        if settings.accum_dtype is not None:
            self.dtype = settings.accum_dtype
        else:
            self.dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        self._host = host
        self._on_host = flat.full.device.type != "cpu" and not isinstance(flat.home.master, DeviceStore)
        self._memories = 0
        self._resident, self.shard = self._make_memory(eager)
        self._spare: tuple[torch.Tensor | None, ShardTensor] | None = None
        self._reader: Pending | None = None  # an update that still reads `shard`
        self._on_its_way: torch.Event | None = None  # the last copy to the host
        self.whole = None
        self.num_reduces = 0  # so far
        self.seen = [False] * len(flat.params)  # had a gradient on this rank in this window
        self._written = [False] * len(flat.params)  # has a value in `whole`
        self._arrived: set[int] = set()  # in this backward
        self._flight: list[tuple[Pending, torch.Tensor, torch.Tensor]] = []  # pending, its result, our part
        self._flying: torch.Tensor | None = None  # the whole that the reduce under way reads
        self._empty = True  # `shard` holds nothing of this window yet

    def _make_memory(self, eager: bool) -> tuple[torch.Tensor | None, ShardTensor]:
        """(the whole gradient that stays between micro-steps or None, the shard)"""
        layout, rank, device = self.flat.layout, self.flat.rank, self.flat.full.device
        resident = None if eager else torch.zeros(layout.padded_numel, dtype=self.dtype, device=device)
        self._memories += 1
        if self._on_host:
            key = f"{layout.name}/grad/{self._memories}"
            self._host.create(key, layout.shard_numel, self.dtype)
            return resident, ShardTensor(layout, rank, self._host.tensor(key), in_full=False)
        if resident is not None:
            return resident, ShardTensor(layout, rank, resident, in_full=True)
        memory = torch.zeros(layout.shard_numel, dtype=self.dtype, device=device)
        return None, ShardTensor(layout, rank, memory, in_full=False)

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
        self._on_its_way = None
        return lent, event

    def wait_for_copies(self) -> None:
        """Return when what has been reduced has reached the host."""
        if self._on_its_way is not None:
            self._on_its_way.synchronize()
            self._on_its_way = None

    def _reclaim(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            reader.wait()

    # ---------------------------------------------------------------- arrival
    def accumulate(self, index: int, grad: torch.Tensor) -> None:
        """Add the gradient of the buffer's parameter `index`."""
        if self.whole is None:
            self.whole = self._fresh_whole()
        slot = self.flat.layout.slots[index]
        place = self.whole[slot.offset : slot.end]
        grad = grad.detach()
        if grad.layout != torch.strided:  # an Embedding with sparse=True
            grad = grad.to_dense()
        if self._written[index]:
            place.view(slot.shape).add_(grad)
        else:
            place.view(slot.shape).copy_(grad)
            self._written[index] = True
        self.seen[index] = True
        self._arrived.add(index)

    def _fresh_whole(self) -> torch.Tensor:
        if self._resident is not None and self._empty and not self._flight:
            self._reclaim()
            return self._resident
        whole = self._pool.take(self.flat.layout.padded_numel, self.dtype)
        end = 0
        for slot in self.flat.layout.slots:  # the gaps between parameters travel too: they must be finite, and zero
            if slot.offset > end:
                whole[end : slot.offset].zero_()
            end = slot.end
        whole[end:].zero_()
        return whole

    @property
    def is_complete(self) -> bool:
        """Every parameter has had its gradient in this backward."""
        return len(self._arrived) == len(self.seen)

    @property
    def has_rest(self) -> bool:
        """Something has arrived that no reduce has taken."""
        return any(self._written)

    # ---------------------------------------------------------------- reduce
    def reduce_start(self) -> None:
        """Start the reduce of what has arrived. All ranks must call, in the same order."""
        if self.whole is None:
            self.whole = self._fresh_whole()
        for index, slot in enumerate(self.flat.layout.slots):
            if not self._written[index]:
                self.whole[slot.offset : slot.end].zero_()
        self._written = [False] * len(self._written)
        self._reclaim()
        layout = self.flat.layout
        self.num_reduces += 1
        self._flying, self.whole = self.whole, None
        for (start, numel), mine in zip(layout.buckets(), self.shard.parts, strict=True):
            bucket = self._flying[start : start + numel]
            if layout.world_size == self._comm.world_size:
                in_place = self._empty and mine.device == bucket.device
                result = mine if in_place else torch.empty_like(mine, device=bucket.device)
                pending = self._comm.reduce_scatter(result, bucket, layout.name, wire_dtype=self._wire)
            else:
                result = bucket
                pending = self._comm.all_reduce(bucket, layout.name, wire_dtype=self._wire)
            self._flight.append((pending, result, mine))

    def reduce_finish(self) -> None:
        for pending, result, mine in self._flight:
            pending.wait()
            if result.device != mine.device:
                self._copy_to_host(result, mine)
            elif result.data_ptr() != mine.data_ptr():
                mine.add_(result, alpha=self._scale)
            elif self._scale != 1.0:
                mine.mul_(self._scale)
        if self._flying is not None:
            self._empty = False
            if self._flying is not self._resident:
                self._pool.give(self._flying)
        self._flying = None
        self._flight.clear()

    def _copy_to_host(self, result: torch.Tensor, mine: torch.Tensor) -> None:
        """Move a reduced part from the compute device to the host, or add it to what is there."""
        result = result.mul_(self._scale)
        if self._empty:
            self._on_its_way = self.flat.home.copies.copy(mine, result)
        else:
            self.wait_for_copies()
            mine.add_(result.to(mine.device))

    def end_backward(self) -> None:
        self._arrived.clear()

    def clear(self) -> None:
        """The window is over: its gradients have been used, or are not wanted."""
        if self.whole is not None and self.whole is not self._resident:
            self._pool.give(self.whole)
        self.whole = None
        self.seen = [False] * len(self.seen)
        self._written = [False] * len(self._written)
        self._arrived.clear()
        self._empty = True

    def forget_reduce(self) -> None:
        """A reduce was broken off, and its connections are closed."""
        self._flight.clear()
        if self._flying is not None and self._flying is not self._resident:
            self._pool.give(self._flying)
        self._flying = None

    def drop_missing(self) -> None:
        """No gradient reached this shard in the window: it counts as zero."""
        if self._empty:
            self._reclaim()
            self.shard.zero()
            self._empty = False
        self.wait_for_copies()


class GradReducer:
    """Starts the reduces in the fixed order as early as it can. See [Note: One reduce per unit and backward]."""

    def __init__(
        self,
        buffers: list[GradBuffer],
        *,
        overlap: bool,
        on_arrival: bool,
        on_final: Callable[[GradBuffer], None] = lambda buffer: None,
    ) -> None:
        """`buffers` in the order of reduces, the same on all ranks.

        Args:
            overlap: False makes backward wait for each reduce.
            on_arrival: Start a reduce when its gradients are there; False if other collectives run in backward.
            on_final: Called in the last backward before the step when a buffer's reduce is over, so that its shard
                holds the gradient of the window unless more arrives late.
        """
        self.buffers = buffers
        self._on_final = on_final
        self._final: set[int] = set()  # ids of buffers whose reduce under way is the last of the window
        self._overlap = overlap
        self._on_arrival = on_arrival
        self._started: set[int] = set()  # ids of buffers whose reduce has started in this backward
        self._next = 0  # on arrival: the first buffer in the order whose reduce has not
        self._flying: collections.deque[GradBuffer] = collections.deque()
        self._reduced = False  # stages 0-1: the boundary's reduce of this window has been started everywhere
        self._any_arrival = False

    def arrived(self, buffer: GradBuffer, index: int, grad: torch.Tensor, *, boundary: bool) -> None:
        """A parameter's gradient is there. `boundary`: this backward is the last one before the step."""
        buffer.accumulate(index, grad)
        self._any_arrival = True
        if self._on_arrival and buffer.is_complete:
            while self._next < len(self.buffers) and self.buffers[self._next].is_complete:
                if not self._due(self.buffers[self._next], boundary):
                    return
                self._start(self.buffers[self._next], final=boundary)
                self._next += 1

    def unit_left(self, flats: Sequence[FlatBuffer], *, boundary: bool) -> None:
        """Backward has left a unit for good. All ranks must call, in the same order."""
        mine = {id(flat) for flat in flats}
        for buffer in self.buffers:
            if id(buffer.flat) in mine and id(buffer) not in self._started and self._due(buffer, boundary):
                self._start(buffer, final=boundary)

    def _due(self, buffer: GradBuffer, boundary: bool) -> bool:
        return buffer.eager or (boundary and not self._reduced)

    def end_backward(self, *, boundary: bool) -> None:
        """All gradients of this backward are there. All ranks must call."""
        if not self._any_arrival:
            return
        for buffer in self.buffers:
            if id(buffer) not in self._started and self._due(buffer, boundary):
                self._start(buffer, final=boundary)
        self._reduced = self._reduced or boundary
        self._finish()

    def settle(self) -> None:
        """Before the vote of a step: nothing is under way, and every buffer has had its reduce of this window."""
        self.end_backward(boundary=True)
        if not self._reduced:
            for buffer in self.buffers:
                if not buffer.eager:
                    self._start(buffer)
            self._reduced = True
            self._finish()

    def reduce_rests(self, which: list[bool]) -> None:
        """Reduce once more the buffers for which some rank has a rest."""
        for buffer, has_rest in zip(self.buffers, which, strict=True):
            if has_rest:
                self._start(buffer)
        self._finish()

    def clear(self) -> None:
        self._finish()
        self._reduced = False
        for buffer in self.buffers:
            buffer.clear()

    def forget(self) -> None:
        """A pass was broken off on all ranks, and its connections are closed: no gradient of its window remains."""
        self._flying.clear()
        self._final.clear()
        for buffer in self.buffers:
            buffer.forget_reduce()
        self.clear()

    def _start(self, buffer: GradBuffer, *, final: bool = False) -> None:
        if buffer in self._flying:
            self._flying.remove(buffer)
            self._over(buffer)
        while len(self._flying) >= _MAX_IN_FLIGHT:
            self._over(self._flying.popleft())
        buffer.reduce_start()
        self._started.add(id(buffer))
        if final:
            self._final.add(id(buffer))
        self._flying.append(buffer)
        if not self._overlap:
            self._over(self._flying.popleft())

    def _over(self, buffer: GradBuffer) -> None:
        buffer.reduce_finish()
        if id(buffer) in self._final:
            self._final.discard(id(buffer))
            self._on_final(buffer)

    def _finish(self) -> None:
        while self._flying:
            self._over(self._flying.popleft())
        self._started.clear()
        self._next = 0
        self._any_arrival = False
        for buffer in self.buffers:
            buffer.end_backward()
