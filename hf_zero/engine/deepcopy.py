"""`copy.deepcopy` of a model in shards, and of a module in it.

A copy of the model itself is sharded too, under an engine for inference of its own: a reference, a teacher. A copy of
a module below it is a plain module with unsharded parameters: what PEFT keeps beside the one it trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.runtime.build import build_units
from hf_zero.runtime.full_weights import FullWeights
from hf_zero.runtime.unit_specs import BuildSettings
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.shard import placeholder
from hf_zero.sharding.unit import ShardUnit, UnitState


class Engine(Protocol):
    """The members of an engine that a copy uses."""

    module: nn.Module
    config: ResolvedConfig
    comm: Comm
    units: list[ShardUnit]
    weights: FullWeights

    def require_all_ranks(self, name: str) -> None: ...
    def finish_updates(self) -> None: ...
    def suspended(self) -> AbstractContextManager[None]: ...


def deepcopy_of(engine: Engine, module: nn.Module, memo: dict[int, Any], new_engine: Callable[..., Any]) -> nn.Module:
    """A deep copy of `module`, the model of `engine` or a part of it. All ranks must call.

    `new_engine` has ZeroEngine's arguments.
    """
    engine.require_all_ranks(f"copy.deepcopy of a {type(module).__name__}")
    engine.finish_updates()
    return _copy_model(engine, memo, new_engine) if module is engine.module else _copy_part(engine, module, memo)


def _copy_model(engine: Engine, memo: dict[int, Any], new_engine: Callable[..., Any]) -> nn.Module:
    """Shards are copied as they are; masters, gradients and optimizer state are not."""
    with engine.suspended():
        for unit in engine.units:
            for param in (param for flat in unit.flats for param in flat.params):
                data = placeholder(param.shape, param.dtype, param.device)
                memo[id(param)] = nn.Parameter(data, requires_grad=param.requires_grad)
        copied: nn.Module = copy.deepcopy(engine.module, memo)
    settings = BuildSettings.of(engine.config, train=False)
    built = build_units(copied, settings, engine.comm, _Twins(engine.units, memo).initialize)
    new_engine(copied, engine.config, built=built, train=False)
    return copied


def _copy_part(engine: Engine, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    with engine.weights.gathered(ParamIndex(engine.units).units_of(module.parameters())), engine.suspended():
        for param in module.parameters():
            memo[id(param)] = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
        return copy.deepcopy(module, memo)


class _Twins:
    """Gives a copied model's flat parameters the values of the original's."""

    def __init__(self, units: list[ShardUnit], memo: dict[int, Any]) -> None:
        self._index = ParamIndex(units)
        params = (param for unit in units for flat in unit.flats for param in flat.params)
        self._original_of: dict[nn.Parameter, nn.Parameter] = {memo[id(param)]: param for param in params}

    def initialize(self, flat: FlatParam) -> None:
        """All ranks must call, in the same order."""
        originals = [self._original_of[param] for param in flat.params]
        source = self._index[originals[0]].flat if originals else None
        if source is not None and flat.fits(source, originals):
            flat.initialize_from(source, share=False)
            return
        units = [unit for unit in self._index.units_of(originals) if unit.state is UnitState.SHARDED]
        with torch.no_grad():
            for unit in units:
                unit.unshard()
                unit.wait_for_unshard()
            for param, original in zip(flat.params, originals, strict=True):
                param.data = original.detach().clone()
            flat.initialize_from_params()
            for unit in units:
                unit.reshard()
