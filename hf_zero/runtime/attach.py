"""Everything that an engine puts on its model: hooks, guards, marks and attributes. It comes off and goes on again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.runtime.backward_watch import BackwardWatch, PassEvents, in_backward
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.guards import DeepCopy, ModelGuards, ModelTree
from hf_zero.runtime.hooks import ModelHooks
from hf_zero.runtime.loss_scale import LossScale
from hf_zero.runtime.param_grads import ParamGrads
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.partition import UnitKind
from hf_zero.sharding.unit import ShardUnit

# The marks of a sharded module. For the first, transformers runs generate on all ranks in step and every layer of
# LayerDrop. torch.compile refuses a module with it, unless it has the second.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_FLATTEN = "flatten_parameters"


def _stay() -> None:
    """Do nothing, in the place of nn.RNNBase.flatten_parameters."""


@dataclass(frozen=True)
class ComputeTypes:
    """The types in which a model computes."""

    input_dtype: torch.dtype | None  # floating inputs are cast to it
    autocast: torch.dtype | None  # the forward runs under torch.autocast with it
    loss_scale: LossScale


@dataclass(frozen=True)
class ModelContext:
    """A model and what its engine made of it."""

    model: nn.Module
    units: list[ShardUnit]
    params: OnDemandParams
    grads: list[GradAccumulator]
    param_grads: ParamGrads
    device: torch.device
    rank: int
    types: ComputeTypes


class ModelAttachment:
    """Put on at construction; `uninstall` removes all of it.

    Args:
        deepcopy: Copies the model, or a module in it.
        attributes: What the model itself gets, by name.
    """

    def __init__(
        self, context: ModelContext, events: PassEvents, deepcopy: DeepCopy, attributes: dict[str, Any]
    ) -> None:
        self._model = context.model
        self._tree: ModelTree | None = None
        self._rank = context.rank
        self._attributes = attributes
        self._hooks = ModelHooks()
        self._guards = ModelGuards(context.model, context.units, deepcopy)
        self._events = events
        self._watch = BackwardWatch(events)
        self._param_grads = context.param_grads
        self._hook(context)
        context.model.__dict__.update(attributes)
        self._tree = ModelTree(context.model, context.units)
        for module in context.model.modules():
            if isinstance(module, nn.RNNBase):
                # On CUDA it moves the weights into memory of its own, where no update would find them.
                module.__dict__[_FLATTEN] = _stay
        if any(unit.on_demand for unit in context.units):
            for module in context.model.modules():
                module.__dict__.update(dict.fromkeys(_MARKS, True))

    def _hook(self, context: ModelContext) -> None:
        watch, types = self._watch, context.types
        self._hooks.on_state_dict(context.model, self._events)
        self.on_gradients(context.grads)
        self._hooks.on_forward(context.model, self._begin_forward)
        self._hooks.on_forward_end(context.model, self._events)
        self._hooks.on_model(context.model, watch, types.input_dtype, types.loss_scale)
        if types.autocast is not None:
            self._hooks.on_autocast(context.model, context.device.type, types.autocast)
        if not any(unit.on_demand for unit in context.units):
            return
        for unit in context.units:
            if unit.kind is UnitKind.ROOT:  # a pass begins and ends there, whether it owns parameters or not
                self._hooks.on_root(unit, context.params, watch)
            elif unit.on_demand:
                self._hooks.on_layer(unit, context.params, watch, context.device.type)

    def _begin_forward(self) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self.check_model()
        self._events.begin_forward()

    def check_model(self) -> None:
        """Raise StateError if parameters of the model are not those that the engine trains and saves."""
        if self._tree is not None:
            self._tree.check(self._rank)

    def check_names(self) -> None:
        """Raise StateError if parameters of the model have other names than the engine knows them by."""
        if self._tree is not None:
            self._tree.check_names(self._rank)

    def on_gradients(self, accumulators: Iterable[GradAccumulator]) -> None:
        """Let the accumulators have the gradients of their parameters."""
        for acc in accumulators:
            self._hooks.on_gradients(acc.flat.params, acc, self._watch)
            if acc.flat.layout.world_size == 1:  # the mean itself may be in param.grad
                for param in acc.flat.params:
                    self._hooks.before_gradient(param, self._param_grads)

    def uninstall(self) -> None:
        self._hooks.remove()
        self._guards.remove()
        for module in self._model.modules():
            for name in (*_MARKS, _FLATTEN):
                module.__dict__.pop(name, None)
        for name in self._attributes:
            self._model.__dict__.pop(name, None)
