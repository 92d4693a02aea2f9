"""Copies or mixes the weights of one model into another: from a policy into its reference, shard to shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.access.param_location import named_params
from hf_zero.engine.engine import engine_of
from hf_zero.errors import ConfigError, StateError
from hf_zero.layout import Slice
from hf_zero.runtime.full_weights import share_resident
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.model_params import tied_names
from hf_zero.sharding.param_index import ParamIndex, ParamPlace
from hf_zero.sharding.shard import slice_of
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
    pairs = _pairs(source, target)
    source_engine, engine = engine_of(source), engine_of(target)
    for one in (source_engine, engine):
        if one is not None:
            one.require_all_ranks("copy_weights")
            one.finish_updates()
    if engine is not None:
        engine.weights.check_idle(engine.units)
        for unit in engine.units:
            engine.params.reshard(unit)  # what was gathered ahead
    changed = _mix_all([pair for pair in pairs if pair.unit is None], tau)
    for unit in source_engine.units if source_engine is not None else ():  # the same order on all ranks
        if mine := [pair for pair in pairs if pair.unit is unit]:
            assert source_engine is not None
            with source_engine.weights.gathered([unit]):
                changed |= _mix_all(mine, tau)
    for flat in changed:
        flat.refresh()
        share_resident(flat)


@dataclass(frozen=True)
class _Pair:
    """A parameter of the target, and where its values come from."""

    param: nn.Parameter
    place: ParamPlace | None  # None: hf_zero does not manage it
    source: nn.Parameter
    source_flat: FlatParam | None  # where this rank reads its shard of the source; None: `source` is unsharded
    unit: ShardUnit | None  # of the source, to be gathered before

    @classmethod
    def of(cls, param: nn.Parameter, place: ParamPlace | None, source: nn.Parameter, at: ParamPlace | None) -> _Pair:
        if at is None or not at.flat.on_demand:
            return cls(param, place, source, None, None)
        if place is not None and place.flat.on_demand and _same_shards(at.flat, place.flat):
            return cls(param, place, source, at.flat, None)
        return cls(param, place, source, None, at.unit)

    def read(self, slice_: Slice) -> torch.Tensor:
        """1-D [slice_.numel]; a slice of an unsharded parameter may come from any layout."""
        return (
            slice_of(self.source.detach(), slice_)
            if self.source_flat is None
            else self.source_flat.shard.read_slice(slice_)
        )


def _plain(model: nn.Module) -> tuple[nn.Module, ParamIndex]:
    """`model` without wrappers, and where hf_zero keeps its parameters."""
    engine = engine_of(model)
    return (model, ParamIndex()) if engine is None else (engine.module, ParamIndex(engine.units))


def _pairs(source: nn.Module, target: nn.Module) -> list[_Pair]:
    (source, source_index), (target, index) = _plain(source), _plain(target)
    theirs, aliases = named_params(source), tied_names(target)
    pairs, problems = [], []
    for name, param in named_params(target).items():
        if name in aliases:
            continue
        if name not in theirs:
            problems.append(f"{name}: not in the source")
        elif theirs[name].shape != param.shape:
            shapes = tuple(theirs[name].shape), tuple(param.shape)
            problems.append(f"{name}: shape {shapes[0]} in the source, {shapes[1]} in the target")
        elif theirs[name] is param:
            raise StateError(f"copy_weights: {name} is one parameter in both models: there is nothing to copy")
        else:
            pairs.append(_Pair.of(param, index.get(param), theirs[name], source_index.get(theirs[name])))
    if problems:
        raise ConfigError("copy_weights: the models do not fit:\n  " + "\n  ".join(problems))
    return pairs


def _same_shards(a: FlatParam, b: FlatParam) -> bool:
    """Whether every rank owns the same elements of the same parameters; types and names of the units may differ."""
    mine, theirs = a.layout, b.layout
    same_sizes = (mine.world_size, mine.bucket_numel) == (theirs.world_size, theirs.bucket_numel)
    return same_sizes and (mine.padded_numel, mine.slots) == (theirs.padded_numel, theirs.slots)


def _mix_all(pairs: list[_Pair], tau: float) -> dict[FlatParam, None]:
    """Set or mix parameters; the flat parameters that are to be updated from what the ranks own, in order."""
    return dict.fromkeys(pair.place.flat for pair in pairs if _mix(pair, tau) and pair.place is not None)


def _mix(pair: _Pair, tau: float) -> bool:
    """Set or mix one parameter of the target: what this rank owns, or else all of it; whether it was the former."""
    if pair.place is None:
        _lerp(pair.param.data, pair.source.detach().to(pair.param.device), tau)
        return False
    flat = pair.place.flat
    if not flat.on_demand and pair.source_flat is None and flat.own_master is None:
        # Unsharded on both sides: every rank does the same to all of it.
        _lerp(pair.param.data, pair.source.detach(), tau)
        torch.autograd.graph.increment_version(pair.param)
        return False
    if (slice_ := pair.place.slice) is not None:
        theirs = pair.read(slice_)
        if tau != 1.0:
            mine = flat.best.read_slice(slice_).clone()
            theirs = _lerp(mine, theirs.to(mine.device), tau)
        flat.best.write_slice(slice_, theirs)
    return True


def _lerp(mine: torch.Tensor, theirs: torch.Tensor, tau: float) -> torch.Tensor:
    """Add tau * (theirs - mine) to `mine` in place, computed in at least fp32."""
    if tau == 1.0:
        return mine.copy_(theirs)
    wide = torch.promote_types(mine.dtype, torch.float32)
    return mine.copy_(torch.lerp(mine.to(wide), theirs.to(wide), tau))
