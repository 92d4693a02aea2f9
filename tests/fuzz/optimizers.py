"""Optimizers of the cases: how the program under test gets them, and what computes the same in one process.

Epsilons are large, so that a rounding error in a gradient stays one in the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.harness.optimizer_formulas import FORMULAS, State

LR = 0.02
EPS = 1e-3
Params = Sequence[tuple[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """`make` is a class of torch.optim with `options`; `block` the entry of a configuration that means the same."""

    make: Callable[..., torch.optim.Optimizer] | None
    options: dict[str, Any]
    block: tuple[str, dict[str, Any]] | None = None
    implementations: tuple[str, ...] = ()
    moment: str = ""  # the name of a state of each parameter


_SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
_ADAM = {"lr": LR, "betas": (0.8, 0.95), "eps": EPS, "weight_decay": 0.1}
_LION = {"lr": LR / 4, "betas": (0.9, 0.97), "weight_decay": 0.1}
_LAMB = {"lr": LR, "betas": (0.9, 0.99), "eps": EPS, "weight_decay": 0.1}

NAMES: dict[str, Optimizer] = {
    # Not fused: torch's kernel fails where one parameter has its momentum and another's first gradient comes later.
    "SGD": Optimizer(torch.optim.SGD, _SGD, ("SGD", _SGD), ("foreach",), "momentum_buffer"),
    "SGD, plain": Optimizer(torch.optim.SGD, {"lr": LR}, ("SGD", {"lr": LR}), ("foreach", "fused")),
    "SGD, Nesterov": Optimizer(torch.optim.SGD, _SGD | {"nesterov": True}, None, ("foreach",)),
    "AdamW": Optimizer(torch.optim.AdamW, _ADAM, ("AdamW", _ADAM), ("foreach", "fused"), "exp_avg"),
    "Adam": Optimizer(
        torch.optim.Adam, _ADAM, ("Adam", _ADAM | {"adam_w_mode": False}), ("foreach", "fused"), "exp_avg"
    ),
    "Adagrad": Optimizer(
        torch.optim.Adagrad, {"lr": LR, "eps": EPS}, ("Adagrad", {"lr": LR, "eps": EPS}), ("foreach", "fused")
    ),
    "RMSprop": Optimizer(torch.optim.RMSprop, {"lr": LR / 4, "eps": EPS, "momentum": 0.5}, None, ("foreach",)),
    "NAdam": Optimizer(torch.optim.NAdam, {"lr": LR, "eps": EPS}),
    "Adafactor": Optimizer(torch.optim.Adafactor, {"lr": LR}),
    "Lion": Optimizer(None, _LION, ("Lion", _LION)),
    "Lamb": Optimizer(None, _LAMB, ("Lamb", _LAMB)),
}
NATIVE = frozenset(["AdamW", "Adam"])  # what offloaded states are updated by, when a program brings its optimizer
SHARP = frozenset(["Adafactor", "Lion", "Lamb"])  # a rounding error in a small gradient may become a whole step


def make_groups(params: Params, options: dict[str, Any], groups: int) -> list[dict[str, Any]]:
    """Every second parameter goes to the second group, which has a rate and a decay of its own."""
    tensors = [param for _, param in params]
    if groups == 1 or len(tensors) < 2:
        return [{"params": tensors}]
    return [{"params": tensors[::2]}, {"params": tensors[1::2], "lr": options["lr"] * 0.5, "weight_decay": 0.0}]


def make_torch(name: str, params: Params, groups: int, implementation: str = "") -> torch.optim.Optimizer:
    row = NAMES[name]
    assert row.make is not None
    chosen = {implementation: True} if implementation else {}
    return row.make(make_groups(params, row.options, groups), **row.options, **chosen)


class Formula(torch.optim.Optimizer):
    """One of tests.harness.optimizer_formulas with the face of a torch optimizer."""

    def __init__(self, name: str, params: Params) -> None:
        super().__init__([param for _, param in params], NAMES[name].options)
        self._update, self._named, self._own, self._count = FORMULAS[name], dict(params), State(), 0

    def step(self, closure: Any = None) -> None:
        weights = {name: param.data for name, param in self._named.items()}
        grads = {name: param.grad for name, param in self._named.items() if param.grad is not None}
        options = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        self._update(weights, grads, self._own, self._count, **options)
        self._count += 1


def make_reference(name: str, params: Params, groups: int) -> torch.optim.Optimizer:
    return Formula(name, params) if NAMES[name].make is None else make_torch(name, params, groups)


def make_schedule(kind: str, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    schedules = torch.optim.lr_scheduler
    if kind == "lambda":
        return schedules.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    if kind == "step":
        return schedules.StepLR(optimizer, step_size=2, gamma=0.5)
    if kind == "onecycle":
        return schedules.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps + 5, cycle_momentum=False)
    return None
