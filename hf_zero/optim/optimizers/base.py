"""The base of hf_zero's own torch optimizers: checks of hyperparameters, the step, Adam's moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from hf_zero.errors import ConfigError

_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "max_coeff", "min_coeff", "momentum")


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters among a constructor's `locals()`, as a param group holds them."""
    settings = {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}
    return {**settings, "betas": tuple(settings["betas"])}


class CheckedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that refuses param groups with values out of range, and is then as it was before."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except ConfigError:
            self.param_groups.pop()
            raise

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ConfigError naming every value that is out of its range."""
        wrong = self.problems_of(group)
        if wrong:
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(wrong))

    def problems_of(self, group: Mapping[str, Any]) -> list[str]:
        wrong = [
            f"{name}={group[name]}: expected 0 or more"
            for name in _NOT_NEGATIVE
            if name in group and not 0 <= group[name] < math.inf
        ]
        betas = group.get("betas", (0.9, 0.999))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            wrong.append(f"betas={betas}: expected two numbers of at least 0 and less than 1")
        return wrong

    def with_gradient(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Every parameter that a step updates, with its group."""
        return [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]


class SeparateUpdates(CheckedOptimizer):
    """An optimizer that updates one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        loss = run_closure(closure)
        for group, param in self.with_gradient():
            self.update(group, param, wide_gradient(param))
        return loss

    def update(self, group: Mapping[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        """Update one parameter; see `wide_gradient`."""
        raise NotImplementedError


def wide_gradient(param: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient in fp32, or in the parameter's own type if that is wider."""
    assert param.grad is not None
    return param.grad.to(torch.promote_types(param.dtype, torch.float32))


def start_moments(state: MutableMapping[str, Any], grad: torch.Tensor) -> None:
    """Adam's state before the first update of a parameter."""
    if "step" not in state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)


def follow_gradient(
    state: MutableMapping[str, Any], grad: torch.Tensor, betas: tuple[float, float], *, variance: bool = True
) -> None:
    """Update the moments: m = beta1 m + (1 - beta1) g, and with `variance` v = beta2 v + (1 - beta2) g^2."""
    start_moments(state, grad)
    state["step"] += 1
    state["exp_avg"].mul_(betas[0]).add_(grad, alpha=1 - betas[0])
    if variance:
        state["exp_avg_sq"].mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])


def adam_update(
    group: Mapping[str, Any],
    param: torch.Tensor,
    grad: torch.Tensor,
    state: MutableMapping[str, Any],
    *,
    decoupled: bool,
    corrected: bool,
) -> None:
    """One update of Adam, or with `decoupled` decay of AdamW, with or without bias correction."""
    lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
    start_moments(state, grad)
    if not decoupled:
        grad = grad.add(param.to(grad.dtype), alpha=decay)
    state["step"] += 1
    first = state["exp_avg"].lerp_(grad, 1 - beta1)
    root = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2).sqrt()
    if decoupled:
        param.mul_(1 - lr * decay)
    if corrected:
        step = int(state["step"])
        root.div_(math.sqrt(1 - beta2**step))
        lr /= 1 - beta1**step
    param.add_((first / root.add_(group["eps"])).to(param.dtype), alpha=-lr)


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Call `closure` with gradients enabled and return its result; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
