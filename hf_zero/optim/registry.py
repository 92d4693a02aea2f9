"""Decides if an optimizer's update is right on shards, who can make it, and its fused form. See `optimizer_types.py`.

A shard is a range of elements. An optimizer is right on it if it treats every element by itself; one that looks at the
full matrix, at its shape, or at all parameters together needs more, or is refused by name.

[Note: Subclasses]
A subclass is taken for the known class above it only if it updates by that class' own code. One that has a step of its
own may do so to look at a row, a norm or a sign count before it calls the other one: nobody knows what it needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero import optim
from hf_zero.errors import ConfigError
from hf_zero.optim.elementwise_trial import DIFFERS, why_not_elementwise
from hf_zero.optim.optimizer_types import (
    ELEMENTWISE_INSTEAD,
    INSTEAD,
    OPTIMIZERS,
    REFUSED,
    OptimizerType,
    Updates,
)
from hf_zero.optim.optimizers.base import CheckedOptimizer
from hf_zero.optim.optimizers.muon import Muon

# A subclass, or an instance, may replace these of a known class: they are no part of an update.
_NO_UPDATE = frozenset(["__init__", "__repr__", "__doc__", "__module__", "add_param_group", "zero_grad", "state_dict"])
# torch wraps an optimizer's methods in these files: profiling and hooks, the counts of schedulers.
_WRAPPERS = frozenset(
    kind.__init__.__code__.co_filename for kind in (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
)


@dataclass(frozen=True)
class _Kind:
    """The facts that are known of an optimizer's class. See [Note: Subclasses].

    Args:
        known: The first class above it that has an entry here; None if none has.
        below: The classes before that one.
        changed: The names of code that these, or the instance, have instead of its own.
    """

    known: type | None
    spec: OptimizerType | None
    below: Sequence[type]
    changed: Sequence[str]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Kind:
        kinds = type(optimizer).__mro__
        found = ((place, kind, spec) for place, kind in enumerate(kinds) if (spec := _entry(kind)) is not None)
        place, known, spec = next(found, (len(kinds), None, None))
        layers = [vars(optimizer), *map(vars, kinds[:place])] if known is not None else []
        changed = [name for layer in layers for name, value in layer.items() if _replaces(known, name, value)]
        return cls(known, spec, kinds[:place], list(dict.fromkeys(changed)))


def _entry(kind: type) -> OptimizerType | None:
    """The entry of exactly this class."""
    module = "torch.optim" if kind.__module__.startswith("torch.optim") else kind.__module__
    return OPTIMIZERS.get(f"{module}.{kind.__name__}")


def _replaces(known: type | None, name: str, value: Any) -> bool:
    """Whether `value` is other code than that which `known` has under this name."""
    own = getattr(known, name, None)
    return name not in _NO_UPDATE and callable(own) and _unwrapped(value) is not _unwrapped(own)


def _unwrapped(function: Any) -> Any:
    """`function` without what torch has put around it: it does so in the class of the first instance."""
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__") and function.__code__.co_filename in _WRAPPERS:
        function = function.__wrapped__
    return function


def _spec_of(optimizer: torch.optim.Optimizer) -> OptimizerType | None:
    """The entry of its class, or of the known class above it whose updates it makes."""
    kind = _Kind.of(optimizer)
    return None if kind.changed else kind.spec


# ---------------------------------------------------------------- what a user brings
def needs_unsharded(optimizer: torch.optim.Optimizer) -> Callable[[Mapping[str, Any]], bool] | None:
    """A test for param groups that need unsharded parameters and can have them; None if no group does."""
    spec = _spec_of(optimizer)
    if spec is None or spec.updates is not Updates.PARAMETERS:
        return None
    return spec.groups or (lambda group: True)


def check_optimizer(
    optimizer: torch.optim.Optimizer, *, sharded: bool, allow_untested: bool | None, device: torch.device
) -> None:
    """Raise ConfigError if `optimizer` cannot be right, or is not known to be, on shards.

    Args:
        sharded: False at stage 0, where every rank updates unsharded parameters and any optimizer is right.
        allow_untested: `zero_allow_untested_optimizer`: take a class that hf_zero does not know as elementwise. None:
            if a trial on `device` shows it.
    """
    if not sharded:
        return
    kind = _Kind.of(optimizer)
    if kind.spec is not None and kind.spec.updates is Updates.REPLICAS:
        raise ConfigError(
            "optimizer OneBitAdam needs stage 0: each rank compresses the momentum of full parameters, made of its "
            "own gradient.\nSet zero_optimization.stage to 0, or use torch.optim.AdamW."
        )
    changed = [kind.known] if kind.changed and kind.known is not None else []
    for name in (one.__name__ for one in (*kind.below, *changed)):
        if name in REFUSED:
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} cannot be right on shards: it needs {REFUSED[name]}, and at "
                "stages 1-3 a rank holds only a range of elements.\n"
                f"Use {INSTEAD.get(name, ELEMENTWISE_INSTEAD)}, or stage 0."
            )
    if (kind.spec is None or kind.changed) and not allow_untested:
        why_not = "" if allow_untested is False else why_not_elementwise(optimizer, device)
        if why_not is None:
            return
        own = f", whose {', '.join(kind.changed)} is not that of {changed[0].__name__}," if changed else ""
        raise ConfigError(
            f"optimizer {_name(optimizer)}{own} is not known to treat every element by itself, and at stages 1-3 it "
            f"would see ranges of elements instead of full parameters{why_not and ': '}{why_not}.\n"
            f"{'Use' if why_not == DIFFERS else 'If it does, set zero_allow_untested_optimizer: true; else use'} "
            "torch.optim.AdamW or stage 0. What is done to full gradients before a step can be done by "
            "hf_zero.update_full_grads."
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of `optimizer` cannot be called without a function that evaluates the loss."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_native(optimizer: torch.optim.Optimizer, *, scaled: bool = False) -> None:
    """Raise ConfigError if hf_zero's own Adam, of offloaded or of scaled states, cannot do what `optimizer` would."""
    kinds = "torch.optim.Adam and torch.optim.AdamW" if scaled else "torch.optim.Adam, torch.optim.AdamW and CPUAdam"
    wrong = "cannot have states of 8 and 16 bits (msamp)" if scaled else "cannot update offloaded states"
    other = 'set msamp.opt_level to "O1"'
    if not scaled:
        other = (
            'run it in torch, on the host, with "zero_force_ds_cpu_optimizer": false (offload_optimizer.device "cpu" '
            "only)"
        )
    spec = _spec_of(optimizer)
    if spec is None or not spec.is_native or (scaled and not type(optimizer).__module__.startswith("torch.optim")):
        raise ConfigError(
            f"optimizer {_name(optimizer)} {wrong}: hf_zero's own update serves {kinds}.\n"
            f"Use one of these, or {other}."
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "capturable", "differentiable"):
            if group.get(option):
                raise ConfigError(
                    f"optimizer {type(optimizer).__name__}({option}=True) {wrong}: hf_zero's own Adam does not have "
                    f"it.\nRemove {option}, or {other}."
                )


def check_capturable(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError if torch could not make the first step of `groups`, whose elements are updated on the CPU."""
    known = _Kind.of(optimizer).known
    is_torchs = known is not None and known.__module__.startswith("torch.optim")
    if is_torchs and any(group.get("capturable") for group in groups):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}(capturable=True), or optimizer.params.capturable = true, cannot "
            "update on device cpu: torch keeps step counts on accelerators only.\n"
            "Remove capturable, or keep optimizer states on an accelerator (no offload_optimizer)."
        )


def check_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError if one of hf_zero's own optimizers cannot train `params` with the settings of `group`.

    On shards the optimizer itself gets slices, and does not see the parameters' shapes.
    """
    if isinstance(optimizer, CheckedOptimizer):
        optimizer.check_group({**optimizer.defaults, **group, "params": params})


def check_unsharded_types(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], types: Collection[torch.dtype]
) -> None:
    """Raise ConfigError if one rank's part of a group, of parameters of these types, is updated otherwise than all.

    torch's Adafactor without an eps of its own takes that of the first parameter's type for the whole group, and the
    first one of a rank is another one.
    """
    if isinstance(optimizer, torch.optim.Adafactor) and group["eps"][0] is None and len(types) > 1:
        listed = ", ".join(sorted(str(one) for one in types))
        raise ConfigError(
            f"optimizer torch.optim.Adafactor has a param group with parameters of several types ({listed}) and no "
            "eps of its own: torch then takes that of the first parameter's type for all of them, and at stages 1-3 "
            "every rank has another first parameter.\nGive it one, as in Adafactor(..., eps=(1e-30, 1e-3)), or make a "
            "group for each type."
        )


def _name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__name__}"


# ---------------------------------------------------------------- what an `optimizer` block names
# Parts of names of matrices that are Adam's under Muon: DeepSpeed's set_optimizer_flags.
_NOT_MUON = ("embed", "lm_head")
_WAYS = ("fused", "foreach", "capturable", "differentiable")  # chosen by the block itself


def optimizer_of(block: Mapping[str, Any], model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """(class, keyword arguments) of a resolved `optimizer` block, for parameters of `model` or groups of them."""
    name = block["type"]
    kind = getattr(optim if name in optim.__all__ else torch.optim, name)
    arguments = dict(block.get("params", {}))
    if kind is Muon:
        named = model.named_parameters()
        arguments["others"] = [param for name, param in named if any(part in name.lower() for part in _NOT_MUON)]
    place = "accelerator" if torch.accelerator.is_available() else "cpu"
    entry = _entry(kind)
    has_kernel = entry is not None and place in entry.fused
    chosen = arguments.keys() & set(_WAYS) or arguments.get("momentum")
    if has_kernel and not chosen and can_be_fused(model.parameters()):
        arguments["fused"] = True
    return kind, arguments


def can_be_fused(params: Iterable[Any]) -> bool:
    """Whether torch's fused kernels take these parameters, or param groups of them."""
    groups = [one if isinstance(one, Mapping) else {"params": [one]} for one in params]
    members = [group["params"] for group in groups]
    flat = [p for one in members for p in ([one] if isinstance(one, torch.Tensor) else one)]
    return all(param.is_floating_point() for param in flat if param.requires_grad)
