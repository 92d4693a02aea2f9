"""Layers whose backward does not do in two halves what it does in one: the schedules with halves leave it whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.extras.pipeline.module import PipelineModule
from tests.harness.ranks import run_ranks
from tests.pipeline import models

MICROS = 3


class _Scale(torch.autograd.Function):
    """Its backward changes what it has saved, as fused losses do: it can run only once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.kept = [x.detach().clone(), weight.detach().expand_as(x).clone()]
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = (kept.mul_(grad) for kept in ctx.kept)
        return weight, x.flatten(0, -2).sum(0)


class Scaled(models.Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(models.WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scale.apply(super().forward(x), self.scale)  # type: ignore[no-any-return, no-untyped-call]


def _turn(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.neg_()


class Hooked(models.Block):
    """Takes the negative of what its gradient is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.register_post_accumulate_grad_hook(_turn)


class Recomputed(models.Block):
    use_reentrant = False
    forwards = 0  # of this process

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._inside, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        Recomputed.forwards += 1
        return super().forward(x)


class Reentrant(Recomputed):
    use_reentrant = True


KINDS = (Scaled, Hooked, Recomputed, Reentrant)
SCHEDULES = ("1f1b", "zero_bubble")
# A hook sees the gradient of one micro-batch here, and their sum so far in plain torch.
MICROS_OF = {Hooked: 1}


def layers_of(kind: type[nn.Module]) -> list[Any]:
    torch.manual_seed(5)
    blocks = [kind() for _ in range(4)]
    return [models.Embedding(), *blocks, nn.Linear(models.WIDTH, models.WORDS)]


def train(kind: type[nn.Module], schedule: str) -> tuple[models.Trained, int]:
    Recomputed.forwards = 0
    module = PipelineModule(layers_of(kind), num_stages=2, loss_fn=models.loss_of, partition_method="uniform")
    micros = MICROS_OF.get(kind, MICROS)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": models.CLIP,
        "pipeline": {"schedule": schedule},
    }
    engine, *_ = hf_zero.initialize(
        model=module, optimizer=lambda params: torch.optim.AdamW(params, lr=models.RATE), config=config
    )
    losses, norms = [], []
    for batch in models.batches(models.STEPS, 1, micros):
        losses.append(engine.train_batch(iter(batch[0])).item())
        norms.append(engine.get_global_grad_norm())
    engine.teardown()
    weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    return models.Trained(losses, norms, weights), Recomputed.forwards


def run_all() -> list[Any]:
    torch.set_default_dtype(torch.float64)
    return [train(kind, schedule) for kind in KINDS for schedule in SCHEDULES]


def alone(kind: type[nn.Module]) -> models.Trained:
    module = PipelineModule(layers_of(kind), num_stages=1, stage=0, loss_fn=models.loss_of)
    return models.train_alone(module, 1, MICROS_OF.get(kind, MICROS))


@pytest.fixture()
def _in_doubles() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_in_doubles")
def test_a_backward_that_cannot_be_split_stays_whole() -> None:
    by_rank = run_ranks(run_all, 2)
    for number, kind in enumerate(KINDS):
        expected = alone(kind)
        for stage, results in enumerate(by_rank):
            for trained, forwards in results[number * len(SCHEDULES) :][: len(SCHEDULES)]:
                assert trained.losses == pytest.approx(expected.losses, abs=1e-9, rel=0), kind
                assert trained.norms == pytest.approx(expected.norms, abs=1e-9, rel=0), kind
                for name, value in trained.weights.items():
                    torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=1e-9)
                if issubclass(kind, Recomputed):
                    # Two layers, forward and recomputation. The first backward in halves costs more.
                    once = 2 * 2 * MICROS * models.STEPS
                    assert once <= forwards <= once + (20 if stage == 1 and kind is Recomputed else 0), (kind, stage)
