"""CRC-32 as zlib computes it, several times as fast, and in the same pass as a copy."""

from __future__ import annotations

import ctypes
import zlib
from functools import cache

import torch

from hf_zero.native.library import has_library, library

AUTO, BY_TABLES = -1, 0  # hz_simd: what this CPU is fastest at, and what every CPU can do


def crc32(data: torch.Tensor, crc: int = 0, *, copy_to: torch.Tensor | None = None, simd: int = AUTO) -> int:
    """zlib.crc32 of a tensor's bytes, continued from `crc`; `copy_to` gets the same bytes. The GIL is released.

    Args:
        data, copy_to: Contiguous, on the CPU, of as many bytes. They do not overlap.
    Raises:
        NativeError: The library is missing.
    """
    nbytes = data.numel() * data.element_size()
    for tensor in (data,) if copy_to is None else (data, copy_to):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise AssertionError(f"only contiguous CPU tensors: {tensor.device}, strides {tensor.stride()}")
        if tensor.numel() * tensor.element_size() != nbytes:
            raise AssertionError(f"{nbytes} bytes into {tensor.numel() * tensor.element_size()}")
    return int(_function()(crc, data.data_ptr(), nbytes, None if copy_to is None else copy_to.data_ptr(), simd))


def crc32_of_bytes(data: memoryview, crc: int = 0) -> int:
    """zlib.crc32 of writable memory that is not empty, by zlib itself where the native library is missing."""
    if not has_library():
        return zlib.crc32(data, crc)
    return crc32(torch.frombuffer(data, dtype=torch.uint8), crc)


@cache
def _function() -> ctypes._NamedFuncPointer:
    function = library().hz_crc32
    pointer = ctypes.c_void_p
    function.restype = ctypes.c_uint32
    function.argtypes = [ctypes.c_uint32, pointer, ctypes.c_int64, pointer, ctypes.c_int32]
    return function
