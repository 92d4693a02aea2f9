"""Two engines whose losses go through both models, a generator and a discriminator: the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

STEPS, ROWS = 4, 8
Weights = dict[str, torch.Tensor]


def build() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
    return generator.double(), discriminator.double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.999))


def play(models: tuple[Any, Any], update: tuple[Any, Any], backward: tuple[Any, Any], rank: int, world: int) -> None:
    """Train both for some steps: two backwards before the discriminator's step, and one through both models.

    Args:
        models, update, backward: The generator's and the discriminator's.
    """
    (generator, discriminator), judge = models, nn.BCELoss()
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        real, noise = (
            torch.randn(ROWS, width, generator=draw, dtype=torch.float64).chunk(world)[rank] for width in (8, 4)
        )
        ones, zeros = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
        discriminator.zero_grad()  # it has gradients of the generator's loss
        backward[1](judge(discriminator(real), ones))
        fake = generator(noise)
        backward[1](judge(discriminator(fake.detach()), zeros))
        update[1]()
        generator.zero_grad()
        backward[0](judge(discriminator(fake), ones))
        update[0]()


def on_ranks(stage: int, through_engines: bool) -> tuple[Weights, Weights]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    models = build()
    engines: Any = [hf_zero.initialize(model=one, optimizer=adam(one), config=config)[0] for one in models]
    played = tuple(engines) if through_engines else models
    update, backward = (tuple(getattr(one, name) for one in engines) for name in ("step", "backward"))
    play(played, update, backward, engines[0].rank, engines[0].world_size)
    whole = tuple(one.full_state_dict(keep=True) for one in engines)
    for one in engines:
        one.teardown()
    return whole


def all_on_ranks() -> list[tuple[Weights, Weights]]:
    return [on_ranks(stage, through_engines) for stage in range(4) for through_engines in (True, False)]


def test_a_loss_through_both_models() -> None:
    models, start = build(), build()
    step: list[Callable[[], Any]] = [adam(one).step for one in models]
    play(models, tuple(step), (torch.Tensor.backward,) * 2, 0, 1)
    for found in run_ranks(all_on_ranks, 2)[0]:
        for model, before, weights in zip(models, start, found, strict=True):
            for name, wanted in model.named_parameters():
                assert not torch.allclose(wanted, before.get_parameter(name), atol=1e-3), "vacuous"
                torch.testing.assert_close(weights[name], wanted.detach(), rtol=1e-9, atol=1e-12)
