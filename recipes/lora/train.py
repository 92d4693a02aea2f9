"""Trains LoRA adapters of a causal language model whose frozen weights are spread over the ranks.

    torchrun --nproc_per_node 2 recipes/lora/train.py --zero recipes/lora/zero3.json --output_dir outputs/lora \
        --max_steps 20 --learning_rate 1e-3 --use_cpu True

README.md in this folder lists more. Every argument of `transformers.TrainingArguments` works as usual.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accelerate.utils import gather_object
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, ProgressCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from hf_zero import Trainer, TrainingArguments, engine_of
from recipes.causal_lm.data import Blocks, load_blocks
from recipes.causal_lm.model import resolve_model
from recipes.causal_lm.reporting import LossBar, StepTimer, perplexity, write_summary
from recipes.causal_lm.train import DataArguments, ModelArguments

ADAPTER = "adapter"  # in the output folder
DATA = "data.json"  # in the output folder: what check.py needs to evaluate the same text


@dataclass
class LoraArguments:
    lora_r: int = field(default=8, metadata={"help": "rank of the adapters"})
    lora_alpha: int = field(default=16, metadata={"help": "their weight is lora_alpha / lora_r"})
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout in front of the adapters"})
    lora_targets: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "names of modules that get an adapter, or all-linear"},
    )

    resume: str | None = field(default=None, metadata={"help": "checkpoint folder to go on from"})

    def config(self) -> LoraConfig:
        targets = self.lora_targets[0] if self.lora_targets == ["all-linear"] else self.lora_targets
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=targets,
        )


def build(source: str, lora: LoraArguments, args: TrainingArguments) -> Any:
    """The model with its adapters. At stage 3 every rank reads its own part of the weights."""
    # `args` exist already: their configuration is what from_pretrained follows.
    model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16" if args.bf16 else "float32")
    set_seed(args.seed)  # the adapters' first values are drawn here
    return get_peft_model(model, lora.config())


def evaluate(trainer: Trainer, when: str) -> float | None:
    """All ranks must call."""
    if not len(trainer.eval_dataset):
        return None
    loss = float(trainer.evaluate()["eval_loss"])
    if trainer.is_world_process_zero():
        print(f"{when:<16} loss {loss:.4f}, perplexity {perplexity(loss):.4g}", flush=True)
    return loss


def memory_by_rank(trainer: Trainer) -> list[dict[str, int]]:
    """All ranks must call."""
    engine = engine_of(trainer.model)
    assert engine is not None  # it has trained
    everyone: list[dict[str, int]] = gather_object([engine.memory_report()])
    return everyone


def show(trainer: Trainer, source: str, memory: list[dict[str, int]]) -> None:
    """Print what was trained, what lies on disk, and what each rank held. Rank 0 calls it."""
    output = Path(trainer.args.output_dir)
    trained, total = trainer.model.get_nb_trainable_parameters()
    print(f"trained: {trained:,} of {total:,} parameters ({trained / total:.2%})")
    for name, folder in (("model", Path(source)), (ADAPTER, output / ADAPTER), *_checkpoints(output)):
        if folder.is_dir():
            print(f"{name:<16}{_folder_bytes(folder) / 1e6:>10.2f} MB on disk, weights{_weights_bytes(folder)}")
    heads = ("parameters", "gradients", "master", "optimizer", "device", "host", "gathered_peak", "gradients_peak")
    print("".join([f"{'MB':<8}", *(f"{head.replace('_', ' '):>15}" for head in heads)]))
    for rank, report in enumerate(memory):
        print("".join([f"rank {rank:<3}", *(f"{report[head] / 1e6:>15.2f}" for head in heads)]), flush=True)


def _checkpoints(output: Path) -> list[tuple[str, Path]]:
    found = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[-1]))
    return [(path.name, path) for path in found]


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _weights_bytes(folder: Path) -> str:
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return f"{weights / 1e6:>10.2f} MB"


def make_trainer(model: Any, args: TrainingArguments, tokenizer: Any, parts: tuple[Blocks, Blocks]) -> Trainer:
    trainer = Trainer(
        model=model, args=args, train_dataset=parts[0], eval_dataset=parts[1], processing_class=tokenizer
    )
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(LossBar())
    return trainer


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, LoraArguments, TrainingArguments))
    parser.set_defaults(gradient_checkpointing=True)
    model_args, data_args, lora_args, args = parser.parse_args_into_dataclasses()
    if args.zero is None:
        parser.error("--zero FILE is needed, such as recipes/lora/zero3.json")
    args.resume_from_checkpoint = lora_args.resume or args.resume_from_checkpoint
    if args.process_index != 0 or not sys.stderr.isatty():
        disable_progress_bar()

    source = resolve_model(model_args.model, model_args.layers)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = build(source, lora_args, args)
    data = {
        "config": data_args.dataset_config,
        "text_column": data_args.text_column,
        "length": data_args.block_length,
        "num_train": data_args.train_blocks,
        "num_eval": data_args.eval_blocks,
    }
    trainer = make_trainer(model, args, tokenizer, load_blocks(data_args.dataset, tokenizer, **data))
    timer = StepTimer()
    trainer.add_callback(timer)

    before = None if args.resume_from_checkpoint else evaluate(trainer, "before training:")
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = evaluate(trainer, "after training:")
    output = Path(args.output_dir)
    trainer.save_model(str(output / ADAPTER))
    memory = memory_by_rank(trainer)
    if trainer.is_world_process_zero():
        write_summary(trainer, source=source, dataset=data_args.dataset, before=before, after=after, timer=timer)
        found = {"base": source, "bf16": args.bf16, "dataset": data_args.dataset, **data, "memory": memory}
        (output / DATA).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        show(trainer, source, memory)


if __name__ == "__main__":
    main()
