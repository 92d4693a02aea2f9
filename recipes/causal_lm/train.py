"""Fine-tunes a causal language model with Trainer under ZeRO: an ordinary Hugging Face script, plus `--zero`.

    torchrun --nproc_per_node 2 recipes/causal_lm/train.py \
        --zero recipes/causal_lm/zero3.json --output_dir outputs/causal_lm --max_steps 40 --use_cpu True

README.md in this folder lists more. Every argument of `transformers.TrainingArguments` works as usual.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, ProgressCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from hf_zero import Trainer, TrainingArguments
from recipes.causal_lm.data import load_blocks
from recipes.causal_lm.model import PACKAGED, resolve_model
from recipes.causal_lm.reporting import LossBar, StepTimer, perplexity, write_summary


@dataclass
class ModelArguments:
    model: str = field(default=PACKAGED, metadata={"help": f"{PACKAGED} (in a package), a folder or a hub id"})
    layers: int | None = field(default=None, metadata={"help": "keep only the first LAYERS decoder layers"})


@dataclass
class DataArguments:
    dataset: str = field(default="stdlib", metadata={"help": "stdlib, fortunes, a text file, or a hub dataset id"})
    dataset_config: str | None = field(default=None, metadata={"help": "configuration of a hub dataset"})
    text_column: str = field(default="text", metadata={"help": "column of a hub dataset that holds the text"})
    block_length: int = field(default=128, metadata={"help": "tokens per training example"})
    train_blocks: int = field(default=1024, metadata={"help": "most examples to train on"})
    eval_blocks: int = field(default=64, metadata={"help": "most examples to evaluate on; 0: no evaluation"})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    if args.process_index != 0 or not sys.stderr.isatty():
        disable_progress_bar()

    source = resolve_model(model_args.model, model_args.layers)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    train_blocks, eval_blocks = load_blocks(
        data_args.dataset,
        tokenizer,
        config=data_args.dataset_config,
        text_column=data_args.text_column,
        length=data_args.block_length,
        num_train=data_args.train_blocks,
        num_eval=data_args.eval_blocks,
    )

    timer = StepTimer()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_blocks,
        eval_dataset=eval_blocks,
        processing_class=tokenizer,
        callbacks=[timer],
    )
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(LossBar())

    before = after = None
    if len(eval_blocks) and not args.resume_from_checkpoint:
        before = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            print(f"before training: loss {before:.4f}, perplexity {perplexity(before):.4g}", flush=True)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if len(eval_blocks):
        after = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            print(f"after training:  loss {after:.4f}, perplexity {perplexity(after):.4g}", flush=True)

    if trainer.is_world_process_zero():
        write_summary(trainer, source=source, dataset=data_args.dataset, before=before, after=after, timer=timer)


if __name__ == "__main__":
    main()
