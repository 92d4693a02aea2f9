"""Unshards parameters that are used outside of their layer's forward: a fused loss, a penalty, a child's weight.

[Note: Reads outside of a forward]
From the start of the model's forward to the end of its backward, reading `module.weight` of a resharded unit gathers
the unit. With gradients on it stays unsharded until the end of backward, because autograd looks at the parameter again
there, and it is whole in every further backward before the step. That costs the memory of that unit, and nothing where
nobody reads. All ranks must read the same parameters in the same order, as they must call the same layers. A compiled
graph takes what it finds, so other layers are to be read outside of it.

A parameter that was not taken from its module by name (in a loop over `model.parameters()`, or returned by a layer)
is gathered where its values are used first, and so is one that is used with gradients on before the forward. Without
gradients, outside of a forward and its backward, code runs on one rank as often as on all, and the use is an error.
The forward may be that of another model: a student's loss reads the head of its teacher.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.compiler import is_dynamo_compiling

from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.param_index import ParamIndex, ParamPlace
from hf_zero.sharding.unit import ShardUnit, UnitState

logger = logging.getLogger(__name__)
# Every model of this process has its own, in the order in which they were made: the same on all ranks.
_all: weakref.WeakKeyDictionary[OutsideReads, None] = weakref.WeakKeyDictionary()


class _OwnParameters(dict[str, Any]):
    """`module._parameters`, saying who reads what: nn.Module takes attributes by item."""

    def __init__(self, own: dict[str, Any], reads: OutsideReads) -> None:
        super().__init__(own)
        self.reads = reads

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        # A constant where torch.compile traces this: a graph of one layer serves all layers of its class.
        if param is not None and not is_dynamo_compiling() and self.reads.is_open:
            self.reads.on_read(param)
        return param


class OutsideReads:
    """Watches the modules of one model that own on-demand parameters. `remove` takes everything off."""

    def __init__(self, model: nn.Module, params: OnDemandParams) -> None:
        self._params = params
        self._index = ParamIndex(params.units)
        self._borrowed: list[ShardUnit] = []
        self._has_logged = False
        self.is_open = False
        self._modules = [
            module
            for module in model.modules()
            if any(param in self._index for param in module.parameters(recurse=False))
        ]
        for module in self._modules:
            module._parameters = _OwnParameters(module._parameters, self)
        for flat in params.flats:
            flat.watch_values(self.on_values)
        _all[self] = None

    def remove(self) -> None:
        self.is_open = False
        for flat in self._params.flats:
            if flat.on_values == self.on_values:
                flat.watch_values(None)
        for module in self._modules:
            own = module._parameters
            if isinstance(own, _OwnParameters) and own.reads is self:  # else a later engine watches it
                module._parameters = dict(own)
        self._modules.clear()

    def open(self) -> None:
        """A forward of the model begins: from here on a read means the value."""
        # Token by token every read counts: what is unsharded to the end is read as in a plain model.
        self.is_open = torch.is_grad_enabled() or not self._params.all_pinned

    def close(self) -> None:
        """End what `open` began: nothing of the forward is left to run, nor of its backward."""
        self.is_open = False
        for reads in _all:
            if not reads.is_open:
                reads._give_back()

    def _give_back(self) -> None:
        borrowed, self._borrowed = self._borrowed, []
        for unit in borrowed:
            self._params.after_use(unit)

    def on_read(self, param: Any) -> None:
        """`param` was taken from its module by name. See [Note: Reads outside of a forward]."""
        place = self._index.get(param)
        if place is None:
            return
        unit = place.unit
        if unit.state is not UnitState.UNSHARDED:
            with temporarily_clear_interpreter_stack():
                self._params.read(unit)
            self._borrowed.append(unit)
            self._log_first(place)
        if self._borrowed and unit in self._borrowed and torch.is_grad_enabled():
            self._params.hold_for_backward(unit)

    def on_values(self, param: nn.Parameter, writes: bool) -> bool:
        """Unshard `param`, whose values are needed; return whether it is unsharded now."""
        if writes or not (torch.is_grad_enabled() or any(reads.is_open for reads in _all)):
            return False
        self.on_read(param)
        return True

    def _log_first(self, place: ParamPlace) -> None:
        if not self._has_logged and place.flat.rank == 0:
            self._has_logged = True
            logger.warning(
                "%s was read outside of the forward of %s: it is gathered once more, and with gradients on it stays "
                "unsharded until the end of backward",
                place.slot.name,
                place.unit.name,
            )
