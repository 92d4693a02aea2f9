"""Trains a language model in FP8, bf16 or fp32 on Python's documentation, and writes down what each step cost.

    torchrun --standalone --nproc_per_node 2 recipes/fp8/language.py --level bf16 --seed 1
    torchrun --standalone --nproc_per_node 2 recipes/fp8/language.py --level O2
    python recipes/fp8/language.py --level O2 --model smollm2-135m --steps 20 --rows 1 --length 64

Every run writes a file with a line of JSON for each step. report.py draws them all and compares them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_zero
from recipes.causal_lm.data import load_blocks
from recipes.causal_lm.model import resolve_model
from recipes.fp8.counting import at_rest, sent_since
from recipes.pipeline.texts import END, VOCABULARY, Bytes

SMALL = "small"  # a Llama of 3.2 M parameters on bytes, from scratch
LEVELS = ("fp32", "bf16", "O1", "O2", "O3", "Q8", "Q8_fp32")
STAGES = {"O3": 2, "Q8": 3, "Q8_fp32": 3}  # where --stage is not given; else 0
POOL = 1000  # texts at least to draw from, so that short runs with other seeds have other texts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--level",
        choices=LEVELS,
        default="O2",
        help="precision or MS-AMP's; Q8, Q8_fp32: bf16, fp32, 8-bit messages [O2]",
    )
    add("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage [2 at O3, 3 at Q8 and Q8_fp32, else 0]")
    add("--seed", type=int, default=0, help="chooses the first weights of the small model, and the order of texts [0]")
    add("--steps", type=int, default=300)
    add("--model", default=SMALL, help=f"{SMALL}, or one that is trained on: smollm2-135m, a folder or a hub id")
    add("--rows", type=int, default=2, help="texts of a step and process [2]")
    add("--length", type=int, default=128, help="tokens of a text [128]")
    add("--lr", type=float, help="learning rate [1e-3 for the small model, else 5e-6]")
    add("--compile", action="store_true", help="compile each layer: fewer and larger operations")
    add("--output", type=Path, default=Path("outputs/fp8"), help="folder of the file [outputs/fp8]")
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    lr = args.lr or (1e-3 if args.model == SMALL else 5e-6)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": lr, "warmup_num_steps": 20}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
    }
    if args.level in ("bf16", "Q8"):
        config["bf16"] = {"enabled": True}
    if args.level.startswith("Q8"):
        config["zero_optimization"] |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    if args.level.startswith("O"):
        config["fp16"] = {"enabled": True, "initial_scale_power": 12}
        config["msamp"] = {"enabled": True, "opt_level": args.level}
    return config


def model_of(args: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    """The model in fp32, and its tokenizer."""
    if args.model != SMALL:
        folder = resolve_model(args.model)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=END, **sizes)), Bytes()


def steps_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train, and tell of each step. All ranks must take all of them."""
    model, tokenizer = model_of(args)
    model.config.use_cache = False  # it is for generation, and each layer of a compiled model would be another program
    for layer in model.model.layers if args.compile else ():
        layer.compile()
    needed = args.steps * args.rows * dist.get_world_size()
    source: dict[str, Any] = {"config": None, "text_column": "text", "length": args.length}
    blocks, _ = load_blocks("stdlib", tokenizer, **source, num_train=max(needed, POOL), num_eval=0)
    engine, _, loader, _ = hf_zero.initialize(model=model, training_data=blocks, config=config_of(args))
    assert loader is not None and isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(args.seed)  # which is the seed of the order
    for step, batch in zip(range(1, args.steps + 1), loader, strict=False):
        began, sent = time.perf_counter(), sent_since(engine, {})
        loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        seconds = time.perf_counter() - began
        yield {
            "step": step,
            "loss": mean_over_ranks(loss),
            "seconds": round(seconds, 4),
            "skipped": engine.skipped_steps,
            "at_rest": at_rest(engine),
            "sent": sent_since(engine, sent),
        }
    engine.teardown()


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of all ranks' losses. All ranks must call."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    args = parse()
    if args.stage is None:
        args.stage = STAGES.get(args.level, 0)

    hf_zero.init_distributed()
    name = f"{args.model}-{args.level}-stage{args.stage}-seed{args.seed}"
    path = args.output / f"{Path(name).name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", buffering=1) if dist.get_rank() == 0 else contextlib.nullcontext() as file:
        for line in steps_of(args):
            if file is None:
                continue
            file.write(json.dumps({"world_size": dist.get_world_size(), **line}) + "\n")
            if line["step"] % 10 == 0:
                print(f"{name} step {line['step']:4} loss {line['loss']:.4f} {line['seconds']:.2f} s", flush=True)
    if dist.get_rank() == 0:
        print(f"{path} tells of {args.steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
