"""Scaled casts of the segments of 1-D CPU memory to 8-bit types and fp16, and back, in one pass over memory.

The results are the same bits for every number of threads and every instruction set, and those of the torch operations
in fp8/scaled_casts.py, which says what a cast is and checks what comes here.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from hf_zero.native.library import function
from hf_zero.native.machine import default_threads
from hf_zero.native.simd import raise_errno, simd_level

_NONE = 0
_TYPES = {  # hz_dtype
    torch.float32: 1,
    torch.bfloat16: 3,
    torch.float16: 4,
    torch.float8_e4m3fn: 5,
    torch.float8_e5m2: 6,
}
_SEGMENTS = struct.Struct("@2P2q")  # hz_segments


def cast_segments(
    source: torch.Tensor, out: torch.Tensor | None, bounds: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """Cast the segments, unless `out` is None, and return the largest magnitude of each, fp32 [n].

    Small work takes fewer threads than `default_threads`. The GIL is released.

    Args:
        bounds: Start and end of each segment, int64 [n, 2] on the CPU.
    Raises:
        NativeError: The library is missing, or threads cannot be started.
        ConfigError: HF_ZERO_SIMD or HF_ZERO_CPU_THREADS is wrong.
    """
    amaxes = torch.empty(len(bounds), dtype=torch.float32, device="cpu")
    code = function("hz_cast")(
        _pack(source, bounds, scales),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int32(_TYPES[source.dtype]),
        ctypes.c_void_p(0 if out is None else out.data_ptr()),
        ctypes.c_int32(_NONE if out is None else _TYPES[out.dtype]),
        ctypes.c_void_p(amaxes.data_ptr()),
        ctypes.c_int32(default_threads()),
        ctypes.c_int32(simd_level()),
    )
    _check(code, source, out)
    return amaxes


def uncast_segments(
    source: torch.Tensor, out: torch.Tensor, bounds: torch.Tensor, scales: torch.Tensor, *, add: bool, factor: float
) -> None:
    """Write the segments back to fp32, or add them; see `cast_segments`."""
    code = function("hz_uncast")(
        _pack(source, bounds, scales),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int32(_TYPES[source.dtype]),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_float(factor),
        ctypes.c_int32(add),
        ctypes.c_int32(default_threads()),
        ctypes.c_int32(simd_level()),
    )
    _check(code, source, out)


def round_fp16(values: torch.Tensor, first: int, seed: int) -> None:
    """Round fp32 values in place, at random, to the digits of fp16: see fp8/stochastic_rounding.py."""
    code = function("hz_round_fp16")(
        ctypes.c_void_p(values.data_ptr()),
        ctypes.c_int64(values.numel()),
        ctypes.c_int64(first),
        ctypes.c_uint32(seed),
        ctypes.c_int32(default_threads()),
        ctypes.c_int32(simd_level()),
    )
    _check(code, values, values)


def _pack(source: torch.Tensor, bounds: torch.Tensor, scales: torch.Tensor | None) -> bytes:
    return _SEGMENTS.pack(bounds.data_ptr(), 0 if scales is None else scales.data_ptr(), len(bounds), source.numel())


def _check(code: int, source: torch.Tensor, out: torch.Tensor | None) -> None:
    raise_errno(code, "the cast")
    if code:
        raise AssertionError(f"types that do not go together: {source.dtype}, {None if out is None else out.dtype}")
