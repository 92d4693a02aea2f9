"""Reads and sets full parameters, gradients and optimizer state of a sharded model, at all stages and on all media."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from hf_zero.access.param_location import (
    ParamLocation,
    Target,
    check_value,
    find_parameter,
    managed_parameter,
    parameters_of,
    plain_parameter,
)
from hf_zero.engine.engine import ZeroEngine, live_engines
from hf_zero.engine.sharded_init import open_construction
from hf_zero.errors import ConfigError, StateError
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.shard import slice_of
from hf_zero.sharding.unit import ShardUnit


@contextlib.contextmanager
def gathered_params(
    target: Target | Iterable[Target], names: Iterable[str] | None = None, *, write_rank: int | None = None
) -> Iterator[None]:
    """Show full parameters inside the block, at every stage. All ranks must enter and leave together.

    May be nested, and entered between forward and backward, for reading. A block that writes may be inside those for
    reading, which show its edits from its end on. Forwards and `generate` inside need no further communication.
    Peak extra memory: the units of the named parameters at full size; where they stay unsharded after the block
    (stages 0-2, a block around it), a copy of them on the host of the writing rank. What is kept from inside
    (`state_dict()`, `param.data`) stays valid after the block at stage 3, and with it the memory of its unit.

    Args:
        target: A model, a module inside one, a parameter, or an iterable of these (a generator too). What hf_zero
            does not manage is left as it is: edits of it stay on the rank that made them. Inside `sharded_init`
            also what a constructor has put together so far, to initialise a child's weight there.
        names: Only these parameters of `target`, then one module: names as in its `named_parameters()`.
        write_rank: Rank whose edits are kept, masters included, when all ranks leave the block without an exception.
            None is for reading.
    Raises:
        ConfigError: A name is unknown (all unknown names are listed); `write_rank` is no rank.
        StateError: Not all ranks came, or they named other parameters. A write between forward and backward, or inside
            another block that writes to the same layer. On leaving with `write_rank`, on every rank and with no edit
            kept: another rank wrote something else, or a rank left by an exception (there that exception goes on). On
            leaving without, on every rank: some rank wrote in place, by what torch counts, which misses writes through
            `param.data`; at stage 3 such a write is lost, at stages 0-2 it has reached that rank's copy only.
    """
    chosen = parameters_of(target, names)
    with contextlib.ExitStack() as stack:
        managed = units_by_engine(chosen)
        construction = open_construction()
        if construction is not None:
            held = ParamIndex(unit for _, units in managed for unit in units)
            stack.enter_context(construction.gathered([p for p in chosen if p not in held], write_rank))
        for engine, units in managed:
            _check_ranks_agree(engine, units, write_rank)
            if write_rank is None:
                stack.enter_context(engine.weights.looked_at(units))
            else:
                stack.enter_context(engine.weights.edited(units, write_rank))
        yield


def full_param(target: Target, name: str | None = None) -> torch.Tensor:
    """A copy of one full parameter, in its own type, on its device. All ranks must call. Gathers its unit only.

    Args:
        target: The parameter itself, or the model and the parameter's `name` in it.
    Raises:
        ConfigError: No parameter has this name.
        StateError: Not all ranks called.
    """
    place = find_parameter(target, name)
    if place is None:
        return plain_parameter(target, name).detach().clone()
    place.engine.require_all_ranks("full_param")
    with place.engine.weights.gathered([place.unit]):
        return place.flat.params[place.index].detach().clone()


def full_grad(target: Target, name: str | None = None) -> torch.Tensor | None:
    """A copy of one parameter's full gradient as the step will use it, between backward and step.

    The mean over ranks of what this accumulation window has so far, clipped if it has been; 1 tensor of the
    parameter's shape in the accumulation type, on the compute device; None where no rank has a gradient. All ranks
    must call.

    Args:
        target: The parameter itself, or the model and the parameter's `name` in it.
    Raises:
        ConfigError: No parameter has this name.
        StateError: Not all ranks called; the model has no optimizer yet.
    """
    place = find_parameter(target, name)
    if place is None:
        grad = plain_parameter(target, name).grad
        return None if grad is None else grad.detach().clone()
    place.engine.require_all_ranks("full_grad")
    return place.optimizer.full_grad(place)


def full_optimizer_state(target: Target, kind: str, name: str | None = None) -> torch.Tensor | None:
    """A copy of one parameter's full optimizer state, such as "exp_avg", wherever it is kept.

    Of the parameter's shape, in the state's type, on the compute device; "master" gives the fp32 master weights (fp64
    for fp64 parameters), at any time; other kinds give None before the first update. All ranks must call.

    Args:
        target: The parameter itself, or the model and the parameter's `name` in it.
    Raises:
        ConfigError: No parameter has this name.
        StateError: Not all ranks called; the model has no optimizer yet; no such state (those there are are named).
    """
    place = find_parameter(target, name)
    if place is None:
        raise StateError(
            "full_optimizer_state reads the state of a model that hf_zero trains; read optimizer.state[param]"
        )
    place.engine.require_all_ranks("full_optimizer_state")
    place.engine.finish_updates()
    return place.optimizer.full_state(place, kind)


# -------------------------------------------------------------------- setting
@torch.no_grad()
def set_full_param(target: Target, value: torch.Tensor, name: str | None = None) -> None:
    """Set one full parameter: the master weights to `value`, the 16-bit copy to what it rounds to.

    All ranks must call, with the same `value` of the parameter's shape, of any floating type, on any device. No
    communication but the check of that.

    Args:
        target: The parameter itself, or the model and the parameter's `name` in it.
    Raises:
        ConfigError: Wrong shape or type, ranks with other values, no such name; on all ranks.
        StateError: Not all ranks called; between forward and backward, or inside gathered_params.
    """
    place = find_parameter(target, name)
    if place is None:
        plain_parameter(target, name).copy_(value)
        return
    _check_full(place, value, "set_full_param")
    _set_full(place, value)


@torch.no_grad()
def set_full_grad(target: Target, value: torch.Tensor, name: str | None = None) -> None:
    """Replace one parameter's gradient, between backward and step; the step uses it as it is.

    The value replaces what `full_grad` shows: the mean over ranks, after clipping if that has been done. Norms are
    computed again. A parameter without a gradient gets one. All ranks must call, with the same `value` of the
    parameter's shape.

    Args:
        target: The parameter itself, or the model and the parameter's `name` in it.
    Raises:
        ConfigError: Wrong shape or type, ranks with other values, no such name; on all ranks.
        StateError: Not all ranks called; the model has no optimizer yet; the parameter is frozen.
    """
    place = find_parameter(target, name)
    if place is None:
        param = plain_parameter(target, name)
        param.grad = value.to(param).clone()
        return
    _check_full(place, value, "set_full_grad")
    place.optimizer.set_grad(place, _own_slice(place, value))


@torch.no_grad()
def set_full_optimizer_state(target: Target, kind: str, value: torch.Tensor | float, name: str | None = None) -> None:
    """Replace one kind of a parameter's optimizer state, such as "exp_avg"; "master" is `set_full_param`.

    All ranks must call, with the same `value`: of the parameter's shape, or a number for a state that is one ("step").

    Args:
        target: The parameter itself, or the model and the parameter's `name` in it.
    Raises:
        ConfigError: Wrong shape or type, ranks with other values, no such name; on all ranks.
        StateError: Not all ranks called; the model has no optimizer yet; no such state, or none before the first
            update.
    """
    place = managed_parameter(target, name, "set_full_optimizer_state")
    value = torch.as_tensor(value)
    _check_full(place, value, "set_full_optimizer_state", number=True)
    if kind == "master":
        _set_full(place, value)
        return
    place.engine.finish_updates()
    number = value.dim() == 0 and place.shape != ()
    mine = value if number else _own_slice(place, value)
    place.optimizer.set_state(place, kind, mine, number=number)


def update_full_grads(
    target: Target | Iterable[Target], update: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradient of every parameter that has one by `update(gradient, parameter)`, one after the other.

    Between backward and step; see `full_grad` and `set_full_grad`. All ranks must call. The function gets a full
    gradient, which it may change in place, and the parameter as it is: a placeholder at stage 3 outside of
    gathered_params. It must return the same on every rank.

    Args:
        target: A model, a parameter, or an iterable of either.
    Raises:
        ConfigError: Wrong shape or type, ranks with other values; on all ranks.
        StateError: Not all ranks called; the model has no optimizer yet.
    """
    for param in parameters_of(target):
        _update_grad(param, update)


@torch.no_grad()
def _update_grad(param: nn.Parameter, update: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]) -> None:
    place = find_parameter(param, None)
    if place is None:
        if param.grad is not None:
            param.grad = update(param.grad, param)
        return
    if not place.flat.layout.trainable:
        return
    grad = place.optimizer.full_grad(place)
    if grad is not None:
        set_full_grad(param, update(grad, param))


# -------------------------------------------------------------------- inside
def units_by_engine(params: Iterable[nn.Parameter]) -> list[tuple[ZeroEngine, list[ShardUnit]]]:
    """The units that hold these parameters, in an order that is the same on all ranks."""
    params = list(params)
    indices = [(engine, ParamIndex(engine.units)) for engine in live_engines()]
    found = {engine: index for param in params for engine, index in indices if param in index}
    return [(engine, index.units_of(params)) for engine, index in found.items()]


def _check_ranks_agree(engine: ZeroEngine, units: list[ShardUnit], write_rank: int | None) -> None:
    """Collectives are matched by order: ranks that name other parameters would take each other's values."""
    if write_rank is not None and not 0 <= write_rank < engine.world_size:
        raise ConfigError(f"gathered_params: write_rank={write_rank}, but ranks are 0 to {engine.world_size - 1}")
    engine.require_all_ranks("gathered_params")
    mine = ([unit.name for unit in units], write_rank)
    everyone = engine.comm.all_gather_object(mine, "gathered_params")
    if any(theirs != mine for theirs in everyone):
        said = [f"rank {rank}: units {names[:5]}, write_rank={one}" for rank, (names, one) in enumerate(everyone)]
        raise StateError(
            "gathered_params was called for other parameters, or with another write_rank, on some ranks:\n"
            + "\n".join(said)
            + "\nGive all ranks the same arguments."
        )


def _set_full(place: ParamLocation, value: torch.Tensor) -> None:
    place.engine.weights.check_idle([place.unit])
    place.engine.finish_updates()
    place.engine.weights.set_unit(place.unit, {place.name: value})


def _own_slice(place: ParamLocation, value: torch.Tensor) -> torch.Tensor | None:
    slice_ = place.slice
    return None if slice_ is None else slice_of(value, slice_)


def _check_full(place: ParamLocation, value: torch.Tensor, what: str, *, number: bool = False) -> None:
    def fits() -> None:
        if tuple(value.shape) != place.shape and not (number and value.dim() == 0):
            raise ConfigError(f"{what}: {place.name} has shape {place.shape}, the value {tuple(value.shape)}")

    check_value(place, value, what, fits, same=True, number=number)
