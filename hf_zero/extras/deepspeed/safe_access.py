"""DeepSpeed's reads and writes of one parameter whose arguments or results differ from hf_zero's: see access/."""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.access import full, local
from hf_zero.access.param_location import managed_parameter


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """`full_optimizer_state(param, "master")`. All ranks must call."""
    return full.full_optimizer_state(param, "master")


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """`set_full_optimizer_state`, in another order. All ranks must call."""
    full.set_full_optimizer_state(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    return _values(param, local.local_param(param))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the values of `local_grad`. All ranks must call."""
    return _values(param, local.local_grad(param))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    return _values(param, local.local_optimizer_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """`set_local_optimizer_state`, in another order. All ranks must call."""
    local.set_local_optimizer_state(param, optim_state_key, value)


def _values(param: nn.Parameter, piece: local.LocalPiece | None) -> torch.Tensor | None:
    """Return the values of `piece`; no elements where this rank owns none, and None for a frozen parameter."""
    if not param.requires_grad:
        return None
    if piece is not None:
        return piece.values
    place = managed_parameter(param, None, "safe_get_local_*")
    if place.slice is not None:  # there is no gradient or no state of it yet
        return None
    return torch.empty(0, dtype=place.flat.master_dtype, device=place.engine.device)
