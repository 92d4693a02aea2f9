"""Training runs of unmodified TRL trainers on tiny models: plain in one process, or under `hf_zero.enable`.

A function here runs on every rank. `stage` None is the reference: stock TRL, the whole global batch in one process, or
DistributedDataParallel where the job has more ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.utils import hash_module

import hf_zero
from tests.hf.runs import VOCAB, Outcome, arguments, build, outcome, zero_config

GLOBAL_BATCH = 4
LORA = {"r": 3, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}


@contextlib.contextmanager
def zero(stage: int | None) -> Iterator[None]:
    """The configuration is enabled inside, unless this is the reference."""
    if stage is not None:
        hf_zero.enable(zero_config(stage))
    try:
        yield
    finally:
        hf_zero.disable()


def settings(folder: str, **more: Any) -> dict[str, Any]:
    """Arguments with the same global batch at every number of ranks."""
    base = {
        "per_device_train_batch_size": GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return arguments(folder, **{**base, **more})


def tokenizer() -> Any:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{index}": index for index in range(3, VOCAB)}}
    model = Tokenizer(WordLevel(words, unk_token="w3"))
    model.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def text(count: int, length: int, seed: int) -> list[str]:
    """Make sentences of `length` or fewer words."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, VOCAB, (count, length), generator=generator).tolist()
    return [" ".join(f"w{token}" for token in row[: length - index % 3]) for index, row in enumerate(rows)]


def preferences(count: int = 24) -> Dataset:
    """Prompts with a chosen and a rejected answer."""
    return Dataset.from_dict(
        {
            "prompt": text(count, 6, 1),
            "chosen": [" " + row for row in text(count, 7, 2)],
            "rejected": [" " + row for row in text(count, 7, 3)],
        }
    )


def base(folder: str) -> str:
    """Return where a model is saved for TRL to load its reference from, and a dataset with files that ranks
    can share.
    """
    path = folder + "/base"
    build().save_pretrained(path)
    preferences().save_to_disk(path + "_data")
    return path


def of_base(kind: type[LlamaForCausalLM], path: str) -> LlamaForCausalLM:
    """A model that says where it was loaded from."""
    model = kind(build().config)
    model.load_state_dict(build().state_dict())
    model.config._name_or_path = path
    return model


# -------------------------------------------------------------------- preference training
def dpo(stage: int | None, folder: str, path: str, reference: str, **more: Any) -> Outcome:
    """`reference`: "model" (handed over), "mixed" (moved towards the policy), "path" (TRL loads it), "lora" (none),
    "precomputed" (by a policy that was loaded in shards)."""
    with zero(stage):
        policy = LlamaForCausalLM.from_pretrained(path) if reference == "precomputed" else None
        if policy is not None:
            more = {"precompute_ref_log_probs": True}
        if reference == "mixed":
            more = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, "max_steps": 5}
        args = DPOConfig(**settings(folder, max_length=32, **more))
        torch.manual_seed(3)
        trainer = DPOTrainer(
            model=policy or (of_base(LlamaForCausalLM, path) if reference == "path" else build()),
            ref_model=build(seed=1) if reference in ("model", "mixed") else None,
            args=args,
            train_dataset=preferences() if policy is None else load_from_disk(path + "_data"),
            processing_class=tokenizer(),
            peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if reference == "lora" else None,
        )
        if policy is not None:
            assert trainer._precompute_model_hash == hash_module(build()), "the hash is not that of the full model"
        elif reference != "lora" and stage is not None:
            engine = hf_zero.engine_of(trainer.ref_model)
            assert (engine is not None and engine.is_sharded) == (stage == 3)
        trainer.train()
        result = outcome(trainer, folder + "/final")
        if reference == "mixed":
            engine = hf_zero.engine_of(trainer.ref_model)
            state = trainer.ref_model.state_dict() if engine is None else engine.full_state_dict(keep=True)
            first = build(seed=1).state_dict()
            assert all(name.endswith("norm.weight") or not torch.equal(state[name], first[name]) for name in first)
            result.weights |= {f"reference.{name}": value.clone() for name, value in state.items()}
        return result


def _join(row: dict[str, str]) -> dict[str, str]:
    return {key: row["prompt"] + row[key] for key in ("chosen", "rejected")}


def reward(stage: int | None, folder: str, path: str, **more: Any) -> Outcome:
    with zero(stage):
        config = build().config
        config.num_labels = 1
        torch.manual_seed(5)
        trainer = RewardTrainer(
            model=LlamaForSequenceClassification(config),
            args=RewardConfig(**settings(folder, max_length=32, **more)),
            train_dataset=preferences().map(_join, remove_columns=["prompt"]),
            processing_class=tokenizer(),
        )
        trainer.train()
        return outcome(trainer, folder + "/final")


# -------------------------------------------------------------------- trainers of one model and a dataset
def _texts() -> Dataset:
    return Dataset.from_dict({"text": text(40, 12, 4)})


def _answers() -> Dataset:
    return preferences().rename_column("chosen", "completion").remove_columns("rejected")


def _ratings() -> Dataset:
    rows = _answers()
    return rows.add_column("label", [index % 2 == 0 for index in range(len(rows))])


SIMPLE: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig, _texts),
    "sft of answers": (SFTTrainer, SFTConfig, _answers),
    "kto": (KTOTrainer, KTOConfig, _ratings),
    "orpo": (ORPOTrainer, ORPOConfig, preferences),
    "cpo": (CPOTrainer, CPOConfig, preferences),
}


def simple(stage: int | None, folder: str, path: str, kind: str, **more: Any) -> Outcome:
    trainer_class, config_class, data = SIMPLE[kind]
    with zero(stage):
        args = config_class(**settings(folder, max_length=24, **more))
        torch.manual_seed(3)
        reference = {"ref_model": build(seed=1)} if kind == "kto" else {}
        trainer = trainer_class(
            model=build(), args=args, train_dataset=data(), processing_class=tokenizer(), **reference
        )
        trainer.train()
        return outcome(trainer, folder + "/final")


# -------------------------------------------------------------------- generation and training in turn
class RowNoise(transformers.LogitsProcessor):
    """Sampling whose random numbers depend on the place in the group and the length, not on the process."""

    def __init__(self) -> None:
        self.table = torch.randn(2, 64, VOCAB, generator=torch.Generator().manual_seed(11))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(scores)) % 2
        chosen = (scores + self.table[rows, input_ids.shape[1]]).argmax(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(-1, chosen, 1e4)


class NoisyLlama(LlamaForCausalLM):
    """Generates the same whatever the random state, but another completion for each member of a group."""

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_logits_processor(*args, **kwargs)
        found.append(RowNoise())
        return found


def small_words(completions: list[str], **kwargs: Any) -> list[float]:
    """The reward: small token numbers."""
    return [-sum(int(word[1:]) for word in completion.split()) / VOCAB for completion in completions]


def grpo(stage: int | None, folder: str, path: str, beta: float, **more: Any) -> Outcome:
    """Train by GRPO: with `beta`, TRL loads a reference model for the divergence from it."""
    with zero(stage):
        own = {"num_generations": 2, "max_completion_length": 6, "beta": beta, **more}
        args = GRPOConfig(**settings(folder, **own))
        torch.manual_seed(3)
        trainer = GRPOTrainer(
            model=of_base(NoisyLlama, path),
            reward_funcs=small_words,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [" ".join(row.split()[:4]) for row in text(24, 6, 1)]}),
            processing_class=tokenizer(),
        )
        assert (trainer.ref_model is not None) == (beta > 0)
        trainer.train()
        result = outcome(trainer, folder + "/final")
        history = trainer.state.log_history
        # Rewards say that the completions are the same.
        result.evals = [entry[key] for entry in history for key in ("reward", "kl") if key in entry]
        return result
