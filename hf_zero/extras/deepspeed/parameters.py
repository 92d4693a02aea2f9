"""DeepSpeed's attributes of a parameter at stage 3 and inside zero.Init, as `ds_shape`. facade.py puts them there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_zero.access.local import local_param
from hf_zero.access.param_location import ParamLocation, find_parameter
from hf_zero.engine.sharded_init import open_construction
from hf_zero.extras.deepspeed.zero import ZeroParamStatus
from hf_zero.sharding.param_index import ParamPlace
from hf_zero.sharding.unit import UnitState

_STATUS = {UnitState.SHARDED: ZeroParamStatus.NOT_AVAILABLE, UnitState.UNSHARDING: ZeroParamStatus.INFLIGHT}
# Parameters under construction are numbered as they are asked; that is the same on all ranks if all of them ask.
_numbers: MutableMapping[nn.Parameter, int] = WeakIdKeyDictionary()
_next = itertools.count()


def _id(param: nn.Parameter, place: ParamPlace | None) -> int:
    """Return the place of the parameter among those of its model, which is the same on all ranks."""
    if isinstance(place, ParamLocation):
        return next(number for number, one in enumerate(place.engine.module.parameters()) if one is param)
    return _numbers[param] if param in _numbers else _numbers.setdefault(param, next(_next))


def _status(param: nn.Parameter, place: ParamPlace | None) -> ZeroParamStatus:
    return ZeroParamStatus.AVAILABLE if place is None else _STATUS.get(place.unit.state, ZeroParamStatus.AVAILABLE)


def _tensor(param: nn.Parameter, place: ParamPlace | None) -> torch.Tensor:
    """Return a copy of what this rank owns of the parameter, 1-D."""
    if place is None:
        raise AttributeError("this parameter is still under construction, and in no shards yet: it has no ds_tensor")
    if place.slice is None:
        return torch.empty(0, dtype=param.dtype)
    if isinstance(place, ParamLocation) and (piece := local_param(param)) is not None:
        return piece.values.to(param.dtype)
    return place.flat.shard.read_slice(place.slice).clone()


def _summary(param: nn.Parameter, place: ParamPlace | None) -> Callable[..., dict[str, Any]]:
    """Return DeepSpeed's method of this name, which gives the other answers as a dict."""

    def summary(use_debug_name: bool = False) -> dict[str, Any]:
        return {
            "id": _id(param, place),
            "status": _status(param, place).name,
            "numel": param.numel(),
            "ds_numel": param.numel(),
            "shape": tuple(param.shape),
            "ds_shape": tuple(param.shape),
            "requires_grad": param.requires_grad,
            "grad_shape": None,  # gradients leave the parameter as they are reduced
            "persist": _persists(param, place),
            "active_sub_modules": set(),
            "ds_tensor.shape": None if place is None else _tensor(param, place).shape,
        }

    return summary


def _persists(param: nn.Parameter, place: ParamPlace | None) -> bool:
    """Say whether the parameter is never sharded: it is below stage3_param_persistence_threshold."""
    return place is not None and not place.unit.on_demand


ANSWERS: dict[str, Callable[[nn.Parameter, ParamPlace | None], Any]] = {
    "ds_id": _id,
    "ds_numel": lambda param, _: param.numel(),
    "ds_persist": _persists,
    "ds_shape": lambda param, _: param.shape,
    "ds_status": _status,
    "ds_summary": _summary,
    "ds_tensor": _tensor,
}


def answer(name: str, param: nn.Parameter) -> Any:
    """Return what DeepSpeed's attribute `name` says, at stage 3 and inside zero.Init; else raise AttributeError."""
    place: ParamPlace | None = find_parameter(param, None)
    construction = open_construction()
    if isinstance(place, ParamLocation):
        known = place.engine.config.shards_parameters
    else:
        known = construction is not None and param.is_floating_point() and not param.is_meta
        place = construction.place_of(param) if construction is not None else None
    if not known:
        raise AttributeError(f"this parameter is not at stage 3, so it has no {name}")
    return ANSWERS[name](param, place)


def is_zero_param(param: Any) -> bool:
    """Say whether `param` is a parameter at stage 3, or inside zero.Init; deepspeed.runtime.zero's function."""
    try:
        return isinstance(param, nn.Parameter) and answer("ds_shape", param) == param.shape
    except AttributeError:
        return False
