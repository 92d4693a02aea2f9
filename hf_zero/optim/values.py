"""What hf_zero's own torch optimizers check of their hyperparameters, and how they run a closure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.errors import ConfigError

_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "max_coeff", "min_coeff", "momentum")


def check_group(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError naming every value of the last of `groups` that is out of its range."""
    group = groups[-1]
    wrong = [
        f"{name}={group[name]}: expected 0 or more"
        for name in _NOT_NEGATIVE
        if name in group and not 0 <= group[name] < math.inf
    ]
    betas = group.get("betas", (0.9, 0.999))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        wrong.append(f"betas={betas}: expected two numbers of at least 0 and less than 1")
    if wrong:
        raise ConfigError(f"{type(optimizer).__name__}: " + "; ".join(wrong))


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """What `closure` returns, with gradients enabled; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
