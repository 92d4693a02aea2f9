"""Whole parameters, gradients and optimizer state of a sharded model, for reading; parameters for editing too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.engine import ZeroEngine, engine_of, live_engines
from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.shards.buffer import FlatBuffer
from hf_zero.shards.partition import clean_name, tied_names
from hf_zero.shards.unit import ShardUnit


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


def full_param(target: nn.Module | nn.Parameter, name: str | None = None) -> torch.Tensor:
    """A copy of one whole parameter, on its device. All ranks must call.

    Args:
        target: The parameter itself, or the model and the parameter's `name` in it.
    """
    found = _find(target, name)
    if found is None:
        return _plain(target, name).detach().clone()
    with found.engine.weights.gathered([found.unit]):
        return found.buffer.params[found.index].detach().clone()


def full_grad(target: nn.Module | nn.Parameter, name: str | None = None) -> torch.Tensor | None:
    """A copy of one parameter's whole gradient as the step will use it, between backward and step.

    The mean over ranks of what this window has accumulated so far, clipped if it has been; 1 tensor of the
    parameter's shape in the accumulation type, on the compute device; None where no rank has a gradient. All ranks
    must call.

    Args:
        target: The parameter itself, or the model and the parameter's `name` in it.
    Raises:
        StateError: Not all ranks called; the model has no optimizer yet.
    """
    found = _find(target, name)
    if found is None:
        grad = _plain(target, name).grad
        return None if grad is None else grad.detach().clone()
    found.engine.require_all_ranks("full_grad")
    return _optimizer(found).full_grad(found.buffer, found.index)


def full_optimizer_state(target: nn.Module | nn.Parameter, kind: str, name: str | None = None) -> torch.Tensor | None:
    """A copy of one parameter's whole optimizer state, such as "exp_avg", wherever it is kept.

    Of the parameter's shape, in the state's type, on the compute device; "master" gives the fp32 master weights; None
    before the first update. All ranks must call.

    Args:
        target: The parameter itself, or the model and the parameter's `name` in it.
    Raises:
        StateError: Not all ranks called; the model has no optimizer yet; no such state (those there are are named).
    """
    found = _find(target, name)
    if found is None:
        raise StateError(
            "full_optimizer_state reads the state of a model that hf_zero trains; read optimizer.state[param]"
        )
    found.engine.require_all_ranks("full_optimizer_state")
    found.engine.finish_updates()
    return _optimizer(found).full_state(found.buffer, found.index, kind)


@dataclass(frozen=True)
class _Found:
    engine: ZeroEngine
    unit: ShardUnit
    buffer: FlatBuffer
    index: int  # of the parameter in the buffer


def _find(target: nn.Module | nn.Parameter, name: str | None) -> _Found | None:
    """Where hf_zero keeps a parameter; None if it does not."""
    param = _plain(target, name)
    engines = [engine_of(target)] if isinstance(target, nn.Module) else list(live_engines())
    for engine in engines:
        for unit in engine.units if engine is not None else ():
            for buffer in unit.buffers:
                for index, mine in enumerate(buffer.params):
                    if mine is param:
                        assert engine is not None
                        return _Found(engine, unit, buffer, index)
    return None


def _plain(target: nn.Module | nn.Parameter, name: str | None) -> nn.Parameter:
    if not isinstance(target, nn.Module):
        return target
    named = {clean_name(path): param for path, param in target.named_parameters(remove_duplicate=False)}
    if name is None or clean_name(name) not in named:
        raise ConfigError(f"no parameter of this model is called {name}; names are those of model.named_parameters()")
    return named[clean_name(name)]


def _optimizer(found: _Found) -> ShardedOptimizer:
    if found.engine.optimizer is None:
        raise StateError("this model has no optimizer yet: hf_zero.initialize or engine.attach_optimizer gives it one")
    return found.engine.optimizer


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
