"""hf_zero on the lag device, each rank with one of its own: the numbers of the CPU, whatever the schedule.

What a missing wait would let through is NaN or an error here; see csrc/lag.cpp.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks
from tests.lag import device, group

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

STEPS = 3
VOCABULARY, HIDDEN, LAYERS = 11, 8, 3
_UNSHARD_ALL = {"stage3_param_persistence_threshold": 0}  # small parameters too
STAGES = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, **_UNSHARD_ALL},
    "stage 2, optimizer on the host": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "stage 3, all on the host": {
        "stage": 3,
        **_UNSHARD_ALL,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}
IN_GROUPS = {
    "stage 2": {"stage": 2, "sharding_group": 2},
    "stage 3": {"stage": 3, **_UNSHARD_ALL, "sharding_group": 2},
    "stage 3, hybrid": {"stage": 3, **_UNSHARD_ALL, "sharding_group": 2, "hybrid_shard": True},
    "stage 3, quantized": {
        "stage": 3,
        **_UNSHARD_ALL,
        "sharding_group": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
    "stage 3, optimizer on the host": {
        "stage": 3,
        **_UNSHARD_ALL,
        "sharding_group": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "stage 3, all on the host": {**STAGES["stage 3, all on the host"], "sharding_group": 2},
    "stage 3, parameters on the host and on a disk": {
        "stage": 3,
        **_UNSHARD_ALL,
        "sharding_group": 2,
        "offload_param": {"device": "nvme", "nvme_path": tempfile.gettempdir(), "max_in_cpu": 1000},
    },
}
SCHEDULES = ["late", "early", "random:1"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mlp(self.norm(x)))


class Layers(nn.Module):
    """An embedding, blocks that are units of stage 3, a head."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def _config(zero: dict[str, Any], accumulation: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": zero,
    }


def _train(place: str, zero: dict[str, Any], accumulation: int) -> tuple[list[float], Counter[str]]:
    """Losses and norms of some steps, and how often the host waited for the device in the last one, by place."""
    torch.manual_seed(0)
    engine, *_ = hf_zero.initialize(model=Layers(), config=_config(zero, accumulation))
    numbers = []
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        batches = torch.randint(VOCABULARY, (accumulation, 2, 5), generator=generator).to(engine.device)
        _take_waits(place)
        losses = []
        for ids in batches:
            loss = engine(ids, ids.roll(1))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        waits = _take_waits(place)
        numbers += [loss.item() for loss in losses]
        numbers.append(float(engine.get_global_grad_norm()))
    return numbers, waits


def _take_waits(place: str) -> Counter[str]:
    """Return the host's waits for the device since the last call: what waited, and the innermost file and function."""
    if place == "cpu":
        return Counter()
    places = [(kind, where.split(" < ")[0]) for kind, where in device.take_syncs()]
    return Counter(f"{kind} {where.partition(':')[0]} {where.rpartition(' ')[2]}" for kind, where in places)


def _on_lag(zero: dict[str, Any], accumulation: int) -> tuple[list[float], Counter[str]]:
    device.enable()
    group.register()
    trained = _train("lag", zero, accumulation)
    torch.accelerator.synchronize()
    assert device.take_reports() == []
    return trained


@pytest.mark.parametrize("world_size, accumulation", [(1, 1), (2, 2)])
@pytest.mark.parametrize("stage", STAGES)
def test_numbers_are_those_of_the_cpu(stage: str, world_size: int, accumulation: int) -> None:
    expected = [numbers for numbers, _ in run_ranks(_train, world_size, "cpu", STAGES[stage], accumulation)]
    for schedule in SCHEDULES:
        ranks = run_ranks(_on_lag, world_size, STAGES[stage], accumulation, env={"LAG_SCHEDULE": schedule})
        assert [numbers for numbers, _ in ranks] == expected, schedule


@pytest.mark.parametrize("stage", IN_GROUPS)
def test_numbers_of_ranks_in_groups_are_those_of_the_cpu(stage: str) -> None:
    expected = [numbers for numbers, _ in run_ranks(_train, 4, "cpu", IN_GROUPS[stage], 2)]
    for schedule in SCHEDULES:
        ranks = run_ranks(_on_lag, 4, IN_GROUPS[stage], 2, env={"LAG_SCHEDULE": schedule})
        assert [numbers for numbers, _ in ranks] == expected, schedule


@pytest.mark.parametrize("stage", ["stage 0", "stage 2", "stage 3"])
def test_host_waits_for_the_vote_of_a_step_only(stage: str) -> None:
    """It is ahead of the device in between."""
    for _, waits in run_ranks(_on_lag, 2, STAGES[stage], 2):
        assert waits == {"copy step_ballot.py _on_host": 1}
