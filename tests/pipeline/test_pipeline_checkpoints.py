"""A checkpoint of a pipeline continues with another number of stages, without a pipeline, and consolidated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.extras.pipeline.module import PipelineModule
from tests.harness.ranks import run_ranks
from tests.pipeline import models

MICROS, BEFORE = 3, 2
# Stages, ZeRO stage, schedule, virtual stages of every run that saves or loads, by number of ranks
RUNS: dict[int, list[tuple[int, int, str, int]]] = {
    1: [(1, 0, "1f1b", 1)],
    2: [(2, 0, "zero_bubble", 1), (1, 1, "1f1b", 1), (2, 1, "interleaved", 2)],
    4: [(2, 1, "1f1b", 1), (4, 0, "gpipe", 1)],
}


class Scaled(models.Block):
    """Has a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += torch.tensor([1, 2])
        return super().forward(x)


def layers_of(variant: str) -> list[Any]:
    layers: list[Any] = models.layers_of(variant)
    layers[5] = hf_zero.pipeline.LayerSpec(Scaled)
    return layers


def engine_of(stages: int, zero: int, schedule: str, chunks: int, variant: str, total_micros: int = MICROS) -> Any:
    module = PipelineModule(layers_of(variant), num_stages=stages, virtual_stages=chunks, **models.options_of(variant))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": total_micros,
        "gradient_clipping": models.CLIP,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": models.RATE}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": models.RATE}},
        "pipeline": {"schedule": schedule},
    }
    return hf_zero.initialize(model=module, config=config)[0]


def steps(engine: Any, first: int, last: int) -> list[float]:
    """Return the losses of these steps; the micro-batches are the same however many pipelines share them."""
    losses = []
    pipelines = engine.world_size
    total = MICROS * 2 // pipelines
    for number, batch in enumerate(models.batches(models.STEPS, 1, MICROS * 2)):
        if first <= number < last:
            rank = engine.grid.data_parallel_id
            losses.append(engine.train_batch(iter(batch[0][rank * total : (rank + 1) * total])).item())
    return losses


def save_and_load(folder: str, world_size: int, variant: str, saved: list[str]) -> dict[str, Any]:
    """Continue all checkpoints that are there, and save one of each run of this number of ranks."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    for stages, zero, schedule, chunks in RUNS[world_size]:
        micros = MICROS * 2 // (world_size // stages)
        name = f"{variant}-{world_size}-{stages}-{zero}-{schedule}"
        for source in saved:
            torch.manual_seed(99)
            engine = engine_of(stages, zero, schedule, chunks, variant, micros)
            _, client = engine.load_checkpoint(str(Path(folder, source)))
            found[f"{source} -> {name}"] = (client, engine.global_steps, steps(engine, BEFORE, models.STEPS))
            engine.teardown()
        torch.manual_seed(7)
        engine = engine_of(stages, zero, schedule, chunks, variant, micros)
        first = steps(engine, 0, BEFORE)
        engine.save_checkpoint(str(Path(folder, name)), client_state={"from": name})
        found[name] = (first, steps(engine, BEFORE, models.STEPS))
        engine.teardown()
    return found


@pytest.fixture(scope="module", params=["tied", pytest.param("frozen", marks=pytest.mark.nightly)])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pipelines")
    found: dict[str, Any] = {}
    saved: list[str] = []
    for world_size in (2, 4, 1):
        by_rank = run_ranks(save_and_load, world_size, str(folder), world_size, request.param, saved, timeout=120)
        assert all(one == by_rank[0] for one in by_rank)  # the loss is the same on all ranks
        found |= by_rank[0]
        saved += [name for name in by_rank[0] if "->" not in name]
    return folder, found


@pytest.mark.slow
def test_every_run_goes_on_with_every_checkpoint(outcomes: tuple[Path, dict[str, Any]]) -> None:
    _, found = outcomes
    straight = {name: value for name, value in found.items() if "->" not in name}
    crossed = {name: value for name, value in found.items() if "->" in name}
    assert len(straight) == 6 and len(crossed) >= 9
    (first, then), *others = straight.values()
    assert first[0] != then[-1]
    for other in others:
        assert other[0] == pytest.approx(first, abs=1e-9)
        assert other[1] == pytest.approx(then, abs=1e-9)
    for name, (client, step, losses) in crossed.items():
        assert client == {"from": name.split(" -> ")[0]} and step == BEFORE
        assert losses == pytest.approx(then, abs=1e-9), name


def test_it_consolidates_into_the_names_of_a_sequential(outcomes: tuple[Path, dict[str, Any]]) -> None:
    folder, found = outcomes
    name = next(name for name in found if "->" not in name and "4-4" in name)
    state = hf_zero.get_fp32_state_dict_from_zero_checkpoint(str(folder / name))
    single = next(name for name in found if "->" not in name and "-1-1-0" in name)
    expected = hf_zero.get_fp32_state_dict_from_zero_checkpoint(str(folder / single))
    assert state.keys() == expected.keys()
    assert ("7.weight" in state) == ("frozen" in name or "tied" in name)
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-9)
    assert state["5.calls"].tolist() == [BEFORE * MICROS * 2, 2 * BEFORE * MICROS * 2]


def test_a_plain_sequential_takes_it(outcomes: tuple[Path, dict[str, Any]]) -> None:
    folder, found = outcomes
    name = next(name for name in found if "->" not in name and "-4-2-" in name)
    expected, got = run_ranks(into_a_sequential, 1, str(folder / name), name.split("-")[0])[0]
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in got)


def into_a_sequential(folder: str, variant: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    layers = [spec.build() for spec in layers_of(variant)]
    if variant == "tied":
        layers[-1] = layers[0]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": models.RATE}},
    }
    engine, *_ = hf_zero.initialize(model=nn.Sequential(*layers), config=config)
    engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    return hf_zero.get_fp32_state_dict_from_zero_checkpoint(folder), engine.full_state_dict(keep=True)


def train_and_die(folder: str) -> None:
    """Saves after every step; then a rank is gone in the middle of a batch."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    engine = engine_of(2, 0, "1f1b", 1, "tied", MICROS * 2)
    for number in range(BEFORE):
        steps(engine, number, number + 1)
        engine.save_checkpoint(folder)
    calls = iter(range(100))
    if engine.is_last_stage():
        engine.module.register_forward_hook(lambda *_: os._exit(9) if next(calls) == 3 else None)
    steps(engine, BEFORE, models.STEPS)


def continue_it(folder: str) -> list[float]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)
    engine = engine_of(3, 0, "zero_bubble", 1, "tied", MICROS * 2)
    engine.load_checkpoint(folder)
    return steps(engine, BEFORE, models.STEPS)


def train_straight() -> list[float]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    return steps(engine_of(1, 0, "gpipe", 1, "tied", MICROS * 2), 0, models.STEPS)


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    ended = run_ranks(train_and_die, 2, str(tmp_path), expect_error=True)
    assert [one.kind for one in ended] == ["DivergenceError", "Died"]
    (straight,) = run_ranks(train_straight, 1)
    for losses in run_ranks(continue_it, 3, str(tmp_path)):
        assert losses == pytest.approx(straight[BEFORE:], abs=1e-9)
