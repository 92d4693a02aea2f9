"""Keeps autocast from holding a second, 16-bit model in memory.

[Note: Autocast copies]
Under autocast a Linear computes with a 16-bit copy of its fp32 weight. Two things keep that copy alive after the unit
has been resharded: autograd, which saves it for backward, and autocast's own cache, until autocast ends. Together they
would hold 2 bytes of every parameter on every rank, which is what stage 3 exists to avoid. So a copy is saved as "this
parameter, in this type", made again from the gathered parameter in backward, and the cache is emptied after each unit.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.unit import ShardUnit


class _CopyOf(NamedTuple):
    """The mark that is saved instead of the 16-bit copy of a parameter, or of a view of it."""

    param: nn.Parameter
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class AutocastCopies:
    """Watches what autograd saves while one unit's forward runs under autocast."""

    def __init__(self, unit: ShardUnit, device_type: str) -> None:
        self._params = ParamIndex([unit])
        self._device_type = device_type
        self._active: list[contextlib.AbstractContextManager[None]] = []

    def enter(self) -> None:
        """The unit's forward starts. Does nothing without autocast, or where something else (activation checkpointing)
        already decides what is saved."""
        if not torch.is_autocast_enabled(self._device_type) or not torch.is_grad_enabled():
            return
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return
        context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        context.__enter__()
        self._active.append(context)

    def leave(self) -> None:
        """The unit's forward is over, by return or by exception."""
        if self._active:
            self._active.pop().__exit__(None, None, None)
        if torch.is_autocast_enabled(self._device_type):
            torch.clear_autocast_cache()

    def _pack(self, tensor: torch.Tensor) -> Any:
        param = self._source(tensor)
        if param is None:
            return tensor
        return _CopyOf(param, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @staticmethod
    def _unpack(saved: Any) -> torch.Tensor:
        if not isinstance(saved, _CopyOf):
            tensor: torch.Tensor = saved
            return tensor
        copy = saved.param.detach().to(saved.dtype)
        return copy.as_strided(saved.size, saved.stride, saved.offset)

    def _source(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """The parameter of which `tensor` is (a view of) a cast copy."""
        if tensor.dtype not in (torch.bfloat16, torch.float16) or not tensor.requires_grad:
            return None
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        node = base.grad_fn
        if node is None or node.name() != "ToCopyBackward0":
            return None
        variable = getattr(node.next_functions[0][0], "variable", None)
        return variable if variable in self._params else None
