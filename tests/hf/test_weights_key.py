"""`stage3_gather_16bit_weights_on_model_save`: whether a Trainer's checkpoints hold whole weights in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_zero
from hf_zero.extras.cli.main import main
from tests.harness.ranks import run_ranks
from tests.hf.runs import arguments, build, examples, zero_config


def train(folder: str, setting: bool | None) -> torch.Tensor:
    """One step in bf16 and its checkpoint; the logits of the sharded model after it."""
    config = zero_config(3, bf16={"enabled": True})
    if setting is not None:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = setting
    more: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "bf16": True}
    args = hf_zero.TrainingArguments(**arguments(folder, **more), zero=config)
    trainer = hf_zero.Trainer(model=build(), args=args, train_dataset=examples(8, 1))
    trainer.train()
    return logits_of(trainer.model)


def logits_of(model: LlamaForCausalLM) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 15).view(1, 12)).logits.float()


@pytest.mark.parametrize(
    "setting", [False, *(pytest.param(setting, marks=pytest.mark.slow) for setting in (True, None))]
)
def test_weights_in_checkpoints(tmp_path: Path, setting: bool | None) -> None:
    logits = run_ranks(train, 2, str(tmp_path), setting)
    checkpoint = tmp_path / "checkpoint-1"
    weights = checkpoint / "model.safetensors"
    assert weights.exists() is (setting is not False) and (checkpoint / "zero").exists()
    if setting is False:
        assert main(["consolidate", str(checkpoint), str(tmp_path / "whole")]) == 0
        checkpoint = tmp_path / "whole"
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    for sharded in logits:
        assert torch.equal(logits_of(model), sharded)
    assert not torch.equal(logits_of(build().bfloat16()), logits[0]), "the step changed nothing"
