"""Pickles what goes between the test process and its ranks.

torch writes every tensor as a file of its own kind, which costs more processor time than many a test: traces are
thousands of small tensors. Here a plain tensor on the CPU is its bytes.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_PLAIN = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


def dumps(value: Any) -> bytes:
    """`pickle.loads` reads it."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return _tensor, (data, value.dtype, tuple(value.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in _PLAIN
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.__dict__  # attributes that someone gave it
    )


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
