"""GRPO with TRL at stage 3: a policy in shards, completions from it or from a copy of it, and what each part takes.

    torchrun --standalone --nproc_per_node 2 recipes/grpo/train.py --zero recipes/grpo/zero3.json
    torchrun --standalone --nproc_per_node 2 recipes/grpo/train.py --zero recipes/grpo/zero3.json --generate copy
    torchrun --standalone --nproc_per_node 2 recipes/grpo/train.py                      # TRL alone, under DDP

The reward is the share of a completion's characters that are small letters. A run writes a file with a line of JSON
for each step. report.py draws them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import hf_zero
from recipes.causal_lm.model import resolve_model

SMALL = "small"  # a Llama of 0.4 M parameters on bytes, from scratch
MOVED = ("optim_states", "hp_params", "lp_grads")  # what a generation does not need


class ZeroGRPOTrainer(hf_zero.ZeroTrainerMixin, GRPOTrainer):
    pass


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--zero", help="DeepSpeed's JSON; without it TRL trains alone, under DDP")
    add("--generate", choices=("policy", "copy"), default="policy", help="the model that completes prompts [policy]")
    add("--steps", type=int, default=60)
    add("--model", default=SMALL, help=f"{SMALL}, or one that is trained on: smollm2-135m, a folder or a hub id")
    add("--tokens", type=int, default=24, help="most tokens of a completion [24]")
    add("--lr", type=float, help="learning rate [2e-3 for the small model, else 1e-5]")
    add("--output", type=Path, default=Path("outputs/grpo"), help="folder of the file [outputs/grpo]")
    return parser.parse_args()


def small_letters(completions: list[str], **_: Any) -> list[float]:
    """The reward."""
    return [sum("a" <= one <= "z" for one in text) / max(len(text), 1) for text in completions]


def model_of(args: argparse.Namespace) -> tuple[Any, Any]:
    """The policy in fp32, and its tokenizer."""
    if args.model != SMALL:
        folder = resolve_model(args.model)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    tokens = ByteLevelBPETokenizer()  # of bytes: nothing is merged
    tokens.add_special_tokens(["<end>"])
    tokens.train_from_iterator([], vocab_size=257, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens._tokenizer, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    end = tokenizer.eos_token_id
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=end, **sizes)
    ), tokenizer


class Rollouts:
    """Completes prompts for TRL, and measures what takes how many seconds, and the engine's bytes."""

    def __init__(self, args: argparse.Namespace, model: Any, tokenizer: Any) -> None:
        self.copied = copy.deepcopy(model).eval() if args.generate == "copy" else None
        self.tokenizer = tokenizer
        self.settings = {"max_new_tokens": args.tokens, "do_sample": True, "pad_token_id": tokenizer.pad_token_id}
        self.seconds: list[dict[str, float]] = []  # of each call: a step of the trainer
        self.bytes: list[dict[str, int]] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[-1][name] = time.perf_counter() - began

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        self.seconds.append({})
        engine, model = hf_zero.engine_of(trainer.model), trainer.accelerator.unwrap_model(trainer.model)
        if engine is not None:
            with self.part("states to the host"):
                engine.offload_states(MOVED)
            self.bytes.append(engine.memory_report())
        if self.copied is not None:
            with self.part("weights to the copy"):
                hf_zero.copy_weights(model, self.copied.to(model.device))
            model = self.copied
        # The same draws in all runs, and others on each rank.
        torch.manual_seed(1000 * len(self.seconds) + trainer.accelerator.process_index)
        with self.part("generate"):
            completions = self.complete(prompts, model)
        if engine is not None:
            with self.part("states from the host"):
                engine.reload_states()
        return {"prompt_ids": self.tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

    def complete(self, prompts: list[str], model: Any) -> list[list[int]]:
        """Token ids, up to the first end."""
        rows = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        with torch.no_grad():
            made = model.generate(**rows, **self.settings)
        end = self.tokenizer.eos_token_id
        texts = made[:, rows["input_ids"].shape[1] :].tolist()
        return [text[: text.index(end) + 1] if end in text else text for text in texts]


def lines_of(trainer: GRPOTrainer, rollouts: Rollouts) -> Iterator[dict[str, Any]]:
    """Yield the rewards of each step, and what it took on this rank."""
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    for entry, seconds in zip(steps, rollouts.seconds, strict=True):
        rest = {"score and train": entry["step_time"] - sum(seconds.values())}
        line = {name: entry[name] for name in ("step", "reward", "loss")}
        yield {**line, "seconds": seconds | rest, "bytes": rollouts.bytes[-1] if rollouts.bytes else None}


def main() -> None:
    args = parse()
    model, tokenizer = model_of(args)
    rollouts = Rollouts(args, model, tokenizer)
    name = f"{args.model}-{Path(args.zero).stem if args.zero else 'ddp'}-{args.generate}"
    kind = hf_zero.zero_arguments(GRPOConfig) if args.zero else GRPOConfig
    arguments = kind(
        **({"zero": args.zero} if args.zero else {}),
        output_dir=str(args.output / name),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=args.tokens,
        learning_rate=args.lr or (2e-3 if args.model == SMALL else 1e-5),
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=not torch.accelerator.is_available(),
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = (ZeroGRPOTrainer if args.zero else GRPOTrainer)(
        model=model,
        args=arguments,
        reward_funcs=small_letters,
        train_dataset=Dataset.from_dict({"prompt": [f"{word} " for word in sorted(sys.stdlib_module_names)]}),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        path = args.output / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines_of(trainer, rollouts)))
        print(f"{path} tells of {len(rollouts.seconds)} steps")


if __name__ == "__main__":
    main()
