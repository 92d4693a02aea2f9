"""DeepSpeed's attributes of a parameter at stage 3, as `ds_shape` and `ds_status`. facade.py puts them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.access.local import local_param
from hf_zero.access.param_location import ParamLocation, find_parameter
from hf_zero.extras.deepspeed.zero import ZeroParamStatus
from hf_zero.sharding.unit import UnitState

_STATUS = {UnitState.SHARDED: ZeroParamStatus.NOT_AVAILABLE, UnitState.UNSHARDING: ZeroParamStatus.INFLIGHT}


def _id(param: nn.Parameter, place: ParamLocation) -> int:
    """Return the place of the parameter among those of its model, which is the same on all ranks."""
    return next(number for number, one in enumerate(place.engine.module.parameters()) if one is param)


def _status(param: nn.Parameter, place: ParamLocation) -> ZeroParamStatus:
    return _STATUS.get(place.unit.state, ZeroParamStatus.AVAILABLE)


def _tensor(param: nn.Parameter, place: ParamLocation) -> torch.Tensor:
    """Return a copy of what this rank owns of the parameter, 1-D."""
    piece = local_param(param)
    return torch.empty(0, dtype=param.dtype) if piece is None else piece.values.to(param.dtype)


_ANSWERS: dict[str, Callable[[nn.Parameter, ParamLocation], Any]] = {
    "ds_id": _id,
    "ds_numel": lambda param, _: param.numel(),
    "ds_shape": lambda param, _: param.shape,
    "ds_status": _status,
    "ds_tensor": _tensor,
}


def answer(param: nn.Parameter, name: str) -> Any:
    """Return what DeepSpeed's attribute `name` says; raise AttributeError for parameters that are not at stage 3."""
    place = find_parameter(param, None)
    if place is None or not place.engine.config.shards_parameters:
        raise AttributeError(f"this parameter is not at stage 3, so it has no {name}")
    return _ANSWERS[name](param, place)
