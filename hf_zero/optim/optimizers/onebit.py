"""`OneBitAdam`: Adam whose momentum travels as signs once its variance has settled (Tang et al. 2021, 2102.02888)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.optimizers.base import CheckedOptimizer, follow_gradient, run_closure, wide_gradient

# (parameters, their momenta): makes each momentum the compressed mean over the ranks, in place
Exchange = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class OneBitAdam(CheckedOptimizer):
    """1-bit Adam as DeepSpeed's OnebitAdam computes it, whose optimizer block calls it "OneBitAdam".

    p = p - lr (m / (sqrt(v) + eps) + weight_decay p), without bias correction. For `freeze_step` steps m and v follow
    the mean gradient, as in Adam. After these v stays, m = beta1 m + (1 - beta1) g takes each rank's own gradient, and
    `exchange` makes the momenta of the ranks one again. An element whose v is zero then, because it never had a
    gradient, stays where it is: signs have no zero, so its momentum would not vanish. Unlike DeepSpeed's, the first
    step updates parameters too.

    For stage 0: hf_zero gives the step what it needs. In one process it is Adam with a variance that freezes.

    State: `step`, `exp_avg`, `exp_avg_sq`.
    Raises:
        ConfigError: A value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        freeze_step: int = 100000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if freeze_step < 1:
            raise ConfigError(
                f"OneBitAdam: freeze_step={freeze_step}: expected 1 or more, steps that find the variance"
            )
        self.freeze_step = freeze_step
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @property
    def is_frozen(self) -> bool:
        """Whether the next step is one of the compressed ones."""
        return any(int(state["step"]) >= self.freeze_step for state in self.state.values() if "step" in state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, exchange: Exchange | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns.

        Args:
            exchange: Called once per step of the second phase, with the momenta of all parameters updated here.
        """
        loss = run_closure(closure)
        frozen = self.is_frozen
        todo = self.with_gradient()
        for group, param in todo:
            if frozen and not self.state[param]:
                raise StateError(
                    f"OneBitAdam: a parameter of shape {tuple(param.shape)} has its first gradient after "
                    f"{self.freeze_step} steps, when the variance is frozen.\nTrain it from the start, or raise "
                    "freeze_step."
                )
            follow_gradient(self.state[param], wide_gradient(param), group["betas"], variance=not frozen)
        params = [param for _, param in todo]
        if frozen:
            momenta = [self.state[param]["exp_avg"] for param in params]
            if exchange is not None:
                exchange(params, momenta)
            for param, momentum in zip(params, momenta, strict=True):
                momentum.masked_fill_(self.state[param]["exp_avg_sq"] == 0, 0.0)
        for group, param in todo:
            state = self.state[param]
            update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
            update.add_(param.to(update.dtype), alpha=group["weight_decay"])
            param.add_(update.to(param.dtype), alpha=-float(group["lr"]))
        return loss
