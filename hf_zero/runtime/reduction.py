"""How one bucket of gradients is summed over ranks: by which primitive, and when it is divided.

[Note: Constant-size buffers]
A reduce may need copies of what it moves: in the type that travels, or, on gloo, of what the other ranks sent. Where
that is so, a gradient buffer has at most MAX_BUCKETS_IN_FLIGHT buckets under way, and the reducer has a fixed number
of gradient buffers. So the copies are bounded by `reduce_bucket_size`, whatever the size of the model (Rajbhandari et
al. 2020, ZeRO, section 6.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.comm import Comm
from hf_zero.config import ResolvedConfig
from hf_zero.pending import Pending

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
            prescale=config.settings["prescale_gradients"],
            predivide=config.settings["gradient_predivide_factor"],
            averages=config.settings["gradient_allreduce_op"] == "mean",
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
        """As Comm.reduce_scatter: this rank's part of the sum of `full` goes to `out`. `full` is changed."""
        after = self._divide(comm, full)
        if self.scatters:
            return _finished(comm.reduce_scatter(out, full, what, wire_dtype=wire_dtype), out, out, after)
        part = full.chunk(comm.world_size)[comm.rank]
        return _finished(comm.all_reduce(full, what, wire_dtype=wire_dtype), part, out, after)

    def everything(self, comm: Comm, full: torch.Tensor, what: str, *, wire_dtype: torch.dtype | None) -> Pending:
        """As Comm.all_reduce: `full` becomes the sum."""
        after = self._divide(comm, full)
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
