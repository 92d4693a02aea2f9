"""Training must give what this gives: one process, plain torch.optim, the concatenated batch, in fp64.

A `Case` says what is trained; `train_reference` trains it in one process, `tests.harness.sharded` under hf_zero, and
`tests.harness.compare` says how near is near enough.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from tests.harness import models

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@dataclasses.dataclass(frozen=True)
class Case:
    model: str = "plain"
    world: int = 2
    accumulation: int = 1
    optimizer: str = "adamw"
    steps: int = 5
    clip: float = 0.1
    single: bool = False  # trained in fp32 under hf_zero (the reference is always fp64)
    lr_scale: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.single else torch.float64

    @property
    def lr(self) -> float:
        # Adam's first steps are signs: in fp32 an element without true gradient is off by up to 2 lr, and what that
        # does to the losses and norms must stay below their tolerance.
        lr = 0.3 if self.optimizer == "sgd" else 1e-3 if self.single else 1e-2
        return lr * self.lr_scale

    def build(self, dtype: torch.dtype | None = None) -> nn.Module:
        return models.build(self.model, dtype or self.dtype)

    def batch(self, step: int, micro: int, rank: int) -> dict[str, Any]:
        """The micro-batch of one rank. `num_items` makes the mean over ranks and micro-steps the mean over tokens."""
        batch = self._batch(step, micro, rank)
        if "unequal" in self.model:
            tokens = sum(
                _num_tokens(self._batch(step, m, r)) for m in range(self.accumulation) for r in range(self.world)
            )
            batch["num_items"] = tokens / (self.world * self.accumulation)
        return batch

    def _batch(self, step: int, micro: int, rank: int) -> dict[str, Any]:
        seed = (step * self.accumulation + micro) * self.world + rank
        return models.make_batch(self.model, seed=seed, rank=rank)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with weight decay on matrices only, or SGD with momentum."""
        params = [param for param in model.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
            {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
        ]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=self.lr, betas=(BETA1, BETA2), eps=EPS)
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9)


@dataclasses.dataclass
class Trace:
    """A training run: one entry per step. `max_grad` and `scale_v` are for the bounds of the fp32 comparison."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    params: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    max_grad: list[float] = dataclasses.field(default_factory=list)
    scale_v: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)


@functools.lru_cache(maxsize=256)
def train_reference(case: Case, dtype: torch.dtype = torch.float64) -> Trace:
    """Train in this process on what all ranks see. Index 0 of `params` is before the first step."""
    model = case.build(dtype)
    optimizer = case.make_optimizer(model)
    trace = Trace(params=[snapshot(model)])
    for step in range(case.steps):
        loss = _mean_loss(model, case, step)
        loss.backward()
        trace.losses.append(loss.item())
        trainable = [param for param in model.parameters() if param.requires_grad]
        trace.norms.append(float(nn.utils.clip_grad_norm_(trainable, case.clip)))
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        trace.max_grad.append(max(float(grad.abs().max()) for grad in grads.values()))
        optimizer.step()
        trace.scale_v.append({name: _scale(optimizer, model.get_parameter(name), step) for name in grads})
        optimizer.zero_grad()
        trace.params.append(snapshot(model))
    return trace


def _mean_loss(model: nn.Module, case: Case, step: int) -> torch.Tensor:
    batches = [case.batch(step, micro, rank) for micro in range(case.accumulation) for rank in range(case.world)]
    if "unused_somewhere" in case.model:  # what a rank computes depends on the rank
        return torch.stack([model(**batch)["loss"] for batch in batches]).mean()
    whole: dict[str, Any] = {}
    for key, value in batches[0].items():
        whole[key] = torch.cat([batch[key] for batch in batches]) if isinstance(value, torch.Tensor) else value
    if "num_items" in whole:
        whole["num_items"] = whole["num_items"] * len(batches)
    return model(**whole)["loss"]


def _num_tokens(batch: dict[str, Any]) -> int:
    return int((batch["labels"] != -100).sum())


def _scale(optimizer: torch.optim.Optimizer, param: nn.Parameter, step: int) -> torch.Tensor:
    """Adam's denominator sqrt(v_hat) + eps; ones for SGD."""
    state = optimizer.state[param]
    if "exp_avg_sq" not in state:
        return torch.ones_like(param)
    return (state["exp_avg_sq"] / (1 - BETA2 ** (step + 1))).sqrt() + EPS


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}
