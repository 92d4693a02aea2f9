"""Trainer with the optimizers of a configuration, and with `optim="adafactor"`, against the same under plain DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero import optim
from tests.harness.ranks import run_ranks
from tests.hf.runs import Outcome, arguments, build, digest, examples, outcome, zero_config

# Each type has what TrainingArguments say, what the block says beside "auto", and what a script would give the class.
AUTO = {"lr": "auto", "weight_decay": "auto"}
BLOCKS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Lamb": ({"learning_rate": 0.1, "adam_epsilon": 1e-4}, {"eps": "auto"}, {"lr": 0.1, "eps": 1e-4}),
    "Lion": ({"learning_rate": 1e-3, "adam_beta2": 0.97}, {"betas": "auto"}, {"lr": 1e-3, "betas": (0.9, 0.97)}),
    "Muon": (
        {"learning_rate": 0.02, "adam_epsilon": 1e-4},
        {"adam_lr": 0.01, "eps": "auto"},
        {"lr": 0.02, "adam_lr": 0.01, "eps": 1e-4},
    ),
    "Adafactor": ({"learning_rate": 0.1}, {}, {"lr": 0.1}),
}


def with_block(kind: str, stage: int, folder: str) -> Outcome:
    said, params, _ = BLOCKS[kind]
    block = {"type": kind, "params": {**AUTO, **params}}
    args = hf_zero.TrainingArguments(
        **arguments(folder, weight_decay=0.1, **said), zero=zero_config(stage, optimizer=block)
    )
    trainer = hf_zero.Trainer(model=build(), args=args, train_dataset=examples(40, 1))
    trainer.train()
    assert type(trainer.optimizer.optimizer.optimizer).__name__ == kind
    return outcome(trainer, folder + "/final")


def under_ddp(kind: str, folder: str) -> Outcome:
    model = build()
    said, _, settings = BLOCKS[kind]
    if kind == "Muon":
        settings = {**settings, "others": [model.get_input_embeddings().weight]}
    made = (getattr(optim, kind, None) or getattr(torch.optim, kind), {**settings, "weight_decay": 0.1})
    args = transformers.TrainingArguments(**arguments(folder, weight_decay=0.1, **said))
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=examples(40, 1), optimizer_cls_and_kwargs=made
    )
    trainer.train()
    return outcome(trainer, folder + "/final")


def close(got: Outcome, want: Outcome, atol: float) -> None:
    assert got.losses == pytest.approx(want.losses, abs=1e-3) and len(want.losses) == 5
    before = build().state_dict()
    for name, value in want.weights.items():
        torch.testing.assert_close(got.weights[name], value, rtol=0, atol=atol, msg=name)
        assert float((value - before[name]).abs().max()) > 5 * atol, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_trainer_takes_the_block(tmp_path: Path, kind: str) -> None:
    want = run_ranks(under_ddp, 2, kind, str(tmp_path / "ddp"), init_group=False)[0]
    for stage in (1, 3):
        got = run_ranks(with_block, 2, kind, stage, str(tmp_path / str(stage)), init_group=False)[0]
        close(got, want, 4e-4)


def adafactor(kind: str, stage: int, folder: str, resume: bool = False, **more: Any) -> Outcome:
    more = {"optim": "adafactor", "save_strategy": "steps", "save_steps": 3, **more}
    if kind == "ddp":
        args = transformers.TrainingArguments(**arguments(folder, **more))
        trainer: Any = transformers.Trainer(model=build(), args=args, train_dataset=examples(40, 1))
    else:
        args = hf_zero.TrainingArguments(**arguments(folder, **more), zero=zero_config(stage))
        trainer = hf_zero.Trainer(model=build(), args=args, train_dataset=examples(40, 1))
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
    return outcome(trainer, folder + "/final")


@pytest.mark.slow
def test_adafactor_of_training_arguments_and_its_checkpoints(tmp_path: Path) -> None:
    want = run_ranks(adafactor, 2, "ddp", 0, str(tmp_path / "ddp"), init_group=False)[0]
    for stage in (0, 3):
        folder = str(tmp_path / str(stage))
        got = run_ranks(adafactor, 2, "zero", stage, folder, init_group=False)[0]
        close(got, want, 4e-4)
        again = run_ranks(adafactor, 2, "zero", 3 - stage, folder, True, init_group=False)[0]
        for name, value in got.weights.items():
            torch.testing.assert_close(again.weights[name], value, rtol=0, atol=1e-5, msg=name)


def one_bit(folder: str) -> tuple[list[float], str]:
    block = {"type": "OneBitAdam", "params": {"lr": "auto", "freeze_step": 4, "eps": "auto", "betas": "auto"}}
    said = arguments(folder, max_steps=16, learning_rate=5e-3, adam_beta2=0.9)
    args = hf_zero.TrainingArguments(**said, zero=zero_config(0, optimizer=block))
    trainer = hf_zero.Trainer(model=build(), args=args, train_dataset=examples(40, 1))
    trainer.train()
    counts = hf_zero.engine_of(trainer.model).comm.counts
    assert counts["all_to_all"].calls == 12, counts
    return outcome(trainer, folder + "/final").losses, digest(dict(trainer.model.state_dict()))


@pytest.mark.slow
def test_trainer_with_one_bit_adam(tmp_path: Path) -> None:
    (losses, first), (_, second) = run_ranks(one_bit, 2, str(tmp_path), init_group=False)
    assert first == second, "all ranks hold the same weights"
    assert sum(losses[-3:]) < sum(losses[3:6]) < sum(losses[:3])
