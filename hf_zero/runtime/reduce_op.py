"""Sums one bucket of gradients over ranks: by which primitive, and when it is divided.

[Note: Constant-size buffers]
A reduce may need copies of what it moves: in the type that travels, or, on gloo, of what the other ranks sent. Where
that is so, an accumulator has at most MAX_BUCKETS_IN_FLIGHT buckets under way, and a fixed number of them reduce at a
time. So the copies are bounded by `reduce_bucket_size`, whatever the size of the model (Rajbhandari et al. 2020,
ZeRO, section 6.2). On devices that is so where the configuration has a number: [Note: Whole units] in unit_specs.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.work import Pending

MAX_BUCKETS_IN_FLIGHT = 8


@dataclass(frozen=True)
class Reduction:
    """The keys that say how a sum over ranks is taken. What comes out is the sum, whatever was divided before it.

    Args:
        prescale: `prescale_gradients`: what this rank has is divided by the number of ranks before it travels.
        predivide: `gradient_predivide_factor`: or by this. Sums in 16-bit types may need either.
        averages: `gradient_allreduce_op` is "mean". Else the sum comes out times the number of ranks, so that who
            takes the mean of it gets the sum.
        scatters: `reduce_scatter`: a rank gets the sum of its own part; else of everything, and keeps its part.
    """

    prescale: bool = False
    predivide: float = 1.0
    averages: bool = True
    scatters: bool = True

    @classmethod
    def of(cls, config: ResolvedConfig) -> Reduction:
        return cls(
            prescale=config.prescale_gradients,
            predivide=config.gradient_predivide_factor,
            averages=config.gradient_allreduce_op == "mean",
            scatters=config.zero.reduce_scatter,
        )

    @staticmethod
    def buckets_in_flight(comm: Comm, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> int | None:
        """Most buckets of `dtype` under way; None for no limit. See [Note: Constant-size buffers]."""
        makes_copies = comm.backend == "gloo" or wire_dtype not in (None, dtype)
        return MAX_BUCKETS_IN_FLIGHT if makes_copies else None

    def parts(
        self, comm: Comm, out: torch.Tensor, full: torch.Tensor, what: str, *, wire_dtype: torch.dtype | None
    ) -> Pending:
        """Start a reduce-scatter: this rank's part of the sum of `full` goes to `out`. `full` is changed."""
        after = self._divide(comm, full)
        if self.scatters:
            pending = comm.reduce_scatter(out, full, what, wire_dtype=wire_dtype, may_quantize=True)
            return _finished(pending, out, out, after)
        part = full.chunk(comm.world_size)[comm.rank]
        return _finished(comm.all_reduce(full, what, wire_dtype=wire_dtype), part, out, after)

    @property
    def divides(self) -> bool:
        """Whether something is divided before the sum."""
        return self.prescale or self.predivide != 1.0

    def everything(self, comm: Comm, full: torch.Tensor, what: str, *, wire_dtype: torch.dtype | None) -> Pending:
        """Start an all-reduce: `full` becomes the sum.

        In a type narrower than `full`'s the addends travel only: they are summed in `full`'s type where backends can
        do that, as in `parts`, and the sum travels in it. An all-reduce rounds sums in the narrow type, or overflows.
        """
        after = self._divide(comm, full)
        if self.scatters and comm.world_size > 1 and wire_dtype is not None and wire_dtype.itemsize < full.itemsize:
            return _SummedApart(comm, full, what, wire_dtype, after)
        return _finished(comm.all_reduce(full, what, wire_dtype=wire_dtype), full, full, after)

    def _divide(self, comm: Comm, full: torch.Tensor) -> float:
        """Divide before the sum; return what to multiply the sum with."""
        if not self.averages:
            return float(comm.world_size)
        divisor = float(comm.world_size) if self.prescale else self.predivide
        if divisor != 1.0:
            full.mul_(1 / divisor)
        return divisor


def _finished(pending: Pending, source: torch.Tensor, out: torch.Tensor, factor: float) -> Pending:
    same_place = source.data_ptr() == out.data_ptr()
    return pending if same_place and factor == 1.0 else _Then(pending, source, out, factor)


class _Then:
    """A collective after which `out` is `factor` times `source`. `wait` may be called again."""

    def __init__(self, pending: Pending, source: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        self._pending: Pending | None = pending
        self._source = source
        self._out = out
        self._factor = factor

    def wait(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        torch.mul(self._source, self._factor, out=self._out)


class _SummedApart:
    """An all-reduce as a reduce-scatter of addends in `wire_dtype` and an all-gather of sums in `full`'s type.

    `full` becomes `factor` times the sum. All ranks must call `wait` at the same place among their collectives.
    """

    def __init__(self, comm: Comm, full: torch.Tensor, what: str, wire_dtype: torch.dtype, factor: float) -> None:
        self._comm = comm
        self._full = full
        self._what = what
        self._factor = factor
        part_numel = -(-full.numel() // comm.world_size)
        wire = torch.zeros(part_numel * comm.world_size, dtype=wire_dtype, device=full.device)
        wire[: full.numel()].copy_(full)
        self._part = full.new_empty(part_numel)
        self._pending: Pending | None = comm.reduce_scatter(self._part, wire, what)

    def wait(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        whole = self._full.new_empty(self._part.numel() * self._comm.world_size)
        self._comm.all_gather(whole, self._part, self._what).wait()
        torch.mul(whole[: self._full.numel()], self._factor, out=self._full)
