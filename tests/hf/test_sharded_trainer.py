"""Trainer over a model that was loaded in shards does what it does over one that was loaded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf.runs import Outcome, arguments, build, examples, outcome, zero_config


def train(source: Path, folder: str, early: bool, evaluate_first: bool, **more: Any) -> Outcome:
    """`early`: the arguments are made before the model, so that it is loaded in shards, and in the type of `bf16`."""
    dtype = torch.bfloat16 if "bf16" in more else torch.float32
    model = None if early else AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    settings = arguments(folder, save_strategy="steps", save_steps=2, max_steps=4, bf16="bf16" in more)
    args = hf_zero.TrainingArguments(**settings, zero=zero_config(3, **more))
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(source)
        assert hf_zero.engine_of(model) is not None
    trainer = hf_zero.Trainer(model=model, args=args, train_dataset=examples(40, 1), eval_dataset=examples(9, 2))
    if evaluate_first:
        trainer.evaluate()
        engine = hf_zero.engine_of(model)
        assert engine is not None and engine.memory_report()["optimizer"] == 0
    trainer.train()
    trainer.evaluate()
    again = AutoModelForCausalLM.from_pretrained(source)
    resumed = hf_zero.Trainer(model=again, args=args, train_dataset=examples(40, 1), eval_dataset=examples(9, 2))
    resumed.train(resume_from_checkpoint=folder + "/checkpoint-2")
    result = outcome(trainer, folder + "/final")
    second = outcome(resumed, folder + "/resumed")
    assert result.losses[2:] == second.losses[-2:], (result.losses, second.losses)
    assert all(torch.equal(second.weights[name], value) for name, value in result.weights.items())
    return result


@pytest.mark.slow
@pytest.mark.parametrize("evaluate_first", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(tmp_path: Path, evaluate_first: bool, bf16: bool) -> None:
    build().save_pretrained(tmp_path / "source", max_shard_size="20KB")
    more = {"bf16": {"enabled": True}} if bf16 else {}
    runs = {
        early: run_ranks(
            train, 2, tmp_path / "source", str(tmp_path / str(early)), early, evaluate_first, timeout=150, **more
        )
        for early in (False, True)
    }
    for whole, sharded in zip(runs[False], runs[True], strict=True):
        assert whole.losses == sharded.losses and len(set(whole.losses)) > 1
        assert whole.norms == sharded.norms and whole.evals == sharded.evals
        assert all(torch.equal(sharded.weights[name], value) for name, value in whole.weights.items())


def load_late(source: Path, folder: str) -> list[str]:
    import logging

    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("hf_zero").addHandler(Keep())
    model = AutoModelForCausalLM.from_pretrained(source)
    hf_zero.enable(zero_config(3))
    args = transformers.TrainingArguments(**arguments(folder, max_steps=1))
    transformers.Trainer(model=model, args=args, train_dataset=examples(20, 1)).train()
    return [message for message in messages if "loaded in full" in message]


def test_a_load_that_missed_the_sharding_is_told(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "source")
    first, second = run_ranks(load_late, 2, tmp_path / "source", str(tmp_path / "out"))
    assert len(first) == 1 and "before from_pretrained" in first[0] and second == []
