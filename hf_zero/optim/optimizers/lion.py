"""`Lion`: the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675), for any device and on shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.optim.optimizers.base import SeparateUpdates, settings_of


class Lion(SeparateUpdates):
    """Lion with decoupled weight decay; defaults are DeepSpeed's, whose optimizer block calls it "Lion".

    An element depends on itself only, so it is exact on shards. Where momentum and gradient are both zero an element
    stays where it is, as in the paper (DeepSpeed's kernels move it by the learning rate, up on GPUs and down on CPUs).

    State: `exp_avg`, of the parameter's type, or fp32 for 16-bit parameters.
    Raises:
        ConfigError: A value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, settings_of(locals()))

    def update(self, group: Mapping[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        state, lr, (beta1, beta2) = self.state[param], float(group["lr"]), group["betas"]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(grad)
        momentum = state["exp_avg"]
        direction = torch.lerp(grad, momentum, beta1).sign_()
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(direction.to(param.dtype), alpha=-lr)
        momentum.lerp_(grad, 1 - beta2)
