"""Copies or mixes the weights of one model into another: from a policy into its reference, shard to shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.access.places import named_params
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.errors import ConfigError, StateError
from hf_zero.layout import Run
from hf_zero.optim.state_access import slice_of
from hf_zero.runtime.full_weights import share_resident
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.param_index import ParamIndex, ParamPlace
from hf_zero.sharding.partition import tied_names
from hf_zero.sharding.unit import ShardUnit


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module, *, tau: float = 1.0) -> None:
    """`target = tau * source + (1 - tau) * target`, for every parameter of `target`. All ranks must call.

    Either model may be sharded, at any stage and in any type, or plain (then the same on all ranks). Where both are
    sharded alike, or the source is not sharded, nothing travels; else units of the source are gathered one by one. A
    target that is never sharded, while its masters are, is gathered from these. The values taken are those that
    forward uses; master weights of the target follow. The mix is computed in fp32 (fp64 for fp64 targets) and rounded
    once. Buffers are left alone.

    Args:
        source: Has every parameter of `target`, by name and shape; names inside torch.compile wrappers are plain ones.
        tau: Share of the source, from 0 to 1; 1 copies.
    Raises:
        ConfigError: Parameters of `target` that `source` does not have, or with another shape (all are listed); `tau`.
        StateError: Not all ranks called; one of the models is between forward and backward or gathered.
    """
    if not 0.0 <= tau <= 1.0:
        raise ConfigError(f"copy_weights: tau={tau}, expected a number from 0 to 1")
    values, wanted = _Source(source), _targets(target)
    _check_names(values, wanted)
    engine = engine_of(target)
    for one in (values.engine, engine):
        if one is not None:
            one.require_all_ranks("copy_weights")
            one.finish_updates()
    if engine is not None:
        engine.weights.check_idle(engine.units)
        for unit in engine.units:
            engine.params.reshard(unit)  # what was gathered ahead
    changed: dict[FlatParam, None] = {}
    for source_unit, mine in values.by_unit(wanted):
        with values.gathered(source_unit):
            for to, value in mine:
                if (flat := _mix(to, value, tau)) is not None:
                    changed[flat] = None
    for flat in changed:
        flat.refresh()
        share_resident(flat)


@dataclass(frozen=True)
class _Target:
    """A parameter of the target; a plain one has no place."""

    name: str
    param: nn.Parameter
    place: ParamPlace | None


@dataclass(frozen=True)
class _Value:
    """What a parameter of the source is: unsharded, or this rank's shard of it."""

    param: nn.Parameter
    flat: FlatParam | None  # None: `param` is unsharded

    def read(self, run: Run) -> torch.Tensor:
        """1-D [run.numel]; a run of an unsharded parameter may come from any layout."""
        return slice_of(self.param.detach(), run) if self.flat is None else self.flat.shard.read_run(run)


class _Source:
    """Where the values of the source model are, by parameter name."""

    def __init__(self, model: nn.Module) -> None:
        self.engine: ZeroEngine | None = engine_of(model)
        self.params = named_params(model if self.engine is None else self.engine.module)
        self._index = ParamIndex(self.engine.units if self.engine is not None else ())

    def by_unit(self, wanted: list[_Target]) -> Iterator[tuple[ShardUnit | None, list[tuple[_Target, _Value]]]]:
        """What to set, and from what: first what is at hand, then by the units that have to be gathered."""
        at_hand: list[tuple[_Target, _Value]] = []
        to_gather: dict[ShardUnit, list[tuple[_Target, _Value]]] = {}
        for to in wanted:
            param = self.params[to.name]
            place = self._index.get(param)
            if place is None or not place.flat.on_demand:
                at_hand.append((to, _Value(param, None)))
            elif to.place is not None and to.place.flat.on_demand and _same_shards(place.flat, to.place.flat):
                place.flat.finish_update()
                at_hand.append((to, _Value(param, place.flat)))
            else:
                to_gather.setdefault(place.unit, []).append((to, _Value(param, None)))
        yield None, at_hand
        assert self.engine is not None or not to_gather
        for unit in self.engine.units if self.engine is not None else ():  # the same order on all ranks
            if unit in to_gather:
                yield unit, to_gather[unit]

    def gathered(self, unit: ShardUnit | None) -> contextlib.AbstractContextManager[None]:
        if unit is None or self.engine is None:
            return contextlib.nullcontext()
        return self.engine.weights.gathered([unit])


def _targets(model: nn.Module) -> list[_Target]:
    engine = engine_of(model)
    plain = model if engine is None else engine.module
    index = ParamIndex(engine.units if engine is not None else ())
    aliases = tied_names(plain)
    own = {name: param for name, param in named_params(plain).items() if name not in aliases}
    return [_Target(name, param, index.get(param)) for name, param in own.items()]


def _check_names(source: _Source, wanted: list[_Target]) -> None:
    problems = []
    for to in wanted:
        if to.name not in source.params:
            problems.append(f"{to.name}: not in the source")
        elif source.params[to.name].shape != to.param.shape:
            shapes = tuple(source.params[to.name].shape), tuple(to.param.shape)
            problems.append(f"{to.name}: shape {shapes[0]} in the source, {shapes[1]} in the target")
        elif source.params[to.name] is to.param:
            raise StateError(f"copy_weights: {to.name} is one parameter in both models: there is nothing to copy")
    if problems:
        raise ConfigError("copy_weights: the models do not fit:\n  " + "\n  ".join(problems))


def _same_shards(a: FlatParam, b: FlatParam) -> bool:
    """Whether every rank owns the same elements of the same parameters; types and names of the units may differ."""
    mine, theirs = a.layout, b.layout
    same_sizes = (mine.world_size, mine.bucket_numel) == (theirs.world_size, theirs.bucket_numel)
    return same_sizes and (mine.padded_numel, mine.slots) == (theirs.padded_numel, theirs.slots)


def _mix(to: _Target, value: _Value, tau: float) -> FlatParam | None:
    """Set or mix one parameter of the target; the flat parameter that is to be updated from what the ranks own."""
    if to.place is None:
        _lerp(to.param.data, value.param.detach().to(to.param.device), tau)
        return None
    flat = to.place.flat
    if not flat.on_demand and value.flat is None and flat.own_master is None:
        # Unsharded on both sides: every rank does the same to all of it.
        _lerp(to.param.data, value.param.detach(), tau)
        torch.autograd.graph.increment_version(to.param)
        return None
    if (run := to.place.run) is not None:
        theirs = value.read(run)
        if tau != 1.0:
            mine = flat.best.read_run(run).clone()
            theirs = _lerp(mine, theirs.to(mine.device), tau)
        flat.best.write_run(run, theirs)
    return flat


def _lerp(mine: torch.Tensor, theirs: torch.Tensor, tau: float) -> torch.Tensor:
    """mine += tau * (theirs - mine) in place, computed in at least fp32."""
    if tau == 1.0:
        return mine.copy_(theirs)
    wide = torch.promote_types(mine.dtype, torch.float32)
    return mine.copy_(torch.lerp(mine.to(wide), theirs.to(wide), tau))
