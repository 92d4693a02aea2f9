"""The engine as an nn.Module: with one child, `module`, whose attributes it has too, as DeepSpeed's engine."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hf_zero.engine.script_calls import ScriptCalls
from hf_zero.errors import StateError
from hf_zero.runtime.full_weights import own_tensors
from hf_zero.runtime.shape_only import ShapeOnly
from hf_zero.sharding.partition import clean_name
from hf_zero.sharding.unit import ShardUnit, UnitState

_CHILD = "module."


class ModuleCalls(ScriptCalls, nn.Module):
    """The base of ZeroEngine.

    As with any wrapper the names of parameters and of `state_dict()` begin with "module."; those of the model itself
    are `engine.module`'s. Attributes that are not the engine's are the model's. What the engine sets about the model
    (weights, types, places) goes through the shards or raises: nothing is changed beside them.
    """

    module: nn.Module

    @abc.abstractmethod
    def naming_shards(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model's `state_dict()` holds placeholders for what is sharded, where it raises elsewhere."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Python comes here for what neither the object nor its class has.
        model = self.__dict__.get("_modules", {}).get("module")
        if name == "module" and model is not None:
            return model
        if model is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(model, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its model, a {type(model).__name__}, has an attribute {name!r}"
            ) from None

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    # ---------------------------------------------------------------- mode and compilation
    @property
    def training(self) -> bool:
        """The model's: there is no mode of the engine's own."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        model = self.__dict__.get("_modules", {}).get("module")
        if model is not None:  # nn.Module's constructor sets it before there is a model
            model.training = mode

    @property
    def is_compiled(self) -> bool:
        return self.module._compiled_call_impl is not None

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Compile the model's forward in place, as `model.compile` does; `compile_kwargs` is DeepSpeed's name."""
        arguments = {**({} if backend is None else {"backend": backend}), **(compile_kwargs or {}), **kwargs}
        self.module.compile(**arguments)

    # ---------------------------------------------------------------- weights
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """nn.Module's: live tensors. A sharded parameter has name, shape and type; reading its values raises.

        No communication. For whole weights see `full_state_dict` and `save_16bit_model`.
        """
        with self.naming_shards():
            state = cast(dict[str, Any], super().state_dict(*args, **kwargs))
        hidden = self._sharded_now()
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name, param in self.named_parameters(remove_duplicate=False):
            if id(param) in hidden and prefix + name in state:
                state[prefix + name] = ShapeOnly(param, clean_name(name.removeprefix(_CHILD)))
        return state

    def _sharded_now(self) -> set[int]:
        """Parameters that are placeholders at the moment, by id."""
        away = [unit for unit in self.units if unit.on_demand and unit.state is not UnitState.FULL]
        return {id(param) for unit in away for buffer in unit.buffers for param in buffer.params}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Set weights and buffers from whole tensors, the same on every rank, master weights too. All ranks must call.

        Args:
            state_dict: Names with "module." in front, as `state_dict()` has them, or the model's own.
            assign: Ignored: the parameters stay where they are.
        Returns:
            (missing_keys, unexpected_keys), both empty where `strict`.
        Raises:
            CheckpointError: With `strict`, names that do not fit; other shapes.
        """
        self.require_all_ranks("load_state_dict")
        own = {name for name, _ in own_tensors(self.module)}
        foreign = all(name.startswith(_CHILD) for name in state_dict) and not own & state_dict.keys()
        given = {name.removeprefix(_CHILD) if foreign else name: value for name, value in state_dict.items()}
        self.load_full_state_dict(given, strict=strict)
        names = {clean_name(name) for name in given}
        return _IncompatibleKeys([] if strict else sorted(own - names), [] if strict else sorted(names - own))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ModuleCalls:
        """What `.to`, `.half`, `.float`, `.cuda` and the like come down to: fine where no parameter changes."""
        self._check_stays(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _check_stays(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        probed: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        for unit in self.units:
            for name, param in _members(unit):
                kind = (param.dtype, param.device)
                if kind not in probed:
                    probed[kind] = fn(torch.empty(1, dtype=param.dtype, device=param.device))
                moved = probed[kind]
                if (moved.dtype, moved.device) != kind:
                    raise StateError(
                        f"rank {self.rank}: {name} is {param.dtype} on {param.device} and belongs to the engine, "
                        f"which cannot cast or move it to {moved.dtype} on {moved.device}.\nSet the type in the "
                        "configuration (bf16.enabled, fp16.enabled, keep_fp32) or before hf_zero.initialize (dtype= "
                        "in from_pretrained); to move or cast a plain model call engine.teardown() first."
                    )

    # ---------------------------------------------------------------- copies
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A deep copy of a model whose parameters are whole is a plain model: it has no engine.
        if id(self.module) not in memo:
            raise StateError("an engine cannot be copied: copy its model, copy.deepcopy(engine.module)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            "an engine, or a model that has one, cannot be pickled.\nSave with engine.save_checkpoint, "
            "engine.save_16bit_model or model.save_pretrained; or call engine.teardown() before torch.save(model)."
        )


def _members(unit: ShardUnit) -> list[tuple[str, nn.Parameter]]:
    return [
        (slot.name, param)
        for buffer in unit.buffers
        for slot, param in zip(buffer.layout.slots, buffer.params, strict=True)
    ]
