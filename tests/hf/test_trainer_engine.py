"""The engine that a Trainer has: its lines, scripts that reach for it, and folders that no training resumes from."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.errors import CheckpointError
from hf_zero.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from tests.harness.ranks import RankFailure, run_ranks
from tests.hf import runs
from tests.monitors.test_progress import PROGRESS, THROUGHPUT, Collected

pytestmark = pytest.mark.slow  # short ones, but Trainers


def with_lines(folder: str, **keys: Any) -> dict[str, Any]:
    collected = Collected()
    logging.getLogger("hf_zero").addHandler(collected)
    args = hf_zero.TrainingArguments(**runs.arguments(folder, max_steps=4), zero=runs.zero_config(2, **keys))
    trainer = hf_zero.Trainer(
        model=runs.build(), args=args, train_dataset=runs.examples(40, 1), eval_dataset=runs.examples(9, 2)
    )
    trainer.train()
    trainer.evaluate()
    history = trainer.state.log_history
    return {"lines": collected.lines, "lrs": [entry["learning_rate"] for entry in history if "loss" in entry]}


def test_lines_of_a_trainer(tmp_path: Path) -> None:
    """Only what the file asks for; two micro-batches a step, though Trainer calls no step between them."""
    found = run_ranks(with_lines, 2, str(tmp_path), steps_per_print=2, wall_clock_breakdown=True, init_group=False)
    assert not found[1]["lines"]
    lines = found[0]["lines"]
    assert [" | fwd_microstep: " in line for line in lines if "time (ms)" in line] == [True, True, False] * 4
    progress = [line for line in lines if PROGRESS.search(line)]
    assert [line.partition(",")[0] for line in progress] == ["[Rank 0] step=0", "[Rank 0] step=2", "[Rank 0] step=4"]
    speeds = [match for line in lines if (match := THROUGHPUT.search(line))]
    assert [match.groups()[:2] for match in speeds] == [("8", "4")]
    assert found[0]["lrs"][0] == pytest.approx(0.01) and found[0]["lrs"][-1] < 0.01  # Trainer's own log


def test_a_trainer_is_quiet_unless_the_file_asks(tmp_path: Path) -> None:
    assert not run_ranks(with_lines, 1, str(tmp_path), init_group=False)[0]["lines"]


def online(kind: str, folder: str) -> dict[str, Any]:
    """Do what DeepSpeed's page in the documentation of transformers does after training."""
    with runs.entry(kind, 3) as (arguments_class, trainer_class, extra):
        args = arguments_class(**runs.arguments(folder), **extra)
        trainer = trainer_class(model=runs.build(), args=args, train_dataset=runs.examples(40, 1))
        assert trainer.deepspeed is None
        trainer.train()
        engine = hf_zero.engine_of(trainer.model)
        assert trainer.deepspeed is engine is not None
        assert kind == "enable" or trainer.zero is engine
        assert engine.gradient_accumulation_steps() == 2 and engine.train_batch_size() == 8

        checkpoint_dir = f"{folder}/checkpoint-final"
        trainer.deepspeed.save_checkpoint(checkpoint_dir)
        assert trainer.deepspeed.save_16bit_model(folder, "whole.safetensors")
        want = engine.full_state_dict(keep=True)
        with hf_zero.gathered_params(trainer.model, write_rank=0):
            for param in trainer.model.parameters():
                param.data.zero_()
        model = load_state_dict_from_zero_checkpoint(trainer.model, checkpoint_dir)
        assert model is trainer.model
        torch.testing.assert_close(engine.full_state_dict(keep=True), want, rtol=0, atol=0)
        return want


@pytest.mark.parametrize("kind", ["subclass", "enable"])
def test_scripts_reach_the_engine_through_the_trainer(kind: str, tmp_path: Path) -> None:
    want = run_ranks(online, 2, kind, str(tmp_path), init_group=False)[0]
    saved = load_file(tmp_path / "whole.safetensors")
    assert want.keys() - saved.keys() == {"lm_head.weight"}
    torch.testing.assert_close(saved, {name: want[name] for name in saved}, rtol=0, atol=0)


def resume(folder: str, checkpoint: Any) -> None:
    args = hf_zero.TrainingArguments(**runs.arguments(folder), zero=runs.zero_config(3))
    trainer = hf_zero.Trainer(model=runs.build(), args=args, train_dataset=runs.examples(40, 1))
    started: list[int] = []
    trainer.training_step = lambda *rest, **more: started.append(1)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        assert not started and trainer.zero is None, "the error came when training had begun"


def make(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def test_a_resume_that_cannot_be_is_an_error_before_training(tmp_path: Path) -> None:
    state = "trainer_state.json"
    cases = {
        make(tmp_path / "empty", "other"): "trainer_state.json, which is written last, is missing",
        make(tmp_path / "state", state): "neither zero/, the sharded state, nor weights",
        make(tmp_path / "ddp", state, "optimizer.pt", "model.safetensors"): "was written without hf_zero(.|\n)*Remove",
        make(tmp_path / "ds", state, "global_step5/mp_rank_00_model_states.pt"): "DeepSpeed's files",
        tmp_path / "nowhere": "there is no folder",
    }
    for folder, says in cases.items():
        _check_refused(run_ranks(resume, 2, str(tmp_path / "run"), str(folder), **_EXPECT), folder, says)
    # The same for the newest one that is found, and where there is none.
    make(tmp_path / "run" / "checkpoint-3", state)
    found = run_ranks(resume, 2, str(tmp_path / "run"), True, **_EXPECT)
    _check_refused(found, tmp_path / "run" / "checkpoint-3", "neither zero/")
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    _check_refused(run_ranks(resume, 2, str(tmp_path / "run"), True, **_EXPECT), tmp_path / "run", "no complete")


_EXPECT = {"init_group": False, "expect_error": True}


def _check_refused(found: list[Any], folder: Path, says: str) -> None:
    for failure in found:
        assert isinstance(failure, RankFailure) and failure.kind == CheckpointError.__name__
        assert f"Can't find a valid checkpoint at {folder}" in failure.message
        assert re.search(says, failure.message)


def seen_by_one(folder: str, checkpoint: str) -> None:
    """The folder is on the disk of rank 0's node only."""
    rank = int(os.environ["RANK"])
    resume(folder, checkpoint if rank == 0 else checkpoint + "-elsewhere")


def test_a_checkpoint_that_one_rank_cannot_see(tmp_path: Path) -> None:
    make(tmp_path / "checkpoint", "trainer_state.json", "model.safetensors")
    for failure in run_ranks(seen_by_one, 2, str(tmp_path / "run"), str(tmp_path / "checkpoint"), **_EXPECT):
        assert failure.kind == CheckpointError.__name__ and "checkpoint-elsewhere" in failure.message
