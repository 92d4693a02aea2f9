"""Copies in host memory of what is not read again soon: past the caches, so no line is read only to be overwritten.

On one core a third faster than `copy_`: `scripts/bench_checkpoint.py FOLDER --only stall` shows what it brings.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from hf_zero.native.library import has_library, library

AUTO = -1  # hz_simd: what this CPU is fastest at
_FROM = 1 << 20  # bytes; less may still be in the caches when it is read


def copy_past_caches(target: torch.Tensor, source: torch.Tensor, simd: int = AUTO) -> None:
    """target.copy_(source). The GIL is released.

    Other copies than those of contiguous CPU tensors of one type, small ones, and all where the native library is
    missing, are torch's.
    """
    nbytes = target.numel() * target.element_size()
    plain = all(one.device.type == "cpu" and one.is_contiguous() for one in (target, source))
    if nbytes < _FROM or not plain or target.dtype != source.dtype or not has_library():
        target.copy_(source)
        return
    if target.numel() != source.numel():
        raise AssertionError(f"{source.numel()} elements into {target.numel()}")
    _function()(target.data_ptr(), source.data_ptr(), nbytes, simd)


@cache
def _function() -> ctypes._NamedFuncPointer:
    function = library().hz_copy
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    return function
