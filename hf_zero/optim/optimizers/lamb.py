"""`Lamb`: Adam's direction, its length set per parameter by a trust ratio (You et al. 2019, arXiv 1904.00962)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError
from hf_zero.optim.optimizers.base import CheckedOptimizer, follow_gradient, run_closure, settings_of, wide_gradient

# (tensors, their squared norms [n, 2] of weights and update) -> the squared norms of the parameters they belong to
Combine = Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]


class Lamb(CheckedOptimizer):
    """LAMB as DeepSpeed's FusedLamb computes it, whose optimizer block calls it "Lamb".

    m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; u = m / (sqrt(v) + eps) + weight_decay p;
    r = |p| / |u|, kept between `min_coeff` and `max_coeff` (1 where a norm is zero); p = p - step_size r u, where
    step_size = lr sqrt(1 - beta2^t) / (1 - beta1^t), or lr without bias correction.

    The norms are those of full parameters: `step(combine=...)` gives them where the tensors are shards; hf_zero does
    so at stages 1-3.

    Args:
        eps_inside_sqrt: sqrt(v + eps) instead of sqrt(v) + eps.
        amsgrad: Not part of LAMB: True is refused.
    State: `step`, `exp_avg`, `exp_avg_sq`.
    Raises:
        ConfigError: A value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        settings = settings_of(locals())
        if settings.pop("amsgrad"):
            raise ConfigError("Lamb: amsgrad=True is not part of LAMB: leave it out")
        self._ratios: list[torch.Tensor] = []
        super().__init__(params, settings)

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, one per tensor that had a gradient, in the order of the groups."""
        return [float(ratio) for ratio in self._ratios]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, combine: Combine | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns.

        Args:
            combine: From [n, 2] squared norms of the tensors updated here (weights, update) to those of the full
                parameters; called once, for n = 0 too. fp64 on the CPU; on other devices, which may have no fp64,
                in the type of the moments.
        """
        loss = run_closure(closure)
        todo = self.with_gradient()
        squares = []
        for group, param in todo:
            follow_gradient(self.state[param], wide_gradient(param), group["betas"])
            update = self._update_of(group, param)
            squares.append(torch.stack([_square(param), _square(update)]))
        found = torch.stack(squares) if squares else torch.zeros(0, 2, dtype=torch.float64, device="cpu")
        if combine is not None:
            found = combine([param for _, param in todo], found)
        norms = found.sqrt()
        self._ratios = [_trust_ratio(mine, group) for mine, (group, _) in zip(norms, todo, strict=True)]
        for ratio, (group, param) in zip(self._ratios, todo, strict=True):
            # The update is computed again: kept from the first round, updates would take the memory of another shard.
            update = self._update_of(group, param).mul_(ratio)
            param.add_(update.to(param.dtype), alpha=-_step_size(group, int(self.state[param]["step"])))
        return loss

    def _update_of(self, group: dict[str, Any], param: torch.Tensor) -> torch.Tensor:
        state, eps = self.state[param], group["eps"]
        second = state["exp_avg_sq"]
        denominator = (second + eps).sqrt_() if group["eps_inside_sqrt"] else second.sqrt().add_(eps)
        update: torch.Tensor = state["exp_avg"] / denominator
        return update.add_(param.to(update.dtype), alpha=group["weight_decay"])


def _square(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return (norm.double() if norm.device.type == "cpu" else norm).square()


def _trust_ratio(norms: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """0-dim; of the norms of a parameter and of its update."""
    weights, update = norms
    ratio = (weights / update).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where((weights > 0) & (update > 0), ratio, torch.ones_like(ratio))


def _step_size(group: dict[str, Any], step: int) -> float:
    lr = float(group["lr"])
    if not group["bias_correction"]:
        return lr
    beta1, beta2 = group["betas"]
    factor: float = math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return lr * factor
