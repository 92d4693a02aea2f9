"""The Adam and AdamW update of ranges of CPU tensors, in one pass over memory.

Fused into the pass: the gradient's unscale and clip factor, its conversion from bf16 or fp16, and the copy of the
updated parameter rounded to its own type. The results are the same bits for every number of threads, every instruction
set and every way to cut a range into spans; they differ from torch.optim.Adam's by the rounding of last bits.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from hf_zero.native.library import library
from hf_zero.native.machine import default_threads
from hf_zero.native.simd import raise_errno, simd_level

_NONE = 0
_TYPES = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4}  # hz_dtype
_SPAN = struct.Struct("@6q5d2i")  # hz_adam_span
_BATCH = struct.Struct("@5P3qPqd4i")  # hz_adam_batch


class AdamRule(NamedTuple):
    """The values of a param group that decide an update: the last fields of `AdamSpan`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW (True) or L2 (False)
    bias_correction: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamRule:
        """Make the rule of a param group of torch's Adam or AdamW, or of CPUAdam."""
        beta1, beta2 = group["betas"]
        return cls(
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            bool(group.get("decoupled_weight_decay", group.get("adamw_mode", False))),
            bool(group.get("bias_correction", True)),
        )


class AdamSpan(NamedTuple):
    """A contiguous range of elements that share hyper-parameters."""

    start: int  # elements, from the start of master / exp_avg / exp_avg_sq
    numel: int
    grad_start: int  # elements, from the start of grad
    out_start: int  # elements, from the start of out
    index: int  # type: ignore[assignment]  # of its first element within its parameter: the seed of the stochastic rounding of bf16 moments
    step: int  # number of this update, from 1
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW (True) or L2 (False)
    bias_correction: bool = True


class AdamBatch(NamedTuple):
    """Spans over one set of tensors, all of them 1-D, contiguous, on the CPU.

    master is fp32 or fp64; the moments are of its type, or both bf16 beside an fp32 master; grad is fp32, bf16, fp16,
    or fp64 with an fp64 master; out takes the updated parameters, rounded to nearest even, in any of the four types.
    """

    spans: Sequence[AdamSpan]
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    out: torch.Tensor | None = None
    grad_scale: float = 1.0  # multiplies the gradient; negative: maximize


def adam_step(
    spans: Sequence[AdamSpan],
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    *,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
    threads: int | None = None,
) -> None:
    """Update one set of tensors; see `AdamBatch` and `adam_step_batches`."""
    adam_step_batches([AdamBatch(spans, master, exp_avg, exp_avg_sq, grad, out, grad_scale)], threads=threads)


def adam_step_batches(batches: Sequence[AdamBatch], *, threads: int | None = None) -> None:
    """Update all batches in one call, on `threads` threads (default: `default_threads()`; small work takes fewer).

    The GIL is released. Calls from several Python threads run one after another. Spans must not overlap.
    Version counters of autograd are not advanced: the caller does that where autograd may look.

    Raises:
        NativeError: The library is missing, or threads cannot be started.
        ConfigError: HF_ZERO_SIMD or HF_ZERO_CPU_THREADS is wrong.
    """
    # The spans stay referenced until the call is over: the packed batches hold their addresses.
    spans = [b"".join(itertools.starmap(_SPAN.pack, batch.spans)) for batch in batches]
    packed = b"".join(map(_pack, batches, spans))
    code = _function()(packed, len(batches), default_threads() if threads is None else threads, simd_level())
    raise_errno(code, "the Adam update")
    if code:
        words = "; ".join(map(_describe, batches))
        raise AssertionError(f"spans out of bounds, or types that do not go together: {words}")


def _pack(batch: AdamBatch, spans: bytes) -> bytes:
    spans_, master, exp_avg, exp_avg_sq, grad, out, grad_scale = batch
    for tensor in (master, exp_avg, exp_avg_sq, grad, out):
        if tensor is not None and not (tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"):
            raise AssertionError(f"not a 1-D contiguous CPU tensor: {_describe(batch)}")
    numel = master.numel()
    if not numel == exp_avg.numel() == exp_avg_sq.numel() or exp_avg.dtype != exp_avg_sq.dtype:
        raise AssertionError(f"master and moments do not go together: {_describe(batch)}")
    return _BATCH.pack(
        master.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        0 if out is None else out.data_ptr(),
        numel,
        grad.numel(),
        0 if out is None else out.numel(),
        ctypes.cast(ctypes.c_char_p(spans), ctypes.c_void_p).value or 0,
        len(spans_),
        grad_scale,
        _TYPES.get(master.dtype, -1),
        _TYPES.get(exp_avg.dtype, -1),
        _TYPES.get(grad.dtype, -1),
        _NONE if out is None else _TYPES.get(out.dtype, -1),
    )


def _describe(batch: AdamBatch) -> str:
    tensors = {name: getattr(batch, name) for name in ("master", "exp_avg", "exp_avg_sq", "grad", "out")}
    words = [f"{name} {t.dtype} {list(t.shape)} on {t.device}" for name, t in tensors.items() if t is not None]
    return f"{', '.join(words)}; {len(batch.spans)} spans, the first of them {batch.spans[0] if batch.spans else None}"


@cache
def _function() -> Callable[..., int]:
    function = library().hz_adam_step
    function.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32]
    function.restype = ctypes.c_int32
    return function
