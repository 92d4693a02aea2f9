"""Messages of 8-bit blocks, made of CPU memory and added up in one pass over it.

The results are the same bits for every number of threads and every instruction set, and those of the torch operations
in distributed/block_quantization.py, which says what a message is.
"""

from __future__ import annotations

import ctypes

import torch

from hf_zero.native.library import function
from hf_zero.native.machine import default_threads
from hf_zero.native.simd import raise_errno, simd_level

_TYPES = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4}  # hz_dtype


def quantize_row(row: torch.Tensor, message: torch.Tensor) -> None:
    """Write the message of the values of `row`. Small work takes fewer threads than `default_threads`.

    Args:
        row: fp32, fp64, bf16 or fp16; 1-D and contiguous, as `message`.
    Raises:
        NativeError: The library is missing, or threads cannot be started.
        ConfigError: HF_ZERO_SIMD or HF_ZERO_CPU_THREADS is wrong.
    """
    _check(row, message.unsqueeze(0))
    code = function("hz_quantize")(
        ctypes.c_void_p(row.data_ptr()),
        ctypes.c_int32(_TYPES[row.dtype]),
        ctypes.c_int64(row.numel()),
        ctypes.c_void_p(message.data_ptr()),
        ctypes.c_int32(default_threads()),
        ctypes.c_int32(simd_level()),
    )
    raise_errno(code, "making an 8-bit message")


def sum_rows(messages: torch.Tensor, out: torch.Tensor) -> None:
    """Add up what the rows of `messages` hold, in fp32 and in their order, and write the sum; see `quantize_row`."""
    _check(out, messages)
    code = function("hz_sum_messages")(
        ctypes.c_void_p(messages.data_ptr()),
        ctypes.c_int64(len(messages)),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int32(_TYPES[out.dtype]),
        ctypes.c_int64(out.numel()),
        ctypes.c_int32(default_threads()),
        ctypes.c_int32(simd_level()),
    )
    raise_errno(code, "adding up 8-bit messages")


def _check(values: torch.Tensor, messages: torch.Tensor) -> None:
    """Refuse what the library, which is given addresses, would read or write beyond."""
    for memory in (values, messages):
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise AssertionError(f"only contiguous CPU tensors: {memory.device}, strides {memory.stride()}")
    if messages.shape[1] != values.numel() + 4 * -(-values.numel() // 256):
        raise AssertionError(f"messages of {messages.shape[1]} bytes about {values.numel()} values")
