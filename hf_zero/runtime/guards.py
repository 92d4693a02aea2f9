"""Turns silent damage to a model into errors: saving or moving placeholders, or putting other parameters in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_zero.errors import StateError
from hf_zero.sharding.model_params import clean_name, named_parameters
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.unit import ShardUnit, UnitState

_MOST_NAMES = 5
DeepCopy = Callable[[nn.Module, dict[int, Any]], nn.Module]


class ModelGuards:
    """Guards on the modules that own on-demand parameters. `remove` takes all of them off."""

    def __init__(self, model: nn.Module, units: list[ShardUnit], deepcopy: DeepCopy) -> None:
        """`deepcopy(module, memo)` copies the model, or a module in it."""
        self._handles: list[RemovableHandle] = []
        self._overridden: list[tuple[nn.Module, str]] = []
        index = ParamIndex(unit for unit in units if unit.on_demand)
        if not index:
            return
        for path, module in model.named_modules():
            mine = [name for name, param in module.named_parameters(recurse=False) if param in index]
            if mine:
                self._guard_apply(module, path, mine)
        for module in model.modules():
            if any(param in index for param in module.parameters()):
                before = functools.partial(_refuse_loading, index)
                self._handles.append(module.register_load_state_dict_pre_hook(before))
                self._override(module, "__deepcopy__", functools.partial(deepcopy, module))
                self._override(module, "__reduce_ex__", functools.partial(_refuse_pickling, type(module).__name__))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module, name in self._overridden:
            module.__dict__.pop(name, None)
        self._handles.clear()
        self._overridden.clear()

    def _override(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        module.__dict__[name] = function
        self._overridden.append((module, name))

    def _guard_apply(self, module: nn.Module, path: str, mine: Sequence[str]) -> None:
        """`.to`, `.half`, `.cuda` would build whole NaN tensors; where they change nothing they touch buffers only."""
        plain_apply: Callable[..., nn.Module] = type(module)._apply

        def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            for name in mine:
                param = module._parameters[name]
                assert param is not None
                probe = torch.empty(1, dtype=param.dtype, device=param.device)
                moved = fn(probe)
                if moved.dtype != param.dtype or moved.device != param.device:
                    raise StateError(
                        f"{path + '.' if path else ''}{name} is sharded and cannot be moved or cast from "
                        f"{param.dtype} on {param.device} to {moved.dtype} on {moved.device}.\nSet the type before "
                        "the model is handed to hf_zero (dtype= in from_pretrained, or bf16.enabled), or call "
                        "engine.teardown() first."
                    )
            own = module._parameters
            module._parameters = {name: param for name, param in own.items() if name not in mine}
            try:
                plain_apply(module, fn, recurse)
            finally:
                own.update(module._parameters)
                module._parameters = own
            return module

        self._override(module, "_apply", apply)


def _refuse_pickling(name: str, protocol: object) -> NoReturn:
    raise StateError(
        f"{name} is sharded and cannot be pickled.\nOn all ranks call engine.save_checkpoint, save_pretrained or "
        "engine.full_state_dict(keep=rank == 0); engine.teardown() gives the plain model."
    )


def _refuse_loading(
    index: ParamIndex, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Raise StateError before `module` or anything below it takes values of `state`."""
    assigns = metadata.get("assign_to_params_buffers", False)
    own = module.named_parameters(remove_duplicate=False)
    places = [index[param] for name, param in own if prefix + name in state and param in index]
    found = [place.slot.name for place in places if assigns or place.unit.state is not UnitState.UNSHARDED]
    if not found:
        return
    said = f"load_state_dict of {type(module).__name__}: {', '.join(found[:_MOST_NAMES])} ({len(found)} in all)"
    if assigns:
        raise StateError(
            f"{said} would be replaced by other tensors, which hf_zero does not train (assign=True).\nOn all ranks "
            "call engine.load_full_state_dict(state), which copies the values."
        )
    raise StateError(
        f"{said} are sharded, and what is written to them would be lost.\nOn all ranks call "
        "engine.load_full_state_dict(state), with strict=False for a part of the model, or load inside "
        "`with hf_zero.gathered_params(model, write_rank=0):`."
    )


def _ids(named: Mapping[str, object]) -> list[int]:
    return [*map(id, named.values())]


class ModelTree:
    """The parameters of a model by place, as the engine took it over: training would use others, saves hold these.

    A check costs a comparison per module and per parameter. Modules may change (wrappers, activation checkpointing,
    parts that are dropped) as long as the parameters stay. Frozen parameters may come as long as they stay frozen:
    each rank has its own, weights and checkpoints are saved with those of rank 0.
    """

    def __init__(self, model: nn.Module, units: Sequence[ShardUnit]) -> None:
        self._model = model
        self._units = units
        self._first = {id(param) for param in model.parameters()}  # what is in no unit is trained by another engine
        self._look()

    def _look(self) -> None:
        """Take what is there as right. It is held, so that its ids are nobody else's."""
        modules = list(self._model.modules())
        self._places = [(module, _ids(module._parameters), _ids(module._modules)) for module in modules]
        self._held = [(list(module._parameters.values()), list(module._modules.values())) for module in modules]
        self._late = [param for _, param in named_parameters(self._model) if id(param) not in self._first]

    def check(self, rank: int) -> None:
        """Raise StateError if a parameter replaced one of the engine's, or one came that is trained."""
        for module, params, modules in self._places:
            if _ids(module._parameters) != params or _ids(module._modules) != modules:
                if not all(isinstance(param, nn.Parameter | None) for param in module._parameters.values()):
                    return  # torch.func.functional_call puts tensors there for one forward; they lead where they may
                break
        else:
            if any(param.requires_grad for param in self._late):
                self._refuse_strangers(rank)
            return
        self._refuse_strangers(rank)
        self._look()

    def check_names(self, rank: int) -> None:
        """Raise StateError if parameters have other names by now: a checkpoint would hold them under the old ones."""
        live = {id(param): clean_name(name) for name, param in self._model.named_parameters()}
        renamed = [
            f"{slot.name} ({live.get(id(param), 'no longer there')})"
            for unit in self._units
            for flat in unit.flats
            for slot, param in zip(flat.layout.slots, flat.params, strict=True)
            if live.get(id(param)) != slot.name
        ]
        if renamed:
            raise StateError(
                f"rank {rank}: {len(renamed)} parameter(s) have other names since hf_zero took over the model: "
                f"{', '.join(renamed[:_MOST_NAMES])}.\nSave the checkpoint before such a change (new adapters, "
                "wrappers), or call hf_zero.initialize again after it, with a new optimizer."
            )

    def _refuse_strangers(self, rank: int) -> None:
        known = ParamIndex(self._units)
        names = {slot.name for unit in self._units for flat in unit.flats for slot in flat.layout.slots}
        strangers = [
            clean_name(name)
            for name, param in named_parameters(self._model)
            # A parameter with hooks for its gradient is trained by another engine.
            if param not in known
            and (name in names or (param.requires_grad and not param._post_accumulate_grad_hooks))
        ]
        if strangers:
            raise StateError(
                f"rank {rank}: {len(strangers)} parameter(s) came into the model after hf_zero had taken it over, and "
                f"would be neither trained nor saved: {', '.join(strangers[:_MOST_NAMES])}.\nTo change values, call "
                "hf_zero.set_full_param(model, tensor, name), or write in place inside `with hf_zero.gathered_params("
                "model, write_rank=0):`. To train new modules, add them before the model is handed to hf_zero, or "
                "call hf_zero.initialize again, with a new optimizer."
            )
