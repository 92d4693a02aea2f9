"""A scheduler block under Trainer and accelerate gives what plain torch gives on the same curve."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import run_ranks
from tests.hf import runs, schedule_runs
from tests.hf.schedule_runs import AUTO_OPTIMIZER, AUTO_SCHEDULER, BLOCKS, TOTAL, curve
from tests.hf.test_entries import assert_same

CURVE = [curve(step) for step in range(TOTAL)]


def launch(function: Any, *args: Any, **more: Any) -> Any:
    return run_ranks(function, 2, *args, timeout=150, init_group=False, **more)


def test_the_curve_moves() -> None:
    assert len(set(CURVE)) > 7 and max(CURVE) == schedule_runs.PEAK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "blocks"),
    [
        (1, {"scheduler": AUTO_SCHEDULER}),
        (3, {"scheduler": AUTO_SCHEDULER}),
        (3, {"scheduler": AUTO_SCHEDULER, "optimizer": AUTO_OPTIMIZER}),
    ],
)
def test_trainer_follows_plain_torch_on_the_same_curve(stage: int, blocks: dict[str, Any], tmp_path: Path) -> None:
    """The block's numbers are "auto": rate and warm-up from the arguments, the length from the data loader."""
    want, rates = launch(schedule_runs.trainer, "ddp", 0, str(tmp_path / "ddp"), {})[0]
    assert rates == pytest.approx(CURVE, rel=1e-9), "the reference is on the curve"
    got, got_rates = launch(schedule_runs.trainer, "zero", stage, str(tmp_path / "zero"), blocks)[0]
    assert got_rates == pytest.approx(CURVE, rel=0, abs=1e-12)
    assert_same(got, want, label=f"stage {stage}")
    again, resumed = launch(
        schedule_runs.trainer, "zero", stage, str(tmp_path / "resumed"), blocks, f"{tmp_path}/zero/checkpoint-4"
    )[0]
    assert resumed == got_rates, "the log of the first steps comes with the checkpoint"
    assert again.losses == got.losses and runs.digest(again.weights) == runs.digest(got.weights)


@pytest.mark.slow
def test_an_unmodified_trainer_under_enable_trained_twice(tmp_path: Path) -> None:
    results = run_ranks(schedule_runs.enabled_twice, 1, 3, str(tmp_path), timeout=120, init_group=False)
    assert results[0] == pytest.approx(CURVE, rel=0, abs=1e-12)


def test_contradictions_of_trainer_and_block(tmp_path: Path) -> None:
    said = run_ranks(schedule_runs.refused, 1, str(tmp_path), init_group=False)[0]
    assert len(said) == len(schedule_runs.CONTRADICTIONS), said
    assert "total_num_steps=10 vs TrainingArguments num_training_steps (calculated)=2" in said[0]
    assert "total_num_steps = null: WarmupDecayLR cannot do without it" in said[1]
    assert "Trainer has a LambdaLR (optimizers=)" in said[2] and "scheduler block (WarmupLR)" in said[2]


def test_a_trainer_with_a_scheduler_of_its_own_is_told_of_the_block(tmp_path: Path) -> None:
    said = run_ranks(schedule_runs.passed_over, 1, str(tmp_path), init_group=False)[0]
    assert any("OwnScheduler.create_scheduler: the scheduler block counts only if" in text for text in said), said


@functools.cache
def plain_loop() -> runs.Outcome:
    outcome: runs.Outcome = launch(schedule_runs.loop, "reference", -1, "")[0]
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("way", list(BLOCKS))
def test_an_accelerate_script_with_dummies(way: str, tmp_path: Path) -> None:
    want = plain_loop()
    assert want.norms == pytest.approx(CURVE)
    start = runs.build().state_dict()
    assert all((want.weights[name] - start[name]).abs().max() > 0.01 for name in start), "vacuous: nothing moved"
    for stage in (1, 3):
        got = launch(schedule_runs.loop, way, stage, str(tmp_path / str(stage)))[0]
        assert got.norms == pytest.approx(CURVE, rel=0, abs=1e-12), f"stage {stage}"
        assert got.losses == pytest.approx(want.losses, rel=2e-5), f"stage {stage}"
        for name, tensor in want.weights.items():
            assert (got.weights[name] - tensor).abs().max() < 1e-5, f"stage {stage}: {name}"


@pytest.mark.slow
def test_schedulers_prepared_apart_and_from_the_script_count_steps_of_the_optimizer() -> None:
    for apart, own, split, total in launch(schedule_runs.counts):
        assert apart == own == split == pytest.approx(CURVE, rel=0, abs=1e-12)
        assert total == 21


def test_dummies_that_nothing_can_be_built_from() -> None:
    said = run_ranks(schedule_runs.misuse, 1, init_group=False)[0]
    for case, part in {
        "own scheduler": "got a StepLR, and the configuration has a scheduler block (WarmupDecayLR)",
        "no length": 'total_num_steps = "auto": it takes its value from DummyScheduler, which has none here',
        "nothing to build": "the configuration has no scheduler block",
        "mixed": "got a DummyOptim and a scheduler that is not a DummyScheduler",
        "parameters": "DummyOptim has momentum, and without an optimizer block it stands for AdamW",
        "not prepared": "the DummyScheduler's optimizer is a DummyOptim that was not prepared",
    }.items():
        assert part in said[case] and "\n" in said[case], said[case]
