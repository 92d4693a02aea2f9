"""`engine.optimizer.parameter_offload`, the hooks of DeepSpeed's stage 3. facade.py puts it there.

Programs take the hooks away before they generate inside `GatheredParameters`, and put them back afterwards. The hooks
here leave gathered parameters alone, so they stay: the lists are empty.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.engine.engine import live_engines
from hf_zero.optim.sharded import ShardedOptimizer


class ParameterOffload:
    """The answers to what programs ask of the hooks of `module`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Nothing to do: no hook was taken away."""


def parameter_offload(optimizer: ShardedOptimizer) -> ParameterOffload:
    """Return the hooks of the engine of `optimizer`; raise AttributeError where that is not at stage 3."""
    for engine in live_engines():
        if engine.optimizer is optimizer and engine.config.shards_parameters:
            return ParameterOffload(engine.module)
    raise AttributeError("this optimizer is not at stage 3, so it has no parameter_offload")
