"""Which optimizers give on shards the update that they give on whole parameters.

A shard is a range of elements. An optimizer is right on it if it treats every element by itself; one that looks at the
whole matrix, at its shape, or at all parameters together is not, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.errors import ConfigError
from hf_zero.optim.optimizers.base import CheckedOptimizer
from hf_zero.optim.optimizers.lamb import Lamb
from hf_zero.optim.optimizers.lion import Lion
from hf_zero.optim.optimizers.muon import Muon
from hf_zero.optim.optimizers.onebit import OneBitAdam

_ELEMENTWISE = frozenset(
    f"torch.optim.{name}"
    for name in (
        "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop ASGD Rprop".split()  # what torch 2.13 has
    )
)
# Optimizers that users bring, and what of a whole parameter each of them needs.
_NEEDS_WHOLE = {
    "Adafactor": "row and column means of the whole matrix",
    "Muon": "the whole momentum matrix",
    "MuonWithAuxAdam": "the whole momentum matrix",
    "LBFGS": "inner products over all parameters",
    "SparseAdam": "sparse gradients",
    "Lamb": "the norm of the whole parameter",
    "LAMB": "the norm of the whole parameter",
    "FusedLamb": "the norm of the whole parameter",
    "Lion8bit": "quantisation blocks that a shard cuts",
    "LARS": "the norm of the whole parameter",
    "Shampoo": "the whole matrix",
    "DistributedShampoo": "the whole matrix",
    "SOAP": "the whole matrix",
    "GaLoreAdamW": "the whole matrix",
    "GaLoreAdafactor": "the whole matrix",
    "APOLLOAdamW": "the whole matrix",
    "LOMO": "gradients inside backward",
    "AdaLomo": "row and column means of the whole matrix",
    "Adam8bit": "quantisation blocks that a shard cuts",
    "AdamW8bit": "quantisation blocks that a shard cuts",
    "Prodigy": "inner products over all parameters",
    "DAdaptAdam": "inner products over all parameters",
    "ScheduleFreeWrapper": "a second copy of the parameters that it swaps itself",
}
# Those of them that get whole parameters, on the rank that owns one: module and name, since others may do more.
_GETS_WHOLE = frozenset(["torch.optim.Adafactor", "torch.optim.Muon", "transformers.optimization.Adafactor"])
_ELEMENTWISE_INSTEAD = "an elementwise optimizer (torch.optim.AdamW, Adam, SGD, ...)"
_INSTEAD = {
    **dict.fromkeys(("Lamb", "LAMB", "FusedLamb"), "hf_zero.optim.Lamb, which asks the other ranks for it"),
    "Adafactor": "the Adafactor of torch.optim or transformers, which gets whole matrices",
    **dict.fromkeys(("Muon", "MuonWithAuxAdam"), "torch.optim.Muon or hf_zero.optim.Muon, which get whole matrices"),
}


def needs_whole(optimizer: torch.optim.Optimizer) -> Callable[[Mapping[str, Any]], bool] | None:
    """Which param groups of `optimizer` need whole parameters and can have them; None if none does."""
    if isinstance(optimizer, Muon):
        return lambda group: bool(group["use_muon"])
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    return (lambda group: True) if kind in _GETS_WHOLE else None


def check_optimizer(optimizer: torch.optim.Optimizer, *, sharded: bool, allow_untested: bool) -> None:
    """Raise ConfigError if `optimizer` cannot be right, or is not known to be, on shards.

    Args:
        sharded: False at stage 0, where every rank updates whole parameters and any optimizer is right.
        allow_untested: `zero_allow_untested_optimizer`: take a class that hf_zero does not know as elementwise.
    """
    if not sharded or isinstance(optimizer, Lion | Lamb) or needs_whole(optimizer) is not None:
        return
    if isinstance(optimizer, OneBitAdam):
        raise ConfigError(
            "optimizer OneBitAdam needs stage 0: each rank compresses the momentum of whole parameters, made of its "
            "own gradient.\nSet zero_optimization.stage to 0, or use torch.optim.AdamW."
        )
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _NEEDS_WHOLE:
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} cannot be right on shards: it needs "
                f"{_NEEDS_WHOLE[kind.__name__]}, and at stages 1-3 a rank holds only a range of elements.\n"
                f"Use {_INSTEAD.get(kind.__name__, _ELEMENTWISE_INSTEAD)}, or stage 0."
            )
    known = any(_is_elementwise(kind) for kind in type(optimizer).__mro__)
    if not known and not allow_untested:
        raise ConfigError(
            f"optimizer {type(optimizer).__module__}.{type(optimizer).__name__} is not known to treat every element "
            "by itself, and at stages 1-3 it would see ranges of elements instead of whole parameters.\n"
            "If it does, set zero_allow_untested_optimizer: true; else use torch.optim.AdamW or stage 0."
        )


# What the native Adam stands in for when states are offloaded: exactly these classes, for a subclass may do more.
_NATIVE = frozenset(
    [
        "torch.optim.adam.Adam",
        "torch.optim.adamw.AdamW",
        "hf_zero.deepspeed.ops.adam.DeepSpeedCPUAdam",
        "hf_zero.deepspeed.ops.adam.FusedAdam",
        "hf_zero.optim.optimizers.cpu_adam.CPUAdam",
        "hf_zero.optim.optimizers.uncorrected_adam.UncorrectedAdam",
    ]
)


def check_native(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if the native Adam cannot do what `optimizer` would."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    by_torch = (
        'run it in torch, on the host, with "zero_force_ds_cpu_optimizer": false (offload_optimizer.device "cpu" only)'
    )
    if kind not in _NATIVE:
        raise ConfigError(
            f"optimizer {kind} cannot update offloaded states: the native update serves torch.optim.Adam, "
            f"torch.optim.AdamW and hf_zero.optim.CPUAdam.\nUse one of these, or {by_torch}."
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "capturable", "differentiable"):
            if group.get(option):
                raise ConfigError(
                    f"optimizer {type(optimizer).__name__}({option}=True) cannot update offloaded states: the native "
                    f"Adam does not have it.\nRemove {option}, or {by_torch}."
                )


def check_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], params: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError if one of hf_zero's own optimizers cannot train `params` with the settings of `group`.

    On shards the optimizer itself gets pieces, and does not see the parameters' shapes.
    """
    if isinstance(optimizer, CheckedOptimizer):
        optimizer.check_group({**optimizer.defaults, **group, "params": params})


def _is_elementwise(kind: type) -> bool:
    if f"{kind.__module__}.{kind.__name__}" in _NATIVE:
        return True
    return kind.__module__.startswith("torch.optim") and f"torch.optim.{kind.__name__}" in _ELEMENTWISE
