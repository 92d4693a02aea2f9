"""Casts of flat memory to 8-bit types and back, with one scale per tensor (FP8-LM, Peng et al. 2023, section 2).

A number x is stored as x * scale rounded to the narrow type. The functions run on any device without waiting for it,
by torch's operations, and on CPU tensors by the native library where it is there, with the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from hf_zero.native.float8 import cast_segments, uncast_segments
from hf_zero.native.library import has_library

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16)  # a cast writes these, and an uncast reads them
SOURCES = (torch.float32, torch.bfloat16, torch.float16)  # a cast reads these
# Neither 2 ** 126 nor its inverse is subnormal in fp32.
_MAX_EXPONENT = 126


class Segments:
    """The tensors inside a 1-D memory, in ascending order; the elements between them are padding.

    Args:
        bounds: Start and end of each tensor, in elements; empty ones are allowed.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        edges = [edge for bound in bounds for edge in bound]
        if any(after < before for before, after in itertools.pairwise([0, *edges])):
            raise AssertionError(f"the bounds of segments must ascend from 0 on: {list(bounds)}")
        self.starts, self.ends = edges[::2], edges[1::2]
        self.end = edges[-1] if edges else 0  # the least length of a memory that holds them
        self.packed = torch.tensor(edges, dtype=torch.int64, device="cpu").view(-1, 2)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.ends, strict=True)


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of a type: 448 of e4m3fn, 57344 of e5m2, 65504 of fp16."""
    return float(torch.finfo(dtype).max)


def scales_for(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the largest power of two of each tensor that keeps amax * scale at or below `largest(dtype)`.

    It is 2 ** 126 at most, so that its inverse is a normal number, and 1 where amax is 0, infinite or NaN.

    Args:
        amax: The largest magnitude of each tensor, fp32 [n].
    """
    fraction, exponent = math.frexp(largest(dtype))
    fractions, exponents = torch.frexp(amax)
    power = (exponent - exponents - (fractions > fraction).int()).clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    # The bits of 2 ** power; a function for powers would be exact on some devices only.
    scales = ((power + 127) << 23).view(torch.float32)
    return torch.where(amax.isfinite() & (amax > 0), scales, 1.0)


@torch.no_grad()
def amaxes(source: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return the largest magnitude of each segment, fp32 [n] on the device of `source`.

    It is NaN where the segment holds NaN, infinite where it holds an infinity and no NaN, and 0 where it is empty.

    Args:
        source: fp32, bf16 or fp16, 1-D and contiguous.
    """
    _check_memory(source, SOURCES, segments)
    if _is_native(source):
        return cast_segments(source, None, segments.packed, None)
    extremes = source.new_zeros(2, len(segments))
    for i, (start, end) in enumerate(segments):
        if start < end:
            torch.aminmax(source[start:end], out=(extremes[0, i], extremes[1, i]))
    return extremes.abs().amax(0).float()


@torch.no_grad()
def cast(source: torch.Tensor, out: torch.Tensor, segments: Segments, scales: torch.Tensor) -> None:
    """Write source * scale, rounded to nearest even, into `out`, and 0 outside of all segments.

    The product is taken in fp32. A finite one beyond `largest` becomes `largest`, of its sign; an infinite one
    becomes NaN in e4m3fn, which has no infinity, and stays infinite in the other types. All NaN have the same bits.

    Args:
        source: fp32, bf16 or fp16; 1-D and contiguous, as `out`.
        out: e4m3fn, e5m2 or fp16, of as many elements.
        scales: Positive, fp32 [n], on the device of both.
    """
    _check_cast(source, out, segments, scales)
    if _is_native(source):
        cast_segments(source, out, segments.packed, scales)
    else:
        _cast_by_torch(source, out, segments, scales)


@torch.no_grad()
def cast_and_amax(source: torch.Tensor, out: torch.Tensor, segments: Segments, scales: torch.Tensor) -> torch.Tensor:
    """Do what `cast` does, and return the `amaxes` of the source; natively in the same pass over memory."""
    _check_cast(source, out, segments, scales)
    if _is_native(source):
        return cast_segments(source, out, segments.packed, scales)
    _cast_by_torch(source, out, segments, scales)
    return amaxes(source, segments)


@torch.no_grad()
def uncast(
    source: torch.Tensor,
    out: torch.Tensor,
    segments: Segments,
    scales: torch.Tensor,
    *,
    add: bool = False,
    factor: float = 1.0,
) -> None:
    """Write source * (1 / scale) * factor into `out`, or add it there. What lies outside of all segments stays.

    Each of the operations is rounded to fp32.

    Args:
        source: e4m3fn, e5m2 or fp16; 1-D and contiguous, as `out`.
        out: fp32, of as many elements.
        scales: Positive, fp32 [n], on the device of both.
    """
    _check_uncast(source, out, segments, scales)
    if _is_native(source):
        uncast_segments(source, out, segments.packed, scales, add=add, factor=factor)
        return
    values = source.float()
    for (start, end), inverse in zip(segments, (1.0 / scales).unsqueeze(1).unbind(), strict=True):
        part = values[start:end]
        torch.mul(part, inverse, out=part if add else out[start:end])
        if factor != 1.0:
            (part if add else out[start:end]).mul_(factor)
        if add:
            out[start:end].add_(part)


def _is_native(memory: torch.Tensor) -> bool:
    return memory.device.type == "cpu" and has_library()


def _cast_by_torch(source: torch.Tensor, out: torch.Tensor, segments: Segments, scales: torch.Tensor) -> None:
    product = torch.zeros(source.numel(), dtype=torch.float32, device=source.device)
    for (start, end), scale in zip(segments, scales.unsqueeze(1).unbind(), strict=True):
        torch.mul(source[start:end], scale, out=product[start:end])
    limit, nan, infinite = largest(out.dtype), math.nan, math.inf
    if out.dtype == torch.float8_e4m3fn:
        values = product.nan_to_num_(nan, posinf=nan, neginf=nan).clamp_(-limit, limit)
    else:
        values = torch.where(product.isinf(), product, product.clamp(-limit, limit))
        values.nan_to_num_(nan, posinf=infinite, neginf=-infinite)  # all NaN get the same bits
    out.copy_(values)


def _check_cast(source: torch.Tensor, out: torch.Tensor, segments: Segments, scales: torch.Tensor) -> None:
    _check_memory(source, SOURCES, segments)
    _check_memory(out, FORMATS, segments)
    _check_together(source, out, segments, scales)


def _check_uncast(source: torch.Tensor, out: torch.Tensor, segments: Segments, scales: torch.Tensor) -> None:
    _check_memory(source, FORMATS, segments)
    _check_memory(out, (torch.float32,), segments)
    _check_together(source, out, segments, scales)


def _check_memory(memory: torch.Tensor, dtypes: Sequence[torch.dtype], segments: Segments) -> None:
    if memory.dtype not in dtypes or memory.dim() != 1 or not memory.is_contiguous():
        wanted = ", ".join(map(str, dtypes))
        raise AssertionError(f"1-D contiguous memory of {wanted} is wanted, not {memory.dtype} {list(memory.shape)}")
    if segments.end > memory.numel():
        raise AssertionError(f"the last segment ends at {segments.end}, the memory at {memory.numel()}")


def _check_together(source: torch.Tensor, out: torch.Tensor, segments: Segments, scales: torch.Tensor) -> None:
    if source.numel() != out.numel():
        raise AssertionError(f"{source.numel()} elements into {out.numel()}")
    if scales.dtype != torch.float32 or list(scales.shape) != [len(segments)] or not scales.is_contiguous():
        raise AssertionError(f"{len(segments)} segments, and scales of {scales.dtype} {list(scales.shape)}")
    if not source.device == out.device == scales.device:
        raise AssertionError(f"three devices: {source.device}, {out.device}, {scales.device}")
