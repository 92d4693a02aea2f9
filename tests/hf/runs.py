"""Training runs of the Hugging Face entries, each as plain DDP and under hf_zero.

A function here runs on every rank with the environment that torchrun sets (tests.harness.ranks), and returns what can
be compared: the logged losses and gradient norms, evaluation losses, and the weights that the run saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero

VOCAB = 97
persistence = 40  # parameters of as many elements stay whole at stage 3; a rank of a job may set another number


@dataclasses.dataclass
class Outcome:
    """The outcome is what a run logged and left behind."""

    losses: list[float]
    norms: list[float]
    evals: list[float]
    weights: dict[str, torch.Tensor]
    files: list[str] = dataclasses.field(default_factory=list)


def zero_config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": persistence}
    return {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", **more}


def build(dropout: float = 0.0, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def examples(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Sequences with unequal numbers of labelled tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        ids = torch.randint(3, VOCAB, (14,), generator=generator).tolist()
        labels = [token if position >= index % 7 else -100 for position, token in enumerate(ids)]
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)})
    return rows


@contextlib.contextmanager
def entry(kind: str, stage: int) -> Iterator[tuple[type, type, dict[str, Any]]]:
    """(arguments class, Trainer class, arguments) of one way in: "ddp", "subclass" or "enable"."""
    if kind == "subclass":
        yield hf_zero.TrainingArguments, hf_zero.Trainer, {"zero": zero_config(stage)}
    elif kind == "enable":
        hf_zero.enable(zero_config(stage))
        try:
            yield transformers.TrainingArguments, transformers.Trainer, {}
        finally:
            hf_zero.disable()
    else:
        yield transformers.TrainingArguments, transformers.Trainer, {}


def arguments(folder: str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        # Adam makes full steps of gradients that are rounding noise; a larger epsilon keeps noise from mattering.
        "adam_epsilon": 1e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
        **more,
    }


def outcome(trainer: Any, folder: str) -> Outcome:
    """All ranks call: the weights are saved as a user would, and read from the file."""
    trainer.save_model(folder)
    trainer.accelerator.wait_for_everyone()
    history = trainer.state.log_history
    name = "model.safetensors" if Path(folder, "model.safetensors").exists() else "adapter_model.safetensors"
    return Outcome(
        [entry["loss"] for entry in history if "loss" in entry],
        [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        load_file(os.path.join(folder, name)),
        sorted(path.name for path in Path(folder).iterdir()),
    )


def digest(weights: dict[str, torch.Tensor]) -> str:
    text = hashlib.sha256()
    for name in sorted(weights):
        text.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()


# -------------------------------------------------------------------- Trainer
def train(kind: str, stage: int, folder: str, dropout: float = 0.0, resume: Any = None, **more: Any) -> Outcome:
    """Train with evaluation at the end."""
    with entry(kind, stage) as (arguments_class, trainer_class, extra):
        args = arguments_class(**arguments(folder, **more), **extra)
        trainer = trainer_class(
            model=build(dropout), args=args, train_dataset=examples(40, 1), eval_dataset=examples(9, 2)
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.evaluate()
        return outcome(trainer, folder + "/final")


def evaluate_then_train(kind: str, stage: int, folder: str) -> Outcome:
    """Evaluation and prediction, then two trainings in a row.

    The reference leaves the evaluation out: plain transformers trains unsynchronised after it.
    """
    with entry(kind, stage) as (arguments_class, trainer_class, extra):
        args = arguments_class(**arguments(folder), **extra)
        trainer = trainer_class(model=build(), args=args, train_dataset=examples(40, 1), eval_dataset=examples(9, 2))
        if kind != "ddp":
            trainer.evaluate()
            trainer.predict(examples(3, 4))
        trainer.train()
        first = [item["loss"] for item in trainer.state.log_history if "loss" in item]
        trainer.train()
        result = outcome(trainer, folder + "/final")
        result.evals = first
        return result


def resume_twice(stage: int, folder: str, checkpoint: str, **more: Any) -> list[list[float]]:
    """The losses of two resumes from `checkpoint` by one Trainer."""
    args = hf_zero.TrainingArguments(**arguments(folder, **more), zero=zero_config(stage))
    trainer = hf_zero.Trainer(model=build(0.1), args=args, train_dataset=examples(40, 1))
    losses = []
    for _ in range(2):
        trainer.train(resume_from_checkpoint=checkpoint)
        losses.append([item["loss"] for item in trainer.state.log_history if "loss" in item])
    return losses


def three_trainers(kind: str, stage: int, folder: str) -> list[list[float]]:
    """A Trainer, another one with a model of its own, and one more for the first one's model: the losses of each."""
    losses = []
    models = [build(seed=0), build(seed=1)]
    with entry(kind, stage) as (arguments_class, trainer_class, extra):
        for number, model in enumerate([*models, models[0]]):
            args = arguments_class(**arguments(f"{folder}/{number}", max_steps=3), **extra)
            trainer = trainer_class(model=model, args=args, train_dataset=examples(40, 1))
            trainer.train()
            losses.append([item["loss"] for item in trainer.state.log_history if "loss" in item])
    return losses


def best_model(kind: str, stage: int, folder: str, save_only_model: bool) -> Outcome:
    """Checkpoints at every step, two kept, the best (not the last: the rate is far too high) loaded at the end."""
    with entry(kind, stage) as (arguments_class, trainer_class, extra):
        more = {
            "save_strategy": "steps",
            "save_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_total_limit": 2,
            "load_best_model_at_end": True,
            "save_only_model": save_only_model,
            "learning_rate": 0.3,
        }
        args = arguments_class(**arguments(folder, **more), **extra)
        trainer = trainer_class(model=build(), args=args, train_dataset=examples(40, 1), eval_dataset=examples(9, 2))
        trainer.train()
        result = outcome(trainer, folder + "/final")
        result.files = sorted(path.name for path in Path(folder).iterdir())
        result.norms = [float(trainer.state.best_model_checkpoint.rpartition("-")[2])]
        return result


# -------------------------------------------------------------------- TRL
def sft(kind: str, stage: int, folder: str, lora: bool) -> Outcome:
    """The unmodified SFTTrainer, or ("mixin") a class of one's own with ZeroTrainerMixin in front of it."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    config_class, trainer_class, extra = SFTConfig, SFTTrainer, {}
    if kind == "enable":
        hf_zero.enable(zero_config(stage))
    elif kind == "mixin":
        config_class, extra = hf_zero.zero_arguments(SFTConfig), {"zero": zero_config(stage)}
        trainer_class = type("Mine", (hf_zero.ZeroTrainerMixin, SFTTrainer), {})
    try:
        args = config_class(
            **arguments(folder, gradient_checkpointing=lora, max_length=14, bf16=False),  # on by default in TRL
            dataset_kwargs={"skip_prepare_dataset": True},
            **extra,
        )
        rows = [{key: row[key] for key in ("input_ids", "labels")} for row in examples(40, 1)]
        torch.manual_seed(3)
        trainer = trainer_class(
            model=build(),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None,
        )
        trainer.train()
        return outcome(trainer, folder + "/final")
    finally:
        hf_zero.disable()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{index}": index for index in range(VOCAB)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")), pad_token="w0", bos_token="w1", eos_token="w2"
    )


# -------------------------------------------------------------------- loops
def accelerate_loop(kind: str, stage: int, folder: str) -> Outcome:
    """A plain accelerate script: optimizer before model, accumulate, clip, save and load."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    if kind != "ddp":
        hf_zero.ZeroPlugin(zero_config(stage)).attach(accelerator)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = [{key: torch.tensor(value) for key, value in row.items()} for row in examples(32, 1)]
    loader = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    optimizer, model, loader, scheduler = accelerator.prepare(optimizer, model, loader, scheduler)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    lr = optimizer.param_groups[0]["lr"]
    accelerator.save_state(folder + "/state")
    accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)
    accelerator.save_model(model, folder + "/model")
    accelerator.load_state(folder + "/state")
    again = accelerator.get_state_dict(model)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    result = Outcome(losses, norms, [lr], {name: tensor.clone() for name, tensor in weights.items()})
    result.files = sorted(os.listdir(folder + "/model"))
    return result


class ConvNet(nn.Module):
    """An image classifier as a plain module: no transformers, no `_no_split_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(12, 20, 3), nn.ReLU(inplace=True)
        )
        self.classify = nn.Sequential(nn.Linear(20 * 4 * 4, 77), nn.ReLU(), nn.Linear(77, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(images).flatten(1))


def convnet_loop(kind: str, stage: int, folder: str) -> Outcome:
    """`initialize` with training data, against DistributedDataParallel."""
    torch.manual_seed(0)
    model: Any = ConvNet()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 1, 14, 14, generator=generator), torch.arange(48) % 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses, norms = [], []
    if kind == "ddp":
        torch.distributed.init_process_group("gloo")
        sampler = torch.utils.data.DistributedSampler(data)
        loader = DataLoader(data, batch_size=3, sampler=sampler)
        engine = nn.parallel.DistributedDataParallel(model)
    else:
        config = {
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "train_micro_batch_size_per_gpu": 3,
            "gradient_clipping": 0.5,
        }
        engine, _, loader, _ = hf_zero.initialize(
            model=model, optimizer=optimizer, training_data=data, lr_scheduler=scheduler, config=config
        )
    for images, labels in loader:
        loss = nn.functional.cross_entropy(engine(images), labels)
        if kind == "ddp":
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        else:
            engine.backward(loss)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        losses.append(loss.item())
    lr = optimizer.param_groups[0]["lr"]
    weights = model.state_dict() if kind == "ddp" else engine.full_state_dict(keep=True)
    return Outcome(losses, norms, [lr], {name: tensor.clone() for name, tensor in weights.items()})
