"""How one bucket of gradients is summed over ranks: by which primitive, in which type, and when it is divided.

[Note: Constant-size buffers]
A reduce may need copies of what it moves: in the type that travels, or, on gloo, of what the other ranks sent. A
gradient buffer has at most MAX_BUCKETS_IN_FLIGHT buckets under way where that is so, and the reducer a fixed number of
gradient buffers. So the copies are bounded by `reduce_bucket_size`, whatever the size of the model (Rajbhandari et al.
2020, ZeRO, section 6.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.comm import Comm, Pending
from hf_zero.config import ResolvedConfig

MAX_BUCKETS_IN_FLIGHT = 8


@dataclass(frozen=True)
class GradSettings:
    """How gradients are summed.

    Args:
        accum_dtype: None: fp32, fp64 for fp64 parameters.
        wire_dtype: `communication_data_type`: what travels; None: the accumulation type.
        before: Multiplies what this rank has, before it travels. A sum in a 16-bit type may need it.
        after: Multiplies the sum over ranks, so that it becomes the mean over ranks and micro-steps (or their sum,
            `gradient_allreduce_op`).
        scatter: `reduce_scatter`: a rank gets the sum of its own part; else of everything, and keeps its part.
    """

    accum_dtype: torch.dtype | None
    wire_dtype: torch.dtype | None
    before: float
    after: float
    scatter: bool

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        *,
        world_size: int,
        accumulation: int,
        accum_dtype: torch.dtype | None,
        wire_dtype: torch.dtype | None,
    ) -> GradSettings:
        """Gradients are divided by `gradient_predivide_factor` (default 1) before the sum, and by the rest of world
        size and accumulation steps after it; with `prescale_gradients` by the world size before.
        """
        averages = config.settings["gradient_allreduce_op"] == "mean"
        total = 1 / ((world_size if averages else 1) * accumulation)
        before = 1.0
        if averages:
            prescale = config.settings["prescale_gradients"]
            before = 1 / (world_size if prescale else config.settings["gradient_predivide_factor"])
        return cls(
            accum_dtype=accum_dtype,
            wire_dtype=wire_dtype,
            before=before,
            after=total / before,
            scatter=config.zero.reduce_scatter,
        )

    def buckets_in_flight(self, comm: Comm, dtype: torch.dtype) -> int | None:
        """Most buckets under way; None for no limit. See [Note: Constant-size buffers]."""
        makes_copies = comm.backend == "gloo" or self.wire_dtype not in (None, dtype)
        return MAX_BUCKETS_IN_FLIGHT if makes_copies else None

    def start(self, comm: Comm, bucket: torch.Tensor, out: torch.Tensor | None, what: str) -> Pending:
        """Start summing `bucket` (1-D), whose values are gone after it. All ranks must call, in the same order.

        Args:
            out: Gets this rank's part of the sum; it may be that part of `bucket`. None: the sum stays in `bucket`.
        """
        if self.before != 1.0:
            bucket.mul_(self.before)
        if out is None:
            return comm.all_reduce(bucket, what, wire_dtype=self.wire_dtype)
        if self.scatter:
            return comm.reduce_scatter(out, bucket, what, wire_dtype=self.wire_dtype)
        part = bucket.chunk(comm.world_size)[comm.rank]
        return _PartOf(comm.all_reduce(bucket, what, wire_dtype=self.wire_dtype), part, out)


class _PartOf:
    """An all-reduce of which this rank keeps its part."""

    def __init__(self, pending: Pending, part: torch.Tensor, out: torch.Tensor) -> None:
        self._pending = pending
        self._part = part
        self._out = out

    def wait(self) -> None:
        self._pending.wait()
        if self._part.data_ptr() != self._out.data_ptr():
            self._out.copy_(self._part)
