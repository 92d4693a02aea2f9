"""The Trainer run behind trainer_data; scripts/make_deepspeed_checkpoints.py trains it with DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SAVED_AT, STEPS, ROWS = 3, 8, 4


def train(arguments: type, trainer: type, folder: str, resume_from: str | None, **choice: Any) -> list[float]:
    """The losses of all steps, those of the checkpoint's run included. All ranks must call.

    Args:
        arguments: The class of the TrainingArguments; `trainer` that of the Trainer.
        resume_from: None trains from the beginning and saves.
        choice: `deepspeed` or `zero`.
    """
    args = arguments(
        folder,
        per_device_train_batch_size=ROWS,
        learning_rate=3e-2,
        warmup_steps=2,
        logging_steps=1,
        save_steps=SAVED_AT,
        save_strategy="no" if resume_from else "steps",
        save_total_limit=None,
        report_to=[],
        use_cpu=True,
        seed=1,
        disable_tqdm=True,
        max_steps=STEPS,
        **choice,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=16,
        max_position_embeddings=16,
        attention_dropout=0.1,
    )
    starts = range(2 * ROWS * STEPS)
    rows = [{"input_ids": (torch.arange(8) * 3 + start) % 16} for start in starts]
    made = trainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=[{**row, "labels": row["input_ids"]} for row in rows]
    )
    made.train(resume_from_checkpoint=resume_from)
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]
