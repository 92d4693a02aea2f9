"""The tensors of `state_dict()`, of a model or of a part of it: current, and none that would be saved as another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_zero.sharding.model_params import clean_name
from hf_zero.sharding.param_data import with_own_storage
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.shape_only import ShapeOnly
from hf_zero.sharding.unit import ShardUnit, UnitState

_WITH_VALUES = (UnitState.UNSHARDED, UnitState.SAVING)


def hook_state_dicts(
    model: nn.Module, units: Iterable[ShardUnit], check_current: Callable[[], None]
) -> list[RemovableHandle]:
    """Call `check_current` before every `state_dict()`, and make its tensors safe to save.

    A sharded parameter is its name, shape and type, which is all that loaders read; one with values has a storage of
    its own, where the device can. With `keep_vars` both are the parameters themselves, which refuse by their class.
    """
    index = ParamIndex(unit for unit in units if unit.on_demand)
    handles = []
    for path, module in model.named_modules():
        if module._parameters:
            after = _safe_to_save(index, f"{clean_name(path)}." if path else "")
            handles.append(module.register_state_dict_pre_hook(lambda *_: check_current()))
            handles.append(module.register_state_dict_post_hook(after))
    return handles


def _safe_to_save(index: ParamIndex, path: str) -> Callable[..., None]:
    """Return the hook on one module, whose parameters have names that begin with `path`.

    It is a function, which a deep copy of the module shares: an object would be copied, and all units with it.
    """

    def after(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            if isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor):
                continue
            if param in index and index[param].unit.state not in _WITH_VALUES:
                state[prefix + name] = ShapeOnly(value, path + name)
            elif value.numel() and not value.requires_grad and (own := with_own_storage(value)) is not None:
                state[prefix + name] = own

    return after
