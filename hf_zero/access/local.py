"""Reads and sets the slice that this rank owns of one parameter, gradient or optimizer state.

At all stages and on all media; at stage 0 every rank owns everything. Full tensors are in full.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.access.param_location import ParamLocation, Target, check_value, managed_parameter
from hf_zero.errors import ConfigError, StateError


@dataclass(frozen=True)
class LocalPiece:
    """The part of one parameter, gradient or optimizer state that this rank owns.

    `values` is a copy, 1-D, on the compute device, fp32 (fp64 for fp64 parameters): the elements of `ranges`, each
    (start, end) in the flattened full tensor, one behind the other. A state that is one number is 0-dim.
    """

    values: torch.Tensor
    ranges: tuple[tuple[int, int], ...]


@torch.no_grad()
def local_param(target: Target, name: str | None = None) -> LocalPiece | None:
    """Return this rank's part of a parameter, of its master weights if it has them; None if it owns nothing.

    No communication: any rank may call. Args as for `full_param`.
    Raises:
        ConfigError: No parameter has this name.
        StateError: hf_zero does not manage the parameter; a delayed update has not been published.
    """
    place = managed_parameter(target, name, "local_param")
    _wait_for_update(place, "local_param")
    return None if place.slice is None else _piece(place, place.flat.best.read_slice(place.slice))


@torch.no_grad()
def local_grad(target: Target, name: str | None = None) -> LocalPiece | None:
    """Return this rank's part of a gradient as the step will use it, between backward and step.

    None if it owns nothing, or where no rank has a gradient. All ranks must call: they agree on which gradients there
    are. Args as for `full_grad`.
    Raises:
        ConfigError: No parameter has this name.
        StateError: Not all ranks called; hf_zero does not manage the parameter; the model has no optimizer yet.
    """
    place = managed_parameter(target, name, "local_grad")
    place.engine.require_all_ranks("local_grad")
    return _piece(place, place.optimizer.local_grad(place))


@torch.no_grad()
def local_optimizer_state(target: Target, kind: str, name: str | None = None) -> LocalPiece | None:
    """Return this rank's part of an optimizer state; None if it owns nothing, or before the first update.

    No communication: any rank may call. Args as for `full_optimizer_state`.
    Raises:
        ConfigError: No parameter has this name.
        StateError: No such state (those there are are named); hf_zero does not manage the parameter; the model has no
            optimizer yet; a delayed update has not been published.
    """
    place = managed_parameter(target, name, "local_optimizer_state")
    _wait_for_update(place, "local_optimizer_state")
    return _piece(place, place.optimizer.local_state(place, kind))


@torch.no_grad()
def set_local_param(target: Target, values: torch.Tensor | None, name: str | None = None) -> None:
    """Set what this rank owns of a parameter, master weights and 16-bit copy: 1-D, in the order of `local_param`.

    All ranks must call, with None where they own nothing. Where parameters are unsharded between uses they are
    gathered from the slices; at stage 0, where every rank owns everything, all must pass the same.
    Raises:
        ConfigError: Wrong number of elements or type, on all ranks.
        StateError: Not all ranks called; between forward and backward, or inside gathered_params.
    """
    place = managed_parameter(target, name, "set_local_param")
    _check_local(place, values, "set_local_param")
    place.engine.weights.check_idle([place.unit])
    place.engine.finish_updates()
    place.engine.weights.set_piece(place.unit, place.flat, place.slice, values)


@torch.no_grad()
def set_local_grad(target: Target, values: torch.Tensor | None, name: str | None = None) -> None:
    """Replace what this rank owns of a gradient: 1-D, in the order of `local_grad`; see `set_full_grad`.

    All ranks must call, with None where they own nothing. Raises as `set_local_param` and `set_full_grad`.
    """
    place = managed_parameter(target, name, "set_local_grad")
    _check_local(place, values, "set_local_grad")
    place.optimizer.set_grad(place, values)


@torch.no_grad()
def set_local_optimizer_state(target: Target, kind: str, values: torch.Tensor | None, name: str | None = None) -> None:
    """Replace what this rank owns of an optimizer state: 1-D, in the order of `local_optimizer_state`.

    All ranks must call, with None where they own nothing. "master" is `set_local_param`. Raises as that and
    `set_full_optimizer_state`.
    """
    if kind == "master":
        set_local_param(target, values, name)
        return
    place = managed_parameter(target, name, "set_local_optimizer_state")
    _check_local(place, values, "set_local_optimizer_state")
    place.engine.finish_updates()
    place.optimizer.set_state(place, kind, values, number=False)


# -------------------------------------------------------------------- inside
def _piece(place: ParamLocation, values: torch.Tensor | None) -> LocalPiece | None:
    slice_ = place.slice
    if slice_ is None or values is None:
        return None
    copied = values.to(place.engine.device, place.flat.master_dtype, copy=True)
    ranges = tuple((piece.start, piece.end) for piece in slice_.pieces)
    return LocalPiece(copied if values.dim() == 0 else copied.reshape(-1), ranges)


def _wait_for_update(place: ParamLocation, what: str) -> None:
    """Nobody may be writing to the master."""
    if (optimizer := place.engine.optimizer) is not None:
        if optimizer.has_delayed_update:
            raise StateError(f"{what}: the last update is delayed; call engine.finish_updates() on every rank first")
        optimizer.rollback_early()
    place.flat.finish_update()


def _check_local(place: ParamLocation, values: torch.Tensor | None, what: str) -> None:
    def fits() -> None:
        slice_ = place.slice
        want = 0 if slice_ is None else slice_.numel
        if values is None and want:
            raise ConfigError(f"{what}: this rank owns {want} elements of {place.name}, the value is None")
        if values is not None and (values.dim() != 1 or values.numel() != want):
            raise ConfigError(
                f"{what}: this rank owns {want} elements of {place.name}, the value has shape {tuple(values.shape)}"
            )

    check_value(place, values, what, fits, same=place.flat.layout.world_size == 1)
