"""TRL's hash of a model's weights, over shards.

`precompute_ref_log_probs` names its cache after a hash of every weight of the reference. TRL reads all values of one
state dict for it; those of a sharded one have none. Here its own function reads them unit by unit, on all ranks
together, so that the hash is that of the full model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.access.full import units_by_engine
from hf_zero.engine.engine import ZeroEngine
from hf_zero.runtime.full_weights import own_tensors
from hf_zero.sharding.unit import ShardUnit

_HASH = "hash_module"
_USERS = ("trl.trainer.dpo_trainer", "trl.trainer.kto_trainer")


def hash_over_shards() -> None:
    """Let TRL's trainers that are imported by now hash sharded models."""
    for module in (sys.modules.get(name) for name in _USERS):
        original = getattr(module, _HASH, None)
        if original is not None and not isinstance(original, _HashOverShards):
            setattr(module, _HASH, _HashOverShards(original))


class _HashOverShards:
    def __init__(self, original: Callable[[Any], str]) -> None:
        self._original = original

    def __call__(self, model: nn.Module) -> str:
        """All ranks must call where the model is sharded."""
        return self._original(_UnitByUnit(model))


class _UnitByUnit:
    """Gives the hash what it asks of a model: the values of its state dict, one after the other, on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: dict[int, tuple[ZeroEngine, ShardUnit]] = {
            id(param): (engine, unit)
            for engine, units in units_by_engine(model.parameters())
            for unit in units
            if unit.on_demand
            for flat in unit.flats
            for param in flat.params
        }
        self._read: dict[int, torch.Tensor] = {}  # the parameters of the unit that was read last

    def state_dict(self) -> dict[str, _Value]:
        return {name: _Value(self, tensor) for name, tensor in own_tensors(self._model)}

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._places:
            return tensor.detach().cpu()
        if id(tensor) not in self._read:
            engine, unit = self._places[id(tensor)]
            engine.require_all_ranks(f"TRL's {_HASH}")
            with engine.weights.gathered([unit]):
                params = (param for flat in unit.flats for param in flat.params)
                self._read = {id(param): param.detach().to("cpu", copy=True) for param in params}
        return self._read[id(tensor)]


class _Value:
    """A value of the state dict, which is read when the hash comes to it."""

    def __init__(self, source: _UnitByUnit, tensor: torch.Tensor) -> None:
        self._source = source
        self._tensor = tensor

    def cpu(self) -> torch.Tensor:
        return self._source.read(self._tensor)
