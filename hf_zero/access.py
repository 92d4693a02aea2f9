"""Whole parameters of a sharded model, for reading and for editing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from hf_zero.engine import ZeroEngine, engine_of
from hf_zero.errors import ConfigError
from hf_zero.shard.partition import clean_name, tied_names
from hf_zero.shard.unit import ShardUnit


@contextlib.contextmanager
def gathered_params(
    model: nn.Module, names: Iterable[str] | None = None, *, write_rank: int | None = None
) -> Iterator[None]:
    """Show whole parameters inside the block, at every stage.

    All ranks must enter and leave together. May be nested for reading. Peak extra memory: the units of the named
    parameters at full size.

    Args:
        model: The model that hf_zero manages; any other module is left as it is.
        names: Parameter names as in `model.named_parameters()`; None means all.
        write_rank: Rank whose edits are kept on exit. None means that edits are lost.
    Raises:
        ConfigError: A name is unknown (all unknown names are listed).
        StateError: A write while units are in use, between forward and backward.
    """
    engine = engine_of(model)
    if engine is None:
        yield
        return
    with engine.weights.gathered(_units_of(engine, model, names), write_rank):
        yield


def full_param(model: nn.Module, name: str) -> torch.Tensor:
    """A copy of one whole parameter, on its device. All ranks must call."""
    with gathered_params(model, [name]):
        return dict(model.named_parameters(remove_duplicate=False))[name].detach().clone()


def _units_of(engine: ZeroEngine, model: nn.Module, names: Iterable[str] | None) -> list[ShardUnit]:
    units = engine.units
    if names is None:
        return list(units)
    aliases = tied_names(model)
    wanted = {aliases.get(clean_name(name), clean_name(name)) for name in names}
    known = {slot.name: unit for unit in units for buffer in unit.buffers for slot in buffer.layout.slots}
    unknown = sorted(wanted - known.keys())
    if unknown:
        raise ConfigError(
            f"no parameter of this model is called {', '.join(unknown)}; names are those of model.named_parameters()"
        )
    return list({id(known[name]): known[name] for name in sorted(wanted)}.values())
