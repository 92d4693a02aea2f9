"""`UncorrectedAdam`: Adam and AdamW without bias correction, which torch's do not leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.optim.optimizers.base import SeparateUpdates, adam_update, settings_of


class UncorrectedAdam(SeparateUpdates):
    """Adam and AdamW as DeepSpeed's are with bias_correction false: p = p - lr m / (sqrt(v) + eps).

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
        super().__init__(params, {**settings_of(locals()), "bias_correction": False})  # the native update reads it

    def update(self, group: Mapping[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        adam_update(group, param, grad, self.state[param], decoupled=group["adamw_mode"], corrected=False)
