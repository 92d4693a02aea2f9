"""`UncorrectedAdam`: Adam and AdamW without bias correction, which torch's do not leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.optim.optimizers.base import CheckedOptimizer, run_closure


class UncorrectedAdam(CheckedOptimizer):
    """p = p - lr m / (sqrt(v) + eps): what DeepSpeed's Adam and AdamW are with bias_correction false.

    An element depends on itself only, so it is exact on shards; offloaded states are updated natively.

    Args:
        adamw_mode: Decoupled weight decay (AdamW); False adds weight_decay * p to the gradient.
    State: `step`, `exp_avg`, `exp_avg_sq`.
    Raises:
        ConfigError: A value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
            "bias_correction": False,  # the native update reads it
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        loss = run_closure(closure)
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                grad = param.grad.to(torch.promote_types(param.dtype, torch.float32))
                if not state:
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                if not group["adamw_mode"]:
                    grad = grad.add(param.to(grad.dtype), alpha=decay)
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
                if group["adamw_mode"]:
                    param.mul_(1 - lr * decay)
                param.add_(update.to(param.dtype), alpha=-lr)
        return loss
