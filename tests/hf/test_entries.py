"""Every way into hf_zero gives the numbers that DistributedDataParallel gives on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.hf import runs
from tests.hf.runs import Outcome

WORLD = 2
at_night = pytest.mark.nightly


def launch(function: Any, *args: Any) -> Outcome:
    """One run on two ranks; rank 0's outcome."""
    results: list[Outcome] = run_ranks(function, WORLD, *args, timeout=120, init_group=False)
    return results[0]


def assert_same(got: Outcome, want: Outcome, *, label: str, rel: float = 2e-5, weights: float = 2e-6) -> None:
    """The same to the digits that Trainer prints, the weights within what fp32 sums in another order may differ by."""
    assert len(want.losses) >= 5 and want.losses[0] != want.losses[-1], "vacuous: the reference did not learn"
    assert got.losses == pytest.approx(want.losses, rel=rel), label
    assert got.norms == pytest.approx(want.norms, rel=rel), label
    assert got.evals == pytest.approx(want.evals, rel=rel), label
    assert got.weights.keys() == want.weights.keys(), label
    for name, tensor in want.weights.items():
        assert torch.isfinite(got.weights[name]).all(), f"{label}: {name}"
        worst = (got.weights[name] - tensor).abs().max().item()
        assert worst <= weights + 1e-5 * tensor.abs().max().item(), f"{label}: {name} differs by {worst}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "entries",
    [
        [("subclass", 1), ("subclass", 3), ("enable", 2)],
        pytest.param([("subclass", 0), ("subclass", 2), ("enable", 3)], marks=at_night),
    ],
)
def test_trainer(entries: list[tuple[str, int]], tmp_path: Path) -> None:
    want = launch(runs.train, "ddp", 0, str(tmp_path / "ddp"))
    assert max(want.norms) > 0.5, "vacuous: nothing was clipped"
    for kind, stage in entries:
        got = launch(runs.train, kind, stage, str(tmp_path / f"{kind}{stage}"))
        assert_same(got, want, label=f"{kind}, stage {stage}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "entries", [[("enable", 2), ("mixin", 3)], pytest.param([("enable", 1), ("enable", 3)], marks=at_night)]
)
@pytest.mark.parametrize("lora", [False, True])
def test_unmodified_sft_trainer(lora: bool, entries: list[tuple[str, int]], tmp_path: Path) -> None:
    want = launch(runs.sft, "ddp", 0, str(tmp_path / "ddp"), lora)
    for kind, stage in entries:
        got = launch(runs.sft, kind, stage, str(tmp_path / f"{kind}{stage}"), lora)
        assert_same(got, want, label=f"{kind}, stage {stage}")


def test_trainer_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python script.py`: one process, no variable of any launcher, no process group."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    want = runs.train("stock", 0, str(tmp_path / "stock"))
    for stage in (1, 3):
        got = runs.train("subclass", stage, str(tmp_path / f"zero{stage}"))
        assert_same(got, want, label=f"stage {stage}")
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_trainers_one_after_the_other(tmp_path: Path) -> None:
    """The Trainers follow each other in one process: each with a model of its own, and a second one for a model that
    has been trained.
    """
    want: Any = launch(runs.three_trainers, "ddp", 0, str(tmp_path / "ddp"))
    assert want[0] != want[2] != want[1], "vacuous: the third does not go on with the first one's model"
    for stage in (1, 3):
        got: Any = launch(runs.three_trainers, "subclass", stage, str(tmp_path / f"zero{stage}"))
        assert got == [pytest.approx(losses, rel=2e-5) for losses in want], f"stage {stage}"


@pytest.mark.slow
@pytest.mark.parametrize("stages", [[1, 3], pytest.param([0, 2], marks=at_night)])
def test_accelerate_loop(stages: list[int], tmp_path: Path) -> None:
    want = launch(runs.accelerate_loop, "ddp", 0, str(tmp_path / "ddp"))
    for stage in stages:
        got = launch(runs.accelerate_loop, "plugin", stage, str(tmp_path / f"zero{stage}"))
        assert_same(got, want, label=f"stage {stage}")
        assert got.files == want.files


@pytest.mark.slow
@pytest.mark.parametrize("stages", [[1, 3], pytest.param([0, 2], marks=at_night)])
def test_initialize_loop_with_a_convnet(stages: list[int], tmp_path: Path) -> None:
    want = launch(runs.convnet_loop, "ddp", 0, str(tmp_path))
    for stage in stages:
        assert_same(launch(runs.convnet_loop, "initialize", stage, str(tmp_path)), want, label=f"stage {stage}")


@pytest.mark.slow
def test_evaluate_and_predict_before_train_and_train_twice(tmp_path: Path) -> None:
    want = launch(runs.evaluate_then_train, "ddp", 0, str(tmp_path / "ddp"))
    for stage in (0, 2, 3):
        got = launch(runs.evaluate_then_train, "subclass", stage, str(tmp_path / f"zero{stage}"))
        assert_same(got, want, label=f"stage {stage}")


@pytest.mark.slow
@pytest.mark.parametrize("save_only_model", [False, True])
def test_best_model_is_loaded_at_the_end(save_only_model: bool, tmp_path: Path) -> None:
    want = launch(runs.best_model, "ddp", 0, str(tmp_path / "ddp"), save_only_model)
    assert want.norms[0] < 5, "vacuous: the best model is the last one"
    for stage in (2, 3):
        got = launch(runs.best_model, "subclass", stage, str(tmp_path / f"zero{stage}"), save_only_model)
        assert_same(got, want, label=f"stage {stage}")
        assert got.files == want.files, "save_total_limit"


@pytest.mark.slow
def test_resume_is_bit_for_bit(tmp_path: Path) -> None:
    """10 steps = 5 + 5, with dropout: weights, moments, schedule, random numbers and data position."""
    for stage in (1, 3):
        whole, halves = str(tmp_path / f"whole{stage}"), str(tmp_path / f"halves{stage}")
        settings = {"max_steps": 10, "save_strategy": "steps", "save_steps": 5}
        want = run(stage, whole, None, settings)
        resumed = str(tmp_path / f"resumed{stage}")
        got = run(stage, resumed, f"{whole}/checkpoint-5", settings)
        assert got.losses == want.losses and got.norms == want.norms
        assert runs.digest(got.weights) == runs.digest(want.weights)
        other = run(stage, halves, None, {**settings, "seed": 8})
        assert runs.digest(other.weights) != runs.digest(want.weights), "vacuous: the seed has no effect"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_resume_twice_with_one_trainer(stage: int, tmp_path: Path) -> None:
    """The second resume begins where the first one did, not where it ended."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    want = run(stage, str(tmp_path / "whole"), None, settings)
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    arguments = (stage, str(tmp_path / "again"), checkpoint)
    got = run_ranks(runs.resume_twice, WORLD, *arguments, timeout=120, init_group=False, max_steps=6)[0]
    assert got == [want.losses, want.losses], "the log of a resumed run begins with the checkpoint's"


def run(stage: int, folder: str, resume: str | None, settings: dict[str, Any]) -> Outcome:
    results: list[Outcome] = run_ranks(
        runs.train, WORLD, "subclass", stage, folder, 0.1, resume, timeout=120, init_group=False, **settings
    )
    return results[0]


@pytest.mark.slow
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """The newest checkpoint has no manifest, as after a kill in mid-save: training goes on from the one before."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    folder = str(tmp_path / "run")
    want = run(3, folder, None, settings)
    (Path(folder) / "checkpoint-4" / "zero" / "manifest.json").unlink()
    results = run_ranks(runs.train, WORLD, "subclass", 3, folder, 0.1, True, timeout=120, init_group=False, **settings)
    assert results[0].losses == want.losses
    assert runs.digest(results[0].weights) == runs.digest(want.weights)
