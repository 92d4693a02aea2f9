"""DeepSpeed's Adams under its names and arguments. New code takes torch.optim.AdamW and hf_zero.optim.CPUAdam."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError
from hf_zero.optim.optimizers.cpu_adam import CPUAdam
from hf_zero.optim.registry import can_be_fused


class DeepSpeedCPUAdam(CPUAdam):
    """hf_zero.optim.CPUAdam with DeepSpeed's order of arguments and its default of amsgrad; state as there."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, betas, eps, weight_decay, adamw_mode, bias_correction, amsgrad, fp32_optimizer_states
        )


class FusedAdam(torch.optim.Adam):
    """torch's fused Adam; `adam_w_mode` is decoupled weight decay (AdamW), DeepSpeed's default.

    Raises:
        ConfigError: `amsgrad`, as with DeepSpeed; no bias correction, which an optimizer block has.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise ConfigError("FusedAdam(amsgrad=True): use torch.optim.AdamW(amsgrad=True)")
        if not bias_correction:
            raise ConfigError(
                "FusedAdam(bias_correction=False): use an optimizer block with "
                '"type": "Adam", "params": {"bias_correction": false}'
            )
        given: list[Any] = list(params)  # they may be an iterator, and so may what is in a group
        given = [{**one, "params": list(one["params"])} if isinstance(one, dict) else one for one in given]
        super().__init__(
            given,
            lr,
            betas,
            eps,
            weight_decay,
            decoupled_weight_decay=adam_w_mode,
            fused=True if can_be_fused(given) else None,
        )
