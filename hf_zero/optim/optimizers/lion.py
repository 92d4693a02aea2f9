"""`Lion`: the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675), for any device and on shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.optim.optimizers.base import CheckedOptimizer, run_closure


class Lion(CheckedOptimizer):
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
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        loss = run_closure(closure)
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                wide = torch.promote_types(param.dtype, torch.float32)
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=wide)
                grad, momentum = param.grad.to(wide), state["exp_avg"]
                direction = torch.lerp(grad, momentum, beta1).sign_()
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(direction.to(param.dtype), alpha=-lr)
                momentum.lerp_(grad, 1 - beta2)
        return loss
