"""`CPUAdam`: Adam and AdamW for parameters in CPU memory, by the compiled kernel.

An ordinary torch optimizer, usable without the rest of hf_zero. One native call updates all parameters of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError, StateError
from hf_zero.native.adam import AdamBatch, AdamRule, AdamSpan, adam_step_batches
from hf_zero.optim.optimizers.base import CheckedOptimizer, run_closure, settings_of

_WIDE = (torch.float32, torch.float64)  # parameters that are their own masters
_NARROW = (torch.bfloat16, torch.float16)
_STATE_TENSORS = ("exp_avg", "exp_avg_sq", "master")


class CPUAdam(CheckedOptimizer):
    """Adam with decoupled (AdamW) or L2 weight decay.

    The state of a parameter is torch's (`step`, `exp_avg`, `exp_avg_sq`), so that states of torch.optim.AdamW load.
    A bf16 or fp16 parameter gets an fp32 `master` besides, made from it at the first step: the master is what is
    updated, and the parameter is its rounded copy (a later change of the parameter from outside is overwritten).

    Args:
        adamw_mode: Decoupled weight decay (AdamW); False adds `weight_decay * parameter` to the gradient.
        bias_correction: Divide the moments by 1 - beta ** step.
        amsgrad: Not implemented; True is refused.
        fp32_optimizer_states: False keeps the moments of all but fp64 parameters in bf16, rounded stochastically
            (unbiased): 4 bytes per element instead of 8.
        maximize: Follow the gradient upwards.
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
        bias_correction: bool = True,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, settings_of(locals()))

    def problems_of(self, group: Mapping[str, Any]) -> list[str]:
        wrong = super().problems_of(group)
        if group["amsgrad"]:
            wrong.append("amsgrad=True is not implemented here: leave it out, or use torch.optim.AdamW(amsgrad=True)")
        return wrong

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns.

        Raises:
            ConfigError: A parameter or gradient is not one that this optimizer can update, e.g. not in CPU memory.
            NativeError: The native library is missing. Nothing has been changed.
        """
        loss = run_closure(closure)
        with torch.no_grad():
            updates = [
                _Update(parameter, self.state[parameter], group)
                for number, group in enumerate(self.param_groups)
                for index, parameter in enumerate(group["params"])
                if parameter.grad is not None and _check_tensors(parameter, f"parameter {index} of group {number}")
            ]
            adam_step_batches([update.batch for update in updates])
            for update in updates:
                update.finish()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the precision of masters and moments; torch casts it to the parameter's."""
        loaded: dict[str, Any] = {}

        def keep(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            loaded.update(state_dict)

        def restore(_: torch.optim.Optimizer) -> None:
            self._restore_precision(loaded)

        # The last of the pre-hooks and the first of the post-hooks: other hooks see what they would with torch's Adam.
        before = self.register_load_state_dict_pre_hook(keep)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore_precision(self, loaded: dict[str, Any]) -> None:
        ids = itertools.chain.from_iterable(group["params"] for group in loaded["param_groups"])
        parameters = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for number, (parameter, group) in zip(ids, parameters, strict=True):
            saved = loaded["state"].get(number, {})
            for name in saved.keys() & set(_STATE_TENSORS):
                dtype = _master_dtype(parameter) if name == "master" else _moment_dtype(parameter, group)
                self.state[parameter][name] = saved[name].to(device=parameter.device, dtype=dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            # Groups that torch.optim.Adam or AdamW saved.
            group.setdefault("adamw_mode", group.get("decoupled_weight_decay", self.defaults["adamw_mode"]))
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self.check_group(group)
            for parameter in group["params"]:
                own = self.state.get(parameter, {})
                if "step" in own and not isinstance(own["step"], torch.Tensor):
                    own["step"] = torch.tensor(float(own["step"]), dtype=torch.float32)


class _Update:
    """One parameter's part of a step: flat views of its tensors, and what is left to do after the native call."""

    def __init__(self, parameter: torch.nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=_moment_dtype(parameter, group))
        narrow = parameter.dtype in _NARROW
        if narrow and "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True)
        self._step: torch.Tensor = state["step"]
        self._parameter = parameter
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        master = self._flat(state["master"] if narrow else parameter.detach())
        grad = parameter.grad
        if grad is None:
            raise AssertionError("an update without gradient")
        if grad.dtype == torch.float64:
            grad = grad.to(master.dtype)
        self.batch = AdamBatch(
            [AdamSpan(0, master.numel(), 0, 0, 0, int(self._step) + 1, *AdamRule.of(group))],
            master,
            self._flat(state["exp_avg"]),
            self._flat(state["exp_avg_sq"]),
            grad.contiguous().view(-1),
            self._flat(parameter.detach()) if narrow else None,
            -1.0 if group["maximize"] else 1.0,
        )

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """All elements in the order of their indices: a view, or a copy that `finish` writes back."""
        if tensor.is_contiguous():
            return tensor.view(-1)
        copy = tensor.contiguous()
        self._copies.append((tensor, copy))
        return copy.view(-1)

    def finish(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        self._step += 1
        # The library writes behind autograd's back: a graph that saved the old values must notice, as with torch's.
        torch.autograd.graph.increment_version(self._parameter)


def _master_dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _moment_dtype(parameter: torch.Tensor, group: dict[str, Any]) -> torch.dtype:
    dtype = _master_dtype(parameter)
    return dtype if group["fp32_optimizer_states"] or dtype == torch.float64 else torch.bfloat16


def _check_tensors(parameter: torch.Tensor, name: str) -> bool:
    """True; raises ConfigError or StateError where the kernel cannot update `parameter`."""
    grad = parameter.grad
    if parameter.device.type != "cpu" or (grad is not None and grad.device.type != "cpu"):
        raise ConfigError(
            f"CPUAdam updates parameters in CPU memory, but {name} {list(parameter.shape)} is on {parameter.device}.\n"
            "Use torch.optim.AdamW(..., fused=True) for it, or train with zero and offload_optimizer.device=cpu, "
            "which keeps masters and moments on the CPU."
        )
    if parameter.dtype not in (*_WIDE, *_NARROW):
        raise ConfigError(f"CPUAdam cannot update {name}: its type is {parameter.dtype}, not fp32, fp64, bf16 or fp16")
    if grad is not None and grad.layout != torch.strided:
        raise StateError(
            f"CPUAdam needs dense gradients, but that of {name} is {grad.layout}: use torch.optim.SparseAdam"
        )
    return True
