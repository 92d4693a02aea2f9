"""Sets one parameter, gradient or optimizer state, and reads and sets the slice of it that this rank owns.

The reading of full tensors is in full.py. At all stages and on all media; at stage 0 every rank owns everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.access.places import Place, Target, find_parameter, parameters_of, plain_parameter
from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.state_access import slice_of
from hf_zero.runtime.edit_watch import fingerprint
from hf_zero.sharding.flat_param import master_dtype_of


@dataclass(frozen=True)
class LocalPiece:
    """What this rank owns of one parameter, or of its gradient or state.

    `values` is a copy, 1-D, on the compute device, fp32 (fp64 for fp64 parameters): the elements of `ranges`, each
    (start, end) in the flattened full tensor, one behind the other. A state that is one number is 0-dim.
    """

    values: torch.Tensor
    ranges: tuple[tuple[int, int], ...]


# -------------------------------------------------------------------- full tensors
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

    In the place of what `full_grad` shows: the mean over ranks, after clipping if that has been done. Norms are
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
    place.optimizer.set_grad(place.buffer, place.index, _own_slice(place, value))


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
    place = _managed(target, name, "set_full_optimizer_state")
    value = torch.as_tensor(value)
    _check_full(place, value, "set_full_optimizer_state", number=True)
    if kind == "master":
        _set_full(place, value)
        return
    place.engine.finish_updates()
    number = value.dim() == 0 and place.shape != ()
    mine = value if number else _own_slice(place, value)
    place.optimizer.set_state(place.buffer, place.index, kind, mine, number=number)


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
    if not place.buffer.layout.trainable:
        return
    grad = place.optimizer.full_grad(place.buffer, place.index)
    if grad is not None:
        set_full_grad(param, update(grad, param))


# -------------------------------------------------------------------- this rank's slice
@torch.no_grad()
def local_param(target: Target, name: str | None = None) -> LocalPiece | None:
    """What this rank owns of a parameter: of its master weights where it has them; None if nothing.

    No communication: any rank may call. Args as for `full_param`.
    Raises:
        ConfigError: No parameter has this name.
        StateError: hf_zero does not manage the parameter; a delayed update has not been published.
    """
    place = _managed(target, name, "local_param")
    _wait_for_update(place, "local_param")
    shard = place.buffer.master if place.buffer.master is not None else place.buffer.shard
    run = place.run
    return None if run is None else _piece(place, shard.read_run(run))


@torch.no_grad()
def local_grad(target: Target, name: str | None = None) -> LocalPiece | None:
    """What this rank owns of a gradient as the step will use it, between backward and step.

    None if it owns nothing, or where no rank has a gradient. All ranks must call: they agree on which gradients there
    are. Args as for `full_grad`.
    Raises:
        ConfigError: No parameter has this name.
        StateError: Not all ranks called; hf_zero does not manage the parameter; the model has no optimizer yet.
    """
    place = _managed(target, name, "local_grad")
    place.engine.require_all_ranks("local_grad")
    return _piece(place, place.optimizer.local_grad(place.buffer, place.index))


@torch.no_grad()
def local_optimizer_state(target: Target, kind: str, name: str | None = None) -> LocalPiece | None:
    """What this rank owns of an optimizer state; None if nothing, or before the first update.

    No communication: any rank may call. Args as for `full_optimizer_state`.
    Raises:
        ConfigError: No parameter has this name.
        StateError: No such state (those there are are named); hf_zero does not manage the parameter; the model has no
            optimizer yet; a delayed update has not been published.
    """
    place = _managed(target, name, "local_optimizer_state")
    _wait_for_update(place, "local_optimizer_state")
    return _piece(place, place.optimizer.local_state(place.buffer, place.index, kind))


@torch.no_grad()
def set_local_param(target: Target, values: torch.Tensor | None, name: str | None = None) -> None:
    """Set what this rank owns of a parameter, master weights and 16-bit copy: 1-D, in the order of `local_param`.

    All ranks must call, with None where they own nothing. Where parameters are unsharded between uses they are
    gathered from the slices; at stage 0, where every rank owns everything, all must pass the same.
    Raises:
        ConfigError: Wrong number of elements or type, on all ranks.
        StateError: Not all ranks called; between forward and backward, or inside gathered_params.
    """
    place = _managed(target, name, "set_local_param")
    _check_local(place, values, "set_local_param")
    place.engine.weights.check_idle([place.unit])
    place.engine.finish_updates()
    place.engine.weights.set_piece(place.unit, place.buffer, place.run, values)


@torch.no_grad()
def set_local_grad(target: Target, values: torch.Tensor | None, name: str | None = None) -> None:
    """Replace what this rank owns of a gradient: 1-D, in the order of `local_grad`; see `set_full_grad`.

    All ranks must call, with None where they own nothing. Raises as `set_local_param` and `set_full_grad`.
    """
    place = _managed(target, name, "set_local_grad")
    _check_local(place, values, "set_local_grad")
    place.optimizer.set_grad(place.buffer, place.index, values)


@torch.no_grad()
def set_local_optimizer_state(target: Target, kind: str, values: torch.Tensor | None, name: str | None = None) -> None:
    """Replace what this rank owns of an optimizer state: 1-D, in the order of `local_optimizer_state`.

    All ranks must call, with None where they own nothing. "master" is `set_local_param`. Raises as that and
    `set_full_optimizer_state`.
    """
    if kind == "master":
        set_local_param(target, values, name)
        return
    place = _managed(target, name, "set_local_optimizer_state")
    _check_local(place, values, "set_local_optimizer_state")
    place.engine.finish_updates()
    place.optimizer.set_state(place.buffer, place.index, kind, values, number=False)


# -------------------------------------------------------------------- inside
def _managed(target: Target, name: str | None, what: str) -> Place:
    place = find_parameter(target, name)
    if place is None:
        raise StateError(f"{what} is for parameters that hf_zero manages, and this is a plain one: use torch's own")
    return place


def _set_full(place: Place, value: torch.Tensor) -> None:
    place.engine.weights.check_idle([place.unit])
    place.engine.finish_updates()
    place.engine.weights.set_unit(place.unit, {place.name: value})


def _own_slice(place: Place, value: torch.Tensor) -> torch.Tensor | None:
    run = place.run
    return None if run is None else slice_of(value, run)


def _piece(place: Place, values: torch.Tensor | None) -> LocalPiece | None:
    run = place.run
    if run is None or values is None:
        return None
    copied = values.to(place.engine.device, master_dtype_of(place.buffer.dtype), copy=True)
    ranges = tuple((piece.start, piece.end) for piece in run.pieces)
    return LocalPiece(copied if values.dim() == 0 else copied.reshape(-1), ranges)


def _wait_for_update(place: Place, what: str) -> None:
    """Nobody may be writing to the master."""
    if (optimizer := place.engine.optimizer) is not None:
        if optimizer.has_delayed_update:
            raise StateError(f"{what}: the last update is delayed; call engine.finish_updates() on every rank first")
        optimizer.rollback_early()
    place.buffer.finish_update()


def _check_full(place: Place, value: torch.Tensor, what: str, *, number: bool = False) -> None:
    """All ranks must call. Raises ConfigError on all of them if one has a value that does not fit, or another one."""

    def check() -> int:
        _check_type(place, value, what, number=number)
        if tuple(value.shape) != place.shape and not (number and value.dim() == 0):
            raise ConfigError(f"{what}: {place.name} has shape {place.shape}, the value {tuple(value.shape)}")
        return int(fingerprint(value.detach().to(torch.float64).reshape(-1)))

    _agree(place, what, check, same=True)


def _check_local(place: Place, values: torch.Tensor | None, what: str) -> None:
    def check() -> int:
        run = place.run
        want = 0 if run is None else run.numel
        if values is None:
            if want:
                raise ConfigError(f"{what}: this rank owns {want} elements of {place.name}, the value is None")
            return 0
        _check_type(place, values, what, number=False)
        if values.dim() != 1 or values.numel() != want:
            raise ConfigError(
                f"{what}: this rank owns {want} elements of {place.name}, the value has shape {tuple(values.shape)}"
            )
        return int(fingerprint(values.detach().to(torch.float64)))

    _agree(place, what, check, same=place.buffer.layout.world_size == 1)


def _check_type(place: Place, value: torch.Tensor, what: str, *, number: bool) -> None:
    if not value.is_floating_point() and not (number and value.dim() == 0):
        raise ConfigError(f"{what}: {place.name} is {place.buffer.dtype}, the value {value.dtype}: pass a float type")


def _agree(place: Place, what: str, check: Callable[[], int], *, same: bool) -> None:
    engine = place.engine
    engine.require_all_ranks(what)
    marks = engine.comm.together(what, check, catch=(ConfigError,), raise_as=ConfigError)
    others = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if same and others:
        raise ConfigError(
            f"{what}: rank(s) {others} passed other values for {place.name} than rank 0. All ranks must pass the same "
            "(broadcast it first, or set it inside gathered_params(..., write_rank=0))."
        )
