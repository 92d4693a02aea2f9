"""Schedules in `initialize`: the four mixes of what the script and the configuration bring, and a resume in mid-curve.

Compared with plain torch in one process on the whole batch, whose rates come from the formula written here.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.optim import WarmupLR
from tests.checkpoint.test_resume import offload
from tests.harness import models
from tests.harness.ranks import run_ranks

WORLD, ACCUMULATION, STEPS, SAVED_AT = 2, 2, 9, 4
PEAK, WARMUP, TOTAL = 0.02, 4, 8
BLOCKS: dict[str, dict[str, Any]] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": TOTAL, "warmup_max_lr": PEAK, "warmup_num_steps": WARMUP},
    },
}


def rate(step: int) -> float:
    """Return what step number `step` uses: WarmupDecayLR, whose iterations come one step late."""
    i = step - 1
    if i < 0:
        return 0.0
    return PEAK * (math.log(i + 1) / math.log(WARMUP) if i < WARMUP else max(0.0, (TOTAL - i) / (TOTAL - WARMUP)))


def by_hand(optimizer: torch.optim.Optimizer) -> Any:
    """The same curve as a scheduler of the script's own: each call of the lambda is for the step to come."""
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def batch(step: int, micro: int, rank: int) -> dict[str, Any]:
    return models.make_batch("plain", seed=(step * ACCUMULATION + micro) * WORLD + rank, rank=rank)


def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = models.build("plain", torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        batches = [batch(step, micro, rank) for micro in range(ACCUMULATION) for rank in range(WORLD)]
        loss = torch.stack([model(**one)["loss"] for one in batches]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def start(stage: int, mix: tuple[str, str]) -> Any:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
    }
    model = models.build("plain", torch.float64)
    optimizer, scheduler = mix
    brought: dict[str, Any] = {}
    if optimizer == "configured":
        config["optimizer"] = copy.deepcopy(BLOCKS["optimizer"])
    else:
        brought["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.1)
    if scheduler == "configured":
        config["scheduler"] = copy.deepcopy(BLOCKS["scheduler"])
    elif scheduler == "object":
        brought["lr_scheduler"] = by_hand(brought["optimizer"])
    else:
        brought["lr_scheduler"] = by_hand
    engine, sharded, _, made = hf_zero.initialize(model=model, config=config, **brought)
    assert made is engine.lr_scheduler is not None and sharded is engine.optimizer
    assert (type(made).__name__ == "WarmupDecayLR") == (scheduler == "configured")
    return engine


def steps(engine: Any, first: int, last: int) -> tuple[list[float], list[float]]:
    """(losses of this rank, rates that the steps used)."""
    losses, used = [], []
    for step in range(first, last):
        total = 0.0
        for micro in range(ACCUMULATION):
            loss = engine(**batch(step, micro, engine.rank))["loss"]
            engine.backward(loss)
            used.append(engine.optimizer.param_groups[0]["lr"])
            assert engine.lr_scheduler.get_last_lr() == [used[-1]]
            engine.step()
            total += loss.item() / ACCUMULATION
        losses.append(total)
    return losses, used[::ACCUMULATION]


def train(stage: int, mix: tuple[str, str], folder: str) -> dict[str, Any]:
    engine = start(stage, mix)
    losses, used = steps(engine, 0, SAVED_AT)
    engine.save_checkpoint(folder)
    more, later = steps(engine, SAVED_AT, STEPS)
    weights = engine.full_state_dict(keep=engine.rank == 0)
    engine.teardown()
    again = start(stage, mix)
    again.load_checkpoint(folder)
    resumed, resumed_rates = steps(again, SAVED_AT, STEPS)
    assert (resumed, resumed_rates) == (more, later), "the resume left the curve"
    return {"losses": losses + more, "rates": used + later, "weights": weights}


MIXES = [
    ("configured", "configured"),
    ("client", "configured"),
    ("configured", "callable"),
    ("client", "callable"),
    ("client", "object"),
]
BY_DAY = [(3 if place % 2 == 0 else 1, mix) for place, mix in enumerate(MIXES)]


@pytest.mark.parametrize(
    ("stage", "mix"),
    [
        pytest.param(stage, mix, marks=() if (stage, mix) in BY_DAY else pytest.mark.nightly)
        for stage in (1, 3)
        for mix in MIXES
    ],
)
def test_the_mixes_follow_one_process(stage: int, mix: tuple[str, str], tmp_path: Path) -> None:
    results = run_ranks(train, WORLD, stage, mix, str(tmp_path))
    losses, weights = reference()
    assert losses[0] != pytest.approx(losses[-1], rel=0.01) and len({rate(step) for step in range(STEPS)}) > 5
    assert results[0]["rates"] == pytest.approx([rate(step) for step in range(STEPS)], rel=0, abs=1e-12)
    mean = [sum(pair) / WORLD for pair in zip(*(result["losses"] for result in results), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-9)
    for name, parameter in weights.items():
        torch.testing.assert_close(results[0]["weights"][name], parameter.detach(), rtol=1e-8, atol=1e-9)


def inference() -> None:
    """A training JSON used for inference: its scheduler block, "auto" and all, is not looked at."""
    config = {
        "zero_optimization": {"stage": 3},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}},
    }
    engine, optimizer, _, scheduler = hf_zero.initialize(model=models.build("plain"), config=config)
    assert optimizer is None and scheduler is None and engine.lr_scheduler is None
    hf_zero.shard(models.build("plain"), config)


def test_a_scheduler_block_is_no_matter_to_inference() -> None:
    run_ranks(inference, 1)


def per_group(lists: list[float]) -> list[float]:
    model = models.build("plain")
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:], "lr": 0.2}]
    block = {"type": "WarmupLR", "params": {"warmup_max_lr": lists, "warmup_num_steps": 2}}
    config = {"zero_optimization": {"stage": 3}, "scheduler": block}
    engine, _, _, scheduler = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
    assert isinstance(scheduler, WarmupLR)
    for step in range(4):
        engine.backward(engine(**batch(step, 0, 0))["loss"])
        engine.step()
    return [group["lr"] for group in engine.optimizer.param_groups]


def test_rates_for_each_group_and_a_list_that_does_not_fit() -> None:
    assert run_ranks(per_group, 1, [0.3, 0.4])[0] == [0.3, 0.4]
    failure = run_ranks(per_group, 1, [0.3, 0.4, 0.5], expect_error=True)[0]
    assert failure.kind == "ConfigError", failure
    assert "scheduler.params.warmup_max_lr = [0.3, 0.4, 0.5]: expected a number, or 2 numbers" in failure.message


def cycled(medium: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Rates and betas that move at every step, with optimizer states on `medium`."""
    model = models.build("plain")
    block = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "cycle_second_step_size": 2}
    config = {
        "zero_optimization": {"stage": 3, **offload(medium)},
        "optimizer": {"type": "AdamW", "params": {"eps": 1e-4}},
        "scheduler": {"type": "OneCycle", "params": {**block, "cycle_min_mom": 0.5}},
    }
    engine = hf_zero.initialize(model=model, config=config)[0]
    group = engine.optimizer.param_groups[0]
    used = []
    for step in range(7):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        used.append((group["lr"], *group["betas"]))
        engine.step()
    weights = engine.full_state_dict(keep=True)
    engine.teardown()
    return used, weights


def one_cycle(step: int) -> tuple[float, float, float]:
    height = (0, 1 / 3, 2 / 3, 1, 1 / 2, 0, 0)[step]
    return 1e-3 + 9e-3 * height, 0.5 if step == 0 else 0.9 - 0.4 * height, 0.99


@pytest.mark.parametrize("medium", ["cpu", *(pytest.param(m, marks=pytest.mark.slow) for m in ("none", "nvme"))])
def test_offloaded_updates_use_the_rates_and_betas_of_their_step(medium: str) -> None:
    """An update that runs beside the next forward must not see what the schedule has set since."""
    model = models.build("plain")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, eps=1e-4)
    for step in range(7):
        lr, *betas = one_cycle(step)
        optimizer.param_groups[0].update(lr=lr, betas=tuple(betas))
        torch.stack([model(**batch(step, 0, rank))["loss"] for rank in range(WORLD)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    used, weights = run_ranks(cycled, WORLD, medium)[0]
    for step, values in enumerate(used):
        assert values == pytest.approx(one_cycle(step), rel=0, abs=1e-12), step
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=2e-5, msg=name)


def scheduler_without_optimizer() -> None:
    hf_zero.initialize(model=models.build("plain"), lr_scheduler=by_hand, config={"zero_optimization": {"stage": 2}})


def test_a_scheduler_needs_an_optimizer() -> None:
    failure = run_ranks(scheduler_without_optimizer, 1, expect_error=True)[0]
    assert failure.kind == "ConfigError" and "lr_scheduler but no optimizer" in failure.message
