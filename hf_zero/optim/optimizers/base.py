"""What hf_zero's own torch optimizers check of their hyperparameters, and how they run a closure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_zero.errors import ConfigError

_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "max_coeff", "min_coeff", "momentum")


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


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """What `closure` returns, with gradients enabled; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
