"""Six mistakes, one at a time put into hf_zero: the lag device finds each of them in a small training.

What is found is a report of the device, an error, or numbers other than those of the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.distributed import processes
from hf_zero.distributed.group_work import DeviceWork
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.shard import ShardTensor
from hf_zero.sharding.unit import ShardUnit
from tests.harness.ranks import RankFailure, run_ranks
from tests.lag import device, group
from tests.lag.test_training import HIDDEN, LAYERS, STAGES, VOCABULARY, Layers, _config

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

STEPS = 3


# ---------------------------------------------------------------- the mistakes
def a_wait_is_dropped() -> None:
    """The compute stream does not wait for collectives."""
    DeviceWork._until_over = lambda work: None  # type: ignore[method-assign]


def an_event_is_not_recorded() -> None:
    """The event is that of the copies of a shard from the host."""
    plain = ShardTensor.copy_parts_to

    def copy_parts_to(shard: ShardTensor, places: Any) -> torch.Event | None:
        plain(shard, places)
        shard._being_read = torch.Event(places[0].device.type)
        return shard._being_read

    ShardTensor.copy_parts_to = copy_parts_to  # type: ignore[method-assign]


def memory_goes_early() -> None:
    """The memory is that of a unit which only other ranks need, while its all-gather is under way."""

    def reshard(params: OnDemandParams, unit: ShardUnit) -> None:
        for flat in unit.flats:
            flat.reshard()
        plain(params, unit)

    plain = OnDemandParams.reshard
    OnDemandParams.reshard = reshard  # type: ignore[method-assign]


def gradients_are_read_before_they_are_there() -> None:
    """The gradients are on the host: neither the norm nor the update waits for their copies."""
    plain = GradAccumulator.lend

    def lend(acc: GradAccumulator, reader: Any, *, swap: bool) -> Any:
        return plain(acc, reader, swap=swap)[0], None

    GradAccumulator.lend = lend  # type: ignore[method-assign]
    GradAccumulator.wait_for_copies = lambda acc: None  # type: ignore[method-assign]


def a_source_is_written_to() -> None:
    """The update writes to shards on the host that copies may be reading."""
    ShardTensor.wait_for_readers = lambda shard: None  # type: ignore[method-assign]


def another_device_is_current() -> None:
    """Every rank leaves the first device the current one."""
    processes.use_device = lambda device: None


@dataclass(frozen=True)
class Mutant:
    mutate: Callable[[], None]
    stage: str  # of test_training.STAGES
    says: str  # part of the error; "" where there is none, and the numbers are others
    world_size: int = 2

    def __str__(self) -> str:
        return self.mutate.__name__


_STILL_USED = "may still use it: neither the former nor the host has waited"
MUTANTS = [
    Mutant(a_wait_is_dropped, "stage 3", _STILL_USED),
    # With several ranks the all-gather waits for the copy, and what uses the weights for the all-gather.
    Mutant(an_event_is_not_recorded, "stage 3, all on the host", _STILL_USED, world_size=1),
    Mutant(memory_goes_early, "stage 3", _STILL_USED),
    Mutant(gradients_are_read_before_they_are_there, "stage 3, all on the host", ""),
    Mutant(a_source_is_written_to, "stage 3, all on the host", "the host wrote to the source"),
    Mutant(another_device_is_current, "stage 3", "the group computes on"),
]


# ---------------------------------------------------------------- what they are found in
class Skipping(Layers):
    """Can leave out its last layer."""

    skips = False

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers[: LAYERS - self.skips]:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def _train(place: str, stage: str) -> list[float]:
    torch.manual_seed(0)
    model = Skipping().to(place)
    engine, *_ = hf_zero.initialize(model=model, config=_config(STAGES[stage], 1))
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    numbers = []
    for step in range(STEPS):
        model.skips = step == STEPS - 1 and torch.distributed.get_rank() == 0
        ids = torch.randint(VOCABULARY, (2, 5), generator=generator).to(engine.device)
        loss = engine(ids, ids.roll(1))
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            engine(ids, ids)  # nobody waits for it
        hf_zero.set_full_param(model, torch.full((HIDDEN,), 0.1 * step), "layers.0.mlp.bias")
        numbers.append(float(engine.get_global_grad_norm()))
        numbers.append(loss.item())
    return numbers


def _on_lag(mutate: Callable[[], None] | None, stage: str) -> list[float]:
    device.enable()
    group.register()
    if mutate is not None:
        mutate()
    numbers = _train("lag", stage)
    torch.accelerator.synchronize()
    assert device.take_reports() == []
    return numbers


@functools.cache
def _by_cpu(world_size: int, stage: str) -> list[list[float]]:
    return run_ranks(_train, world_size, "cpu", stage)


@pytest.mark.parametrize("stage, world_size", dict.fromkeys((one.stage, one.world_size) for one in MUTANTS))
def test_there_is_nothing_to_find_without_them(stage: str, world_size: int) -> None:
    assert run_ranks(_on_lag, world_size, None, stage) == _by_cpu(world_size, stage)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_it_is_found(mutant: Mutant) -> None:
    if mutant.says:
        ends = run_ranks(_on_lag, mutant.world_size, mutant.mutate, mutant.stage, expect_error=True)
        assert any(isinstance(end, RankFailure) and mutant.says in end.message for end in ends), ends
    else:
        numbers = run_ranks(_on_lag, mutant.world_size, mutant.mutate, mutant.stage)
        expected = _by_cpu(mutant.world_size, mutant.stage)
        assert all(mine != right for mine, right in zip(numbers, expected, strict=True)), numbers
