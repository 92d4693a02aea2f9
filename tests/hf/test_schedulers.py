"""A scheduler block under Trainer and accelerate gives what plain torch gives on the same curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import run_ranks
from tests.hf import runs, schedule_runs
from tests.hf.schedule_runs import AUTO_OPTIMIZER, AUTO_SCHEDULER, BLOCKS, FIXED, TOTAL, curve
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


def test_an_unmodified_trainer_under_enable_trained_twice(tmp_path: Path) -> None:
    results = run_ranks(schedule_runs.enabled_twice, 1, 3, str(tmp_path), timeout=120, init_group=False)
    assert results[0] == pytest.approx(CURVE, rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("scheduler", "client", "parts"),
    [
        (FIXED, False, ["total_num_steps=10 vs TrainingArguments num_training_steps (calculated)=6"]),
        ({"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}}, False, ["total_num_steps = null"]),
        ({"type": "WarmupLR"}, True, ["Trainer has a LambdaLR (optimizers=)", "scheduler block (WarmupLR)"]),
    ],
)
def test_contradictions_of_trainer_and_block(
    scheduler: dict[str, Any], client: bool, parts: list[str], tmp_path: Path
) -> None:
    failure = run_ranks(
        schedule_runs.refused, 1, str(tmp_path), scheduler, client, expect_error=True, init_group=False
    )[0]
    assert failure.kind == "ConfigError", failure
    for part in parts:
        assert part in failure.message, failure.message


@pytest.mark.slow
@pytest.mark.parametrize("way", list(BLOCKS))
def test_an_accelerate_script_with_dummies(way: str, tmp_path: Path) -> None:
    want = launch(schedule_runs.loop, "reference", -1, "")[0]
    assert want.norms == pytest.approx(CURVE)
    start = runs.build().state_dict()
    assert all((want.weights[name] - start[name]).abs().max() > 0.01 for name in start), "vacuous: nothing moved"
    for stage in (1, 3):
        got = launch(schedule_runs.loop, way, stage, str(tmp_path / str(stage)))[0]
        assert got.norms == pytest.approx(CURVE, rel=0, abs=1e-12), f"stage {stage}"
        assert got.losses == pytest.approx(want.losses, rel=2e-5), f"stage {stage}"
        for name, tensor in want.weights.items():
            assert (got.weights[name] - tensor).abs().max() < 1e-5, f"stage {stage}: {name}"


def test_schedulers_prepared_apart_and_from_the_script_count_steps_of_the_optimizer() -> None:
    for function, args in (
        (schedule_runs.prepared_apart, ()),
        (schedule_runs.own_schedule, (False,)),
        (schedule_runs.own_schedule, (True,)),
    ):
        for rates in launch(function, *args):
            assert rates == pytest.approx(CURVE, rel=0, abs=1e-12), function.__name__
    assert launch(schedule_runs.split_batches) == [21, 21]


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("own scheduler", "got a StepLR, and the configuration has a scheduler block (WarmupDecayLR)"),
        ("no length", 'total_num_steps = "auto": it takes its value from DummyScheduler, which has none here'),
        ("nothing to build", "the configuration has no scheduler block"),
        ("mixed", "got a DummyOptim and a scheduler that is not a DummyScheduler"),
        ("parameters", "DummyOptim has momentum, and without an optimizer block it stands for AdamW"),
        ("not prepared", "the DummyScheduler's optimizer is a DummyOptim that was not prepared"),
    ],
)
def test_dummies_that_nothing_can_be_built_from(case: str, part: str) -> None:
    failure = run_ranks(schedule_runs.misuse, 1, case, expect_error=True, init_group=False)[0]
    assert failure.kind == "ConfigError" and part in failure.message, failure
    assert "\n" in failure.message, "the remedy"
