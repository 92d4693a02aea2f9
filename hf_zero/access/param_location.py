"""The location of a parameter (engine, unit, flat parameter), and checks of values that are passed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.engine.engine import ZeroEngine, engine_of, live_engines
from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.runtime.edit_watch import fingerprint
from hf_zero.sharding.model_params import clean_name
from hf_zero.sharding.param_index import ParamIndex, ParamPlace

Target = nn.Module | nn.Parameter


@dataclass(frozen=True)
class ParamLocation(ParamPlace):
    """The location of a parameter that hf_zero manages."""

    engine: ZeroEngine

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slot.shape

    @property
    def optimizer(self) -> ShardedOptimizer:
        if self.engine.optimizer is None:
            raise StateError(
                "this model has no optimizer yet: hf_zero.initialize or engine.attach_optimizer gives it one"
            )
        return self.engine.optimizer


def find_parameter(target: Target, name: str | None) -> ParamLocation | None:
    """Return the location of a parameter, None if it is not managed; raise ConfigError for an unknown name."""
    param = plain_parameter(target, name)
    for engine in live_engines():
        if (place := ParamIndex(engine.units).get(param)) is not None:
            return ParamLocation(place.unit, place.flat, place.index, engine)
    return None


def plain_parameter(target: Target, name: str | None) -> nn.Parameter:
    """Return the parameter that `target` and `name` stand for; raise ConfigError for an unknown name."""
    if name is not None and not isinstance(name, str):
        raise ConfigError(
            f"the name of a parameter is a text, and a {type(name).__name__} was given.\nThe name comes last: "
            'full_param(model, "layer.weight"), set_full_param(model, value, "layer.weight"), or by keyword: name=...'
        )
    if not isinstance(target, torch.Tensor | nn.Module):
        raise ConfigError(f"expected a model or a parameter, and a {type(target).__name__} was given")
    if not isinstance(target, nn.Module):
        return target
    if name is None:
        raise ConfigError("which parameter? Pass the parameter itself, or the model and its `name` in it")
    return params_named(target, [name])[0]


def named_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters by plain name, tied ones by each of their names."""
    return {clean_name(path): param for path, param in module.named_parameters(remove_duplicate=False)}


def params_named(module: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters of these names; raise ConfigError for unknown ones."""
    known = named_params(module)
    engine = engine_of(module)
    if engine is not None and engine.module is not module:  # a wrapper around the model: its names count as well
        known = named_params(engine.module) | known
    wanted = [clean_name(name) for name in names]
    unknown = sorted({name for name in wanted if name not in known})
    if unknown:
        raise ConfigError(
            f"no parameter of this model is called {', '.join(unknown)}; names are those of model.named_parameters()"
        )
    return [known[name] for name in wanted]


def parameters_of(target: Target | Iterable[Target], names: Iterable[str] | None = None) -> list[nn.Parameter]:
    """The parameters that are meant by a model, a parameter or several of these, and `names` in one model."""
    if isinstance(target, nn.Module):
        return list(target.parameters()) if names is None else params_named(target, names)
    if names is not None:
        raise ConfigError("gathered_params: `names` are names in one module; pass the model, or parameters alone")
    if isinstance(target, nn.Parameter):
        return [target]
    if isinstance(target, str | torch.Tensor) or not isinstance(target, Iterable):
        raise ConfigError(
            f"gathered_params takes models, modules and parameters, not {target!r:.60}; by name: "
            "hf_zero.gathered_params(model, [name])"
        )
    return [param for one in target for param in parameters_of(one)]


# -------------------------------------------------------------------- what is passed for it
def managed_parameter(target: Target, name: str | None, what: str) -> ParamLocation:
    """Return the location of one parameter; raise StateError, for the call `what`, if hf_zero does not manage it."""
    place = find_parameter(target, name)
    if place is None:
        raise StateError(f"{what} is for parameters that hf_zero manages, and this is a plain one: use torch's own")
    return place


def check_value(
    place: ParamLocation,
    value: torch.Tensor | None,
    what: str,
    fits: Callable[[], None],
    *,
    same: bool,
    number: bool = False,
) -> None:
    """Raise ConfigError on all ranks unless each has a value that fits, and with `same` the same one.

    All ranks must call. `fits` raises ConfigError for another shape; with `number` a 0-dim value may be of any type.
    """

    def digest() -> int:
        if value is not None and not value.is_floating_point() and not (number and value.dim() == 0):
            kinds = f"{place.name} is {place.flat.dtype}, the value {value.dtype}"
            raise ConfigError(f"{what}: {kinds}: pass a float type")
        fits()
        return 0 if value is None else _digest(place, value)

    engine = place.engine
    engine.require_all_ranks(what)
    digests = engine.comm.agree(what, digest, ConfigError)
    others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if same and others:
        raise ConfigError(
            f"{what}: rank(s) {others} passed other values for {place.name} than rank 0. All ranks must pass the same "
            "(broadcast it first, or set it inside gathered_params(..., write_rank=0))."
        )


def _digest(place: ParamLocation, value: torch.Tensor) -> int:
    """Return a digest of `value` as it will be stored, so that ranks can compare.

    A tensor is digested in the dtype of its master, which every device has, and a number in fp64 on the host.
    """
    if value.dim() == 0:
        kept = torch.full((1,), float(value), dtype=torch.float64, device="cpu")
    else:
        kept = value.detach().to(place.flat.master_dtype, copy=True)  # a view may start anywhere
    return int(fingerprint(kept.reshape(-1)))
