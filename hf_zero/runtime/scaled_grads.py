"""Gradients of 8 bits with a scale for each parameter, and their reduce (FP8-LM, Peng et al. 2023, section 2.1).

[Note: Sums of 8-bit gradients]
A gradient is rounded once as it arrives, and once more where a micro-batch adds to it. Ranks exchange 8-bit elements
and the largest value of each parameter by one all-to-all. A rank decodes its part of what every rank sends, sums in
fp32, in rank order, and rounds the mean once. Its scale follows from the mean of the largest values, an upper bound
that every rank knows: so it is the same on all ranks and at all stages. Nothing is summed in 8 bits. At stage 0 an
all-gather of the rounded parts follows, so that all ranks have the same bits.

An overflow stays one: an infinite gradient becomes NaN, which no sum loses, and the norm of the step shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hf_zero.distributed.work import Pending
from hf_zero.errors import ConfigError
from hf_zero.fp8.scaled_casts import Segments, amaxes, cast, scales_for, uncast
from hf_zero.layout import UnitLayout
from hf_zero.runtime.grad_accumulator import GradAccumulator, dense
from hf_zero.runtime.unreduced_grads import UnreducedGrads
from hf_zero.sharding.scaled_shard import ScaledShard

GRAD_TYPE = torch.float8_e4m3fn  # of weight gradients, as in MS-AMP


class ScaledGradAccumulator(GradAccumulator):
    """The gradient of one flat parameter in 8 bits: see GradAccumulator, and [Note: Sums of 8-bit gradients]."""

    shard: ScaledShard  # type: ignore[assignment]

    def _make_memory(self, eager: bool) -> tuple[UnreducedGrads | None, ScaledShard]:  # type: ignore[override]
        layout, device = self.flat.layout, self.flat.full.device
        self._alone = [Segments([(0, slot.numel)]) for slot in layout.slots]
        self._amaxes = torch.zeros(len(layout.slots), device=device)  # of what is in `unreduced`
        self._pending: Pending | None = None
        self._sent = self._received = torch.empty(0, dtype=torch.uint8, device=device)
        shard = ScaledShard(layout, self.flat.rank, device, GRAD_TYPE)
        self._is_sharded = layout.world_size == self._comm.world_size
        self._part_numel = -(-layout.padded_numel // self._comm.world_size)
        self._part = shard.segments if self._is_sharded else _cut(layout, self._part_numel, self._comm.rank)
        return None, shard

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type of the memory in which gradients accumulate."""
        return GRAD_TYPE

    # ---------------------------------------------------------------- arrival
    def take(self, grads: Mapping[int, torch.Tensor]) -> None:
        """See ArrivingGrads.take."""
        self._loss_scale.check(self.flat.layout.slots, grads)
        unreduced = self.unreduced or self._begin()
        for index, grad in grads.items():
            self._round(index, dense(grad).reshape(-1).contiguous(), unreduced.of_param[index].view(-1))
        self._written.update(grads)
        self.seen.update(grads)

    def _round(self, index: int, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Add `values` to what has come before, and keep the sum in 8 bits with the scale of its largest value."""
        whole, amax = self._alone[index], self._amaxes[index : index + 1]
        if index in self._written:
            values = values.float()
            uncast(stored, values, whole, scales_for(amax, GRAD_TYPE), add=True)
        amax.copy_(amaxes(values, whole))
        cast(values, stored, whole, scales_for(amax, GRAD_TYPE))

    def _fresh_unreduced(self) -> UnreducedGrads:
        self._amaxes.zero_()
        return super()._fresh_unreduced()

    # ---------------------------------------------------------------- reduce
    def reduce_start(self, *, is_last: bool = True) -> None:
        """See GradAccumulator.reduce_start."""
        parts = self._parts_of(self._begin_reduce().memory.view(torch.uint8))
        mine = self._amaxes.view(torch.uint8)
        self._sent = torch.cat([piece for part in parts for piece in (*part, mine)])
        self._received = torch.empty_like(self._sent)
        self._pending = self._comm.all_to_all(self._received, self._sent, self.flat.layout.name)

    def _parts_of(self, memory: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        """The pieces of each rank's part of the bytes of an unsharded gradient, in rank order."""
        ranks = range(self._comm.world_size)
        if self._is_sharded:
            buckets = [memory[at : at + numel].chunk(len(ranks)) for at, numel in self.flat.layout.buckets()]
            return [[bucket[rank] for bucket in buckets] for rank in ranks]
        missing = len(ranks) * self._part_numel - memory.numel()
        return [[part] for part in torch.nn.functional.pad(memory, (0, missing)).chunk(len(ranks))]

    def _finish_reduces(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        world_size = self._comm.world_size
        by_rank = self._received.view(world_size, -1)
        largest = by_rank[:, self._part_numel :].contiguous().view(torch.float32)  # [world size, parameters]
        mean = torch.zeros(self._part_numel, device=self._received.device)
        for part, theirs in zip(by_rank[:, : self._part_numel].view(GRAD_TYPE), largest, strict=True):
            uncast(part, mean, self._part, scales_for(theirs, GRAD_TYPE), add=True)
        self._keep(mean.mul_(1 / world_size), largest.sum(0) / world_size)
        self._pending = None
        self._sent = self._received = self._received.new_empty(0)

    def _keep(self, mean: torch.Tensor, bounds: torch.Tensor) -> None:
        """Round this rank's part of the mean over ranks, fp32; no parameter has a value above its bound."""
        factor = self._scale * self._comm.world_size * (1 if self._reduction.averages else self._comm.world_size)
        if self._adds:  # two parts of a sum have one scale
            earlier = self._own_part(self.shard.memory)
            uncast(earlier, mean.mul_(factor)[: earlier.numel()], self._part, self.shard.scales, add=True)
            bounds = bounds * factor + self.shard.amaxes
        if self._is_sharded:
            self.shard.encode_all(mean, bounds)
        else:
            self.shard.set_stored(self._gathered(mean, bounds), bounds)
        if not self._adds:
            self.shard.scale(factor)

    def _own_part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self._is_sharded else whole[self._comm.rank * self._part_numel :][: self._part_numel]

    def _gathered(self, mean: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Round this rank's part and gather those of all ranks, 8 bits, 1-D. All ranks must call."""
        mine = torch.empty_like(mean, dtype=GRAD_TYPE)
        cast(mean, mine, self._part, scales_for(bounds, GRAD_TYPE))
        whole = torch.empty(self._comm.world_size * mine.numel(), dtype=torch.uint8, device=mine.device)
        self._comm.all_gather(whole, mine.view(torch.uint8), self.flat.layout.name).wait()
        return whole[: self.flat.layout.padded_numel].view(GRAD_TYPE)

    def forget_reduce(self) -> None:
        """Forget a reduce that was broken off, and whose connections are closed."""
        self._pending = None
        super().forget_reduce()

    def stay_local(self, local: bool) -> None:
        """See GradAccumulator.stay_local, which 8-bit gradients do not do."""
        if local:
            raise ConfigError("OneBitAdam exchanges gradients in one bit, and msamp in eight: use one of them.")

    # ---------------------------------------------------------------- what the shard holds
    def unsharded_mean(self) -> None:
        """Return None: `parameter.grad` shows no 8-bit values."""


def _cut(layout: UnitLayout, numel: int, rank: int) -> Segments:
    """The parameters in the `rank`-th part of `numel` elements of a flat parameter that is not sharded."""
    start = rank * numel
    return Segments([(_within(slot.offset - start, numel), _within(slot.end - start, numel)) for slot in layout.slots])


def _within(place: int, numel: int) -> int:
    return min(max(place, 0), numel)
