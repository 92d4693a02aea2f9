"""Fine-tunes a causal language model with optimizer states, or parameters too, on the CPU or on disk.

    torchrun --nproc_per_node 2 recipes/zero_offload/train.py --compare \
        --zero recipes/zero_offload/zero2_offload.json --output_dir outputs/zero_offload --max_steps 10 --use_cpu True

README.md in this folder lists more. Every argument of `transformers.TrainingArguments` works as usual.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, ProgressCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from hf_zero import Trainer, TrainingArguments, ZeroConfig
from hf_zero.engine.engine import engine_of
from hf_zero.optim import CPUAdam
from recipes.causal_lm.data import Blocks, load_blocks
from recipes.causal_lm.model import resolve_model
from recipes.causal_lm.reporting import LossBar, StepTimer, perplexity, write_summary
from recipes.causal_lm.train import DataArguments, ModelArguments
from recipes.zero_offload import comparison
from recipes.zero_offload.configs import choose_nvme_path, is_delayed, offloads, with_nvme_path, without_offload
from recipes.zero_offload.media import Media, measure

PLAIN = "without"  # the run without offload

_T = TypeVar("_T")


@dataclass
class OffloadArguments:
    nvme_path: str | None = field(
        default=None,
        metadata={"help": "folder for swap files where a device is nvme; default: $HF_ZERO_NVME_PATH, else OUT/swap"},
    )
    optimizer: Literal["adamw", "cpu-adam"] = field(
        default="adamw", metadata={"help": "Trainer's AdamW, or hf_zero.optim.CPUAdam handed to Trainer"}
    )
    compare: bool = field(
        default=False, metadata={"help": "train without offload first, and print losses and memory side by side"}
    )
    also: list[str] = field(
        default_factory=list, metadata={"help": "with --compare: further configurations, each a run and a column"}
    )


@dataclass(frozen=True)
class Job:
    """The settings that all runs of one command share."""

    namespace: argparse.Namespace
    options: OffloadArguments
    dataset: str
    source: str
    tokenizer: Any
    train_blocks: Blocks
    eval_blocks: Blocks

    def arguments(self, config: dict[str, Any], **changes: Any) -> TrainingArguments:
        """TrainingArguments for `config`, which becomes the active configuration."""
        path = choose_nvme_path(self.options.nvme_path, self.namespace.output_dir)
        return _build(TrainingArguments, self.namespace, zero=with_nvme_path(config, path), **changes)


def make_trainer(job: Job, args: TrainingArguments, timer: StepTimer, *, optimizer: str) -> Trainer:
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(job.source, dtype="float32")
    native = None
    if optimizer == "cpu-adam":
        # Trainer makes the parameter groups. In a loop of one's own: CPUAdam(model.parameters(), lr=..., ...).
        betas = (args.adam_beta1, args.adam_beta2)
        native = (CPUAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon})
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=job.train_blocks,
        eval_dataset=job.eval_blocks,
        processing_class=job.tokenizer,
        callbacks=[timer],
        optimizer_cls_and_kwargs=native,
    )
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(LossBar())
    return trainer


def media_of(trainer: Trainer) -> list[Media]:
    """Return the media of every rank. All ranks must call."""
    engine = engine_of(trainer.model)
    assert engine is not None  # it has trained
    everyone: list[Media] = gather_object([measure(engine)])
    return everyone


def end(trainer: Trainer) -> None:
    """Give back what offload holds: swap files, host memory, the update's thread. All ranks must call."""
    engine = engine_of(trainer.model)
    if engine is not None:
        engine.teardown()


def train_one(job: Job, config: dict[str, Any]) -> None:
    """An ordinary training run, with evaluation before and after, checkpoints and summary.json."""
    args = job.arguments(config)
    timer = StepTimer()
    trainer = make_trainer(job, args, timer, optimizer=job.options.optimizer)

    before = after = None
    if len(job.eval_blocks) and not args.resume_from_checkpoint:
        before = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            print(f"before training: loss {before:.4f}, perplexity {perplexity(before):.4g}", flush=True)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if len(job.eval_blocks):
        after = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            print(f"after training:  loss {after:.4f}, perplexity {perplexity(after):.4g}", flush=True)

    media = media_of(trainer)
    if trainer.is_world_process_zero():
        write_summary(trainer, source=job.source, dataset=job.dataset, before=before, after=after, timer=timer)
        for rank, one in enumerate(media):
            print(f"rank {rank}: device, host, disk{one.line()}; left the device: {one.left_device()}")
    end(trainer)


def compare(job: Job, files: list[str], configs: list[dict[str, Any]]) -> None:
    """One run without offload, then one with each configuration, from the same weights and the same data."""
    names = [PLAIN, *(Path(file).stem for file in files)]
    results = []
    steps: list[int] = []
    output = Path(job.namespace.output_dir)
    for name, config in zip(names, [without_offload(configs[0]), *configs], strict=True):
        args = job.arguments(config, output_dir=str(output / name), save_strategy="no", logging_steps=1)
        if args.process_index == 0:
            print(f"-- {name}", file=sys.stderr, flush=True)
        timer = StepTimer()
        # CPUAdam updates what is in CPU memory: without offload it has nothing to update on another device.
        usable = name != PLAIN or args.device.type == "cpu"
        trainer = make_trainer(job, args, timer, optimizer=job.options.optimizer if usable else "adamw")
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        steps = [entry["step"] for entry in log]
        losses = [entry["loss"] for entry in log]
        results.append(comparison.Result(name, is_delayed(config), losses, media_of(trainer), timer.median_s))
        end(trainer)
    if trainer.is_world_process_zero():
        comparison.show(steps, results)
        comparison.write(output, steps, results)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, OffloadArguments, TrainingArguments))
    parser.set_defaults(bf16=True)
    namespace = parser.parse_args()
    options = _build(OffloadArguments, namespace)
    if namespace.zero is None:
        parser.error("--zero FILE is needed, such as recipes/zero_offload/zero2_offload.json")
    if options.also and not options.compare:
        parser.error("--also goes with --compare")
    files = [namespace.zero, *options.also]
    configs = [ZeroConfig.load(file).raw for file in files]
    for file, config in zip(files, configs, strict=True):
        if options.compare and not offloads(config):
            parser.error(f"{file} offloads nothing: --compare is about offload_optimizer and offload_param")
    if int(os.environ.get("RANK", "0")) != 0 or not sys.stderr.isatty():
        disable_progress_bar()

    model_args, data_args = _build(ModelArguments, namespace), _build(DataArguments, namespace)
    source = resolve_model(model_args.model, model_args.layers)
    tokenizer = AutoTokenizer.from_pretrained(source)
    blocks = load_blocks(
        data_args.dataset,
        tokenizer,
        config=data_args.dataset_config,
        text_column=data_args.text_column,
        length=data_args.block_length,
        num_train=data_args.train_blocks,
        num_eval=0 if options.compare else data_args.eval_blocks,
    )
    job = Job(namespace, options, data_args.dataset, source, tokenizer, *blocks)
    if options.compare:
        for config in configs:
            job.arguments(config)  # contradictions to the arguments show before anything is trained
        compare(job, files, configs)
    else:
        train_one(job, configs[0])


def _build(kind: type[_T], namespace: argparse.Namespace, **changes: Any) -> _T:
    """The dataclass `kind` from what was parsed; arguments that a run changes are given again."""
    names = {one.name for one in dataclasses.fields(kind) if one.init}  # type: ignore[arg-type]
    return kind(**{**{name: value for name, value in vars(namespace).items() if name in names}, **changes})


if __name__ == "__main__":
    main()
