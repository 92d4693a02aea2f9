"""What a rank hands over to be saved: the tensors of every run it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hf_zero.layout import Run

Scalar = float | int | bool


@dataclass(frozen=True)
class Chunked:
    """A 1-D tensor that comes in chunks from where it is kept, so that it is never whole in memory."""

    numel: int
    dtype: torch.dtype
    chunks: Callable[[], Iterator[torch.Tensor]]  # each chunk is valid until the next is asked for


@dataclass(frozen=True)
class RunState:
    """The part of one parameter, and of its optimizer state, that lies in one rank's shard."""

    unit: str  # UnitLayout.name
    run: Run
    tensors: Mapping[
        str, torch.Tensor | Chunked
    ]  # 1-D [run.numel] each: "master" or "param", "exp_avg", "exp_avg_sq", ...
    scalars: Mapping[str, Scalar] = field(default_factory=dict)  # such as "step": the same on every owner
