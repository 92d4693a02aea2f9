"""DeepSpeed's attributes of `engine.optimizer`, such as its hooks at stage 3. facade.py puts them there.

Programs take the hooks away before they generate inside `GatheredParameters`, and put them back afterwards. The hooks
here leave gathered parameters alone, so they stay: the lists are empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.access.local import local_param
from hf_zero.engine.engine import ZeroEngine, live_engines
from hf_zero.optim.sharded import ShardedOptimizer


class ParameterOffload:
    """The answers to what programs ask of the hooks of `module`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Nothing to do: no hook was taken away."""


def _parameter_offload(engine: ZeroEngine, optimizer: ShardedOptimizer) -> ParameterOffload:
    return ParameterOffload(engine.module)


def _fp32_weights(engine: ZeroEngine, optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """Return a copy of the fp32 weights that this rank updates, 1-D, for each param group."""
    held = {id(one.masters[0]): one for one in optimizer.owned}
    owned = [[held[id(one)] for one in group["params"] if id(one) in held] for group in optimizer.param_groups]
    if sum(map(len, owned)) != len(held):
        raise AttributeError("this optimizer updates whole parameters, and has no partition: use hf_zero.full_param")
    pieces = [[local_param(one.acc.flat.params[one.index]) for one in mine] for mine in owned]
    return [torch.cat([one.values for one in mine if one] or [torch.empty(0)]) for mine in pieces]


def _of_scaler(name: str) -> Callable[[ZeroEngine, ShardedOptimizer], Any]:
    return lambda _, optimizer: getattr(optimizer.loss_scaler, name)


_STAGES = (0, 1, 2, 3)
_SCALER = {
    "cur_iter": "cur_iter",
    "dynamic_loss_scale": "dynamic",
    "last_overflow_iter": "last_overflow_iter",
    "min_loss_scale": "min_scale",
    "scale_window": "scale_window",
}
# Attribute -> the stages at which DeepSpeed has it, and what answers it.
NAMES: dict[str, tuple[tuple[int, ...], Callable[[ZeroEngine, ShardedOptimizer], Any]]] = {
    **dict.fromkeys(("cur_scale", "loss_scale"), (_STAGES, lambda engine, _: engine.loss_scale.value)),
    **{name: (_STAGES, _of_scaler(own)) for name, own in _SCALER.items()},
    "fp32_partitioned_groups_flat": ((3,), _fp32_weights),
    "offload_states": (_STAGES, lambda engine, _: engine.offload_states),
    "parameter_offload": ((3,), _parameter_offload),
    "reload_states": (_STAGES, lambda engine, _: engine.reload_states),
    "single_partition_of_fp32_groups": ((1, 2), _fp32_weights),
}


def answer(name: str, optimizer: ShardedOptimizer) -> Any:
    """Return what DeepSpeed's attribute `name` says; raise AttributeError at stages that do not have it."""
    stages, function = NAMES[name]
    for engine in live_engines():
        if engine.optimizer is optimizer and engine.config.stage in stages:
            return function(engine, optimizer)
    raise AttributeError(f"this optimizer is not at stage {' or '.join(map(str, stages))}, so it has no {name}")
