"""Turns silent damage to a sharded model into errors: reading or moving placeholders."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_zero.errors import StateError
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.unit import ShardUnit, UnitState

DeepCopy = Callable[[nn.Module, dict[int, Any]], nn.Module]


class ModelGuards:
    """Guards on the modules that own on-demand parameters. `remove` takes all of them off."""

    def __init__(self, model: nn.Module, units: list[ShardUnit], deepcopy: DeepCopy) -> None:
        """`deepcopy(module, memo)` copies the model, or a module in it."""
        self._handles: list[RemovableHandle] = []
        self._overridden: list[tuple[nn.Module, str]] = []
        self._names_only = False
        index = ParamIndex(unit for unit in units if unit.on_demand)
        if not index:
            return
        for path, module in model.named_modules():
            mine = {name: index[p].unit for name, p in module.named_parameters(recurse=False) if p in index}
            if mine:
                self._guard_state_dict(module, path, mine)
                self._guard_apply(module, path, mine)
        for module in model.modules():
            if any(param in index for param in module.parameters()):
                self._override(module, "__deepcopy__", functools.partial(deepcopy, module))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module, name in self._overridden:
            module.__dict__.pop(name, None)
        self._handles.clear()
        self._overridden.clear()

    @contextlib.contextmanager
    def naming_shards(self) -> Iterator[None]:
        """Inside, `state_dict()` holds placeholders: for a caller that reads names and shapes alone."""
        before, self._names_only = self._names_only, True
        try:
            yield
        finally:
            self._names_only = before

    def _override(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        module.__dict__[name] = function
        self._overridden.append((module, name))

    def _guard_state_dict(self, module: nn.Module, path: str, mine: dict[str, ShardUnit]) -> None:
        def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            sharded = [name for name, unit in mine.items() if unit.state is not UnitState.FULL]
            if sharded and not self._names_only:
                raise StateError(
                    "state_dict() of a sharded model would hold placeholders instead of weights (first: "
                    f"{path + '.' if path else ''}{sharded[0]}).\nOn all ranks call trainer.save_model(), "
                    "model.save_pretrained(), accelerator.get_state_dict(model) or "
                    "engine.full_state_dict(keep=rank == 0); or read inside `with hf_zero.gathered_params(model):`."
                )

        self._handles.append(module.register_state_dict_pre_hook(before))

    def _guard_apply(self, module: nn.Module, path: str, mine: dict[str, ShardUnit]) -> None:
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
