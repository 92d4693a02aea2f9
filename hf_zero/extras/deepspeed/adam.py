"""DeepSpeed's Adams under its names and arguments. New code takes torch.optim.AdamW and hf_zero.optim.CPUAdam."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.optimizers.base import run_closure
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
        self._before: dict[int, list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]] = {}  # by subgroup

    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the parameters that have gradients, and keep what it changes for `rollback_subgroup`."""
        loss = run_closure(closure)
        self._before[subgroup_id] = [
            (param, param.detach().clone(), copy.deepcopy(self.state.get(param, {})))
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        self.step()
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undo the last `step_subgroup` of this number, to the bit.

        Raises:
            StateError: There was none since the last undo.
        """
        loss = run_closure(closure)
        if sub_group_id not in self._before:
            raise StateError(f"rollback_subgroup({sub_group_id}): there is no step of it to undo")
        for param, values, state in self._before.pop(sub_group_id):
            param.copy_(values)
            self.state[param] = state
        return loss


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
