"""Trainer's folder is whole after a run; and what of TrainingArguments holds beside ZeRO: tf32."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf import runs

# Files of a checkpoint at two ranks, as DeepSpeed's documents list theirs: global_step1/ is zero/ here, whose manifest
# says what is whole, and `latest` is not needed: Trainer names the folder.
OF_TRAINER = {
    *("checksums.json", "config.json", "generation_config.json", "model.safetensors", "scheduler.pt"),
    *("rng_state_0.pth", "rng_state_1.pth", "trainer_state.json", "training_args.bin"),
    *("zero_to_fp32.py", "consolidate.py"),
}
OF_ZERO = {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}


def save(folder: str, stage: int, **more: Any) -> None:
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    named = runs.arguments(folder, max_steps=2, save_strategy="steps", save_steps=1, **more)
    trainer = hf_zero.Trainer(
        model=runs.build(), args=hf_zero.TrainingArguments(**named, zero=zero), train_dataset=runs.examples(16, 1)
    )
    trainer.train()


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_trainer_has_these_files_and_no_others(stage: int, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), stage, init_group=False)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2"}
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        assert listing(folder) == OF_TRAINER | {f"zero/{name}" for name in OF_ZERO}
        assert (folder / "zero_to_fp32.py").stat().st_mode & 0o111, "it can be run"
        assert transformers.LlamaForCausalLM.from_pretrained(folder).config.hidden_size == 36


BEST = {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
DIFFERENT: dict[str, dict[str, Any]] = {
    "best model": {**BEST, "metric_for_best_model": "eval_loss"},
    "model only": {"save_only_model": True},
    "all": {},
    "relative": {},
    "a callback saves": {"save_strategy": "no"},
    "a callback saves the model": {"save_strategy": "no", "save_only_model": True},
    "found on one rank": {**BEST, "metric_for_best_model": "eval_loss"},
}


class SavesLate(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step == 2


class FindsNothing(transformers.TrainerCallback):
    """The stand-in for a node with a file system of its own."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.best_model_checkpoint = None


def save_elsewhere(folder: str, stage: int, how: str) -> tuple[str, int]:
    """The error, and how many steps had been taken by then."""
    rank = os.environ["RANK"]
    named = runs.arguments(folder, max_steps=3, **{"save_strategy": "steps", "save_steps": 1, **DIFFERENT[how]})
    if how == "relative":
        Path(folder, rank).mkdir()
        os.chdir(Path(folder, rank))
    named["output_dir"] = "out" if how == "relative" else folder if how == "found on one rank" else f"{folder}/{rank}"
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    args = hf_zero.TrainingArguments(**named, zero=zero)
    trainer = hf_zero.Trainer(
        model=runs.build(), args=args, train_dataset=runs.examples(16, 1), eval_dataset=runs.examples(4, 2)
    )
    if "callback" in how:
        trainer.add_callback(SavesLate())
    if how == "found on one rank" and rank == "1":
        trainer.add_callback(FindsNothing())
    with pytest.raises(hf_zero.CheckpointError) as caught:
        trainer.train()
    engine = hf_zero.engine_of(trainer.model)
    if engine is not None:  # the ranks go on together
        weights = runs.digest(engine.full_state_dict(keep=True))
        assert len(set(engine.comm.all_gather_object(weights, "weights"))) == 1
    return str(caught.value), trainer.state.global_step


@pytest.mark.slow
@pytest.mark.parametrize("how", DIFFERENT)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_folder_that_differs_by_rank_is_an_error_of_all_before_anything_is_lost(
    stage: int, how: str, tmp_path: Path
) -> None:
    (first, steps), other = run_ranks(save_elsewhere, 2, str(tmp_path), stage, how, init_group=False)
    assert other == (first, steps) and "the ranks do not agree" in first
    if how == "found on one rank":
        assert "the best model was not loaded" in first and "rank 1: no folder was found" in first and steps == 3
        return
    for rank in "01":
        assert f"rank {rank}: " in first and str(tmp_path / rank) in first
    outcome, expected = ("nothing was written", 2) if "callback" in how else ("nothing was trained", 0)
    assert outcome in first and steps == expected
    assert not listing(tmp_path)


@contextlib.contextmanager
def _ending_together(folder: Path) -> Iterator[None]:
    """A ValueError that each of two ranks raises by itself leaves when both have: one that is late finds the other."""
    try:
        yield
    except ValueError:
        (folder / f"raised-{os.environ['RANK']}").touch()
        deadline = time.monotonic() + 30
        while len(list(folder.glob("raised-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise


def set_tf32(folder: str, asked: bool | None, has_hardware: bool) -> tuple[str, bool, str]:
    """(precision of fp32 products before, whether cuBLAS may use tf32, and the precision after training)."""
    transformers.training_args.is_torch_tf32_available = lambda: has_hardware  # type: ignore[attr-defined]
    named = runs.arguments(folder, max_steps=1, **({} if asked is None else {"tf32": asked}))
    with _ending_together(Path(folder)):
        args = hf_zero.TrainingArguments(**named, zero={"zero_optimization": {"stage": 3}})
    before = torch.backends.fp32_precision  # type: ignore[attr-defined]
    trainer = hf_zero.Trainer(model=runs.build(), args=args, train_dataset=runs.examples(8, 1))
    trainer.train()
    after = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return before, torch.backends.cuda.matmul.fp32_precision == "tf32", after


@pytest.mark.slow
def test_tf32_is_transformers_flag_and_stays(tmp_path: Path) -> None:
    """No GPU here has it: where transformers finds one, it sets torch's flag, and hf_zero leaves that alone."""
    assert run_ranks(set_tf32, 2, str(tmp_path), True, True, init_group=False) == [("tf32", True, "tf32")] * 2
    off = run_ranks(set_tf32, 2, str(tmp_path), False, True, init_group=False)
    assert off == [("ieee", False, "ieee")] * 2
    failures = run_ranks(set_tf32, 2, str(tmp_path), True, False, init_group=False, expect_error=True)
    assert [failure.kind for failure in failures] == ["ValueError"] * 2, failures
    assert all("--tf32 requires Ampere" in failure.message for failure in failures)
