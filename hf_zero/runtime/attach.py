"""Everything that an engine puts on its model: hooks, guards, marks and attributes. It comes off and goes on again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.guards import DeepCopy, ModelGuards, ModelTree
from hf_zero.runtime.hooks import BackwardWatch, ModelHooks, in_backward
from hf_zero.runtime.loss_scale import LossScale
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.partition import UnitKind
from hf_zero.sharding.unit import ShardUnit

# Where transformers sees the first, generate runs on all ranks in step and LayerDrop runs every layer. torch.compile
# refuses a module with it, unless it has the second.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_FLATTEN = "flatten_parameters"


def _stay() -> None:
    """In the place of nn.RNNBase.flatten_parameters."""


@dataclass(frozen=True)
class Callbacks:
    """What the engine is asked or told."""

    forward_starts: Callable[[], None]
    forward_ends: Callable[[], None]
    backward_starts: Callable[[], None]
    backward_ends: Callable[[], None]
    state_dict: Callable[[], None]  # before model.state_dict()
    deepcopy: DeepCopy


@dataclass(frozen=True)
class Computes:
    """In which types a model computes."""

    input_dtype: torch.dtype | None  # floating inputs are cast to it
    autocast: torch.dtype | None  # the forward runs under torch.autocast with it
    loss_scale: LossScale


@dataclass(frozen=True)
class Fitted:
    """A model and what its engine made of it."""

    model: nn.Module
    units: list[ShardUnit]
    params: OnDemandParams
    reducer: GradReducer
    device: torch.device
    rank: int
    computes: Computes


class ModelAttachment:
    """Put on at construction; `uninstall` removes all of it.

    Args:
        attributes: Of the model itself, by name.
    """

    def __init__(self, fitted: Fitted, callbacks: Callbacks, attributes: dict[str, Any]) -> None:
        self._model = fitted.model
        self._tree: ModelTree | None = None
        self._rank = fitted.rank
        self._attributes = attributes
        self._hooks = ModelHooks()
        self._guards = ModelGuards(fitted.model, fitted.units, callbacks.deepcopy)
        self._hook(fitted, callbacks)
        fitted.model.__dict__.update(attributes)
        self._tree = ModelTree(fitted.model, fitted.units)
        for module in fitted.model.modules():
            if isinstance(module, nn.RNNBase):
                # On CUDA it moves the weights into memory of its own, where no update would find them.
                module.__dict__[_FLATTEN] = _stay
        if any(unit.on_demand for unit in fitted.units):
            for module in fitted.model.modules():
                module.__dict__.update(dict.fromkeys(_MARKS, True))

    def _hook(self, fitted: Fitted, callbacks: Callbacks) -> None:
        watch = BackwardWatch(callbacks.backward_starts, callbacks.backward_ends)
        self._hooks.on_state_dict(fitted.model, callbacks.state_dict)
        self._reducer = fitted.reducer
        self.on_gradients(fitted.reducer.accumulators)
        self._hooks.on_forward(fitted.model, functools.partial(self._starts, callbacks.forward_starts))
        self._hooks.on_forward_end(fitted.model, callbacks.forward_ends)
        computes = fitted.computes
        self._hooks.on_model(fitted.model, watch, computes.input_dtype, computes.loss_scale)
        if computes.autocast is not None:
            self._hooks.on_autocast(fitted.model, fitted.device.type, computes.autocast)
        if not any(unit.on_demand for unit in fitted.units):
            return
        for unit in fitted.units:
            if unit.kind is UnitKind.ROOT:  # a pass begins and ends there, whether it owns parameters or not
                self._hooks.on_root(unit, fitted.params, watch)
            elif unit.on_demand:
                self._hooks.on_layer(unit, fitted.params, watch, fitted.device.type)

    def _starts(self, forward_starts: Callable[[], None]) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self.check_model()
        forward_starts()

    def check_model(self) -> None:
        """Raise StateError if parameters of the model are not those that the engine trains and saves."""
        if self._tree is not None:
            self._tree.check(self._rank)

    def check_names(self) -> None:
        """Raise StateError if parameters of the model have other names than the engine knows them by."""
        if self._tree is not None:
            self._tree.check_names(self._rank)

    def on_gradients(self, accumulators: Iterable[GradAccumulator]) -> None:
        """Hand the gradients of their parameters to the reducer."""
        for acc in accumulators:
            self._hooks.on_gradients(acc.flat.params, acc.arriving)
            if acc.flat.layout.world_size == 1:  # the mean itself may be in param.grad
                for param in acc.flat.params:
                    self._hooks.before_gradient(param, self._reducer.shown)

    def uninstall(self) -> None:
        self._hooks.remove()
        self._guards.remove()
        for module in self._model.modules():
            for name in (*_MARKS, _FLATTEN):
                module.__dict__.pop(name, None)
        for name in self._attributes:
            self._model.__dict__.pop(name, None)
