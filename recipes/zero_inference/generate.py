"""Lets a language model in shards write text, every rank for prompts of its own: no Trainer, no optimizer.

    torchrun --nproc_per_node 2 recipes/zero_inference/generate.py --zero recipes/zero_inference/zero3.json --compare \
        --prompts "Name three fruits." "What is the capital of France?"

README.md in this folder lists more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import hf_zero
from recipes.causal_lm.model import PACKAGED, resolve_model
from recipes.zero_inference import plain
from recipes.zero_inference.texts import Batch, Options, Written, deal, peak_memory, prepare_tokenizer, write
from recipes.zero_offload.configs import choose_nvme_path, with_nvme_path

PROMPTS = [
    "Is this review positive or negative? Review: this is the best cast iron skillet you will ever buy",
    "Is this review positive or negative? Review: this is the worst restaurant ever",
    "Name three fruits.",
    "Write one sentence about the sea.",
]
SWAP = "outputs/zero_inference"


@dataclass(frozen=True)
class Outcome:
    """The work of one rank."""

    written: list[Written]
    load_s: float
    generate_s: float
    memory: dict[str, int]  # engine.memory_report()
    peak_memory: int  # of the process


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration with the command line's changes."""
    config = with_nvme_path(hf_zero.ZeroConfig.load(args.zero).raw, choose_nvme_path(args.nvme_path, SWAP))
    return config | ({} if args.gather is None else {"gather_for_generation": args.gather})


def load(source: str, dtype: str, config: dict[str, Any]) -> hf_zero.ZeroEngine:
    """The model under an engine for inference. All ranks must call."""
    # This comes before the model: from_pretrained then builds it in shards, and no rank ever holds all of it.
    hf_zero.HfZeroConfig(config)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    # Without an optimizer the engine keeps no gradients and no master weights.
    engine = hf_zero.initialize(model=model, config=config)[0]
    engine.module.eval()
    return engine


def write_all(
    engine: hf_zero.ZeroEngine, tokenizer: Any, by_rank: list[list[Batch]], options: Options
) -> list[Written]:
    """The texts for this rank's batches. All ranks must call."""
    mine = by_rank[engine.rank]
    written: list[Written] = []
    # Every rank calls generate equally often, as the layers are gathered from all of them: one that has fewer batches
    # runs another rank's once more, and leaves the text.
    for number in range(max(len(batches) for batches in by_rank)):
        batch = mine[number] if number < len(mine) else by_rank[0][0]
        texts = write(engine.module, tokenizer, batch, options, number=number * engine.world_size + engine.rank)
        if number < len(mine):
            written += texts
    return written


def run(
    args: argparse.Namespace, source: str, tokenizer: Any, options: Options
) -> tuple[str, list[list[Batch]], list[Outcome]]:
    """Load and generate; returns the kind of device, and batches and outcomes by rank. All ranks must call."""
    started = time.perf_counter()
    engine = load(source, args.dtype, read_config(args))
    loaded = time.perf_counter()
    by_rank = deal(args.prompts, engine.world_size, args.batch_size)
    written = write_all(engine, tokenizer, by_rank, options)
    outcome = Outcome(
        written,
        load_s=loaded - started,
        generate_s=time.perf_counter() - loaded,
        memory=engine.memory_report(),
        peak_memory=peak_memory(),
    )
    return engine.device.type, by_rank, engine.comm.all_gather_object(outcome, "outcomes")


def show(outcomes: list[Outcome]) -> None:
    """Print texts by rank, speed and memory."""
    for rank, outcome in enumerate(outcomes):
        for one in outcome.written:
            print(f"rank{rank}:\n   in={one.prompt}\n  out={one.text.strip()}")
    tokens = sum(one.tokens for outcome in outcomes for one in outcome.written)
    seconds = max(outcome.generate_s for outcome in outcomes)
    print(
        f"\n{tokens} tokens of {sum(len(outcome.written) for outcome in outcomes)} texts in {seconds:.1f} s: "
        f"{tokens / seconds:.1f} tokens/s; loaded in {max(outcome.load_s for outcome in outcomes):.1f} s"
    )
    heads = ("on the device", "host", "disk", "gathered peak", "process peak")
    print(f"\n{'parameters':<12}" + "".join(f"{head:>16}" for head in heads))
    for rank, outcome in enumerate(outcomes):
        sizes = [outcome.memory[name] for name in ("device", "host", "disk", "gathered_peak")]
        print(f"rank {rank:<7}" + "".join(f"{size / 1e6:>13.1f} MB" for size in [*sizes, outcome.peak_memory]))


def compare(outcomes: list[Outcome], expected: list[list[Written]], peak: int) -> bool:
    """Print whether the texts are those of the plain model."""
    pairs = [
        (one, other)
        for outcome, others in zip(outcomes, expected, strict=True)
        for one, other in zip(outcome.written, others, strict=True)
    ]
    differing = [(one, other) for one, other in pairs if one != other]
    print(f"{'plain':<12}{'':>64}{peak / 1e6:>13.1f} MB\n")
    for one, other in differing:
        print(f"DIFFERENT: in={one.prompt}\n  sharded={one.text!r}\n    plain={other.text!r}")
    if not differing:
        print(f"All {len(pairs)} texts are those of plain transformers in one process.")
    return not differing


def parse(command: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Let a language model in shards write text.")
    parser.add_argument("--model", default=PACKAGED, help=f"{PACKAGED} (in a package), a folder or a hub id")
    parser.add_argument("--layers", type=int, help="keep only the first LAYERS decoder layers")
    parser.add_argument("--zero", required=True, metavar="FILE", help="such as recipes/zero_inference/zero3.json")
    parser.add_argument(
        "--gather", choices=("auto", "once", "stream"), help='"gather_for_generation", over the file\'s'
    )
    parser.add_argument("--nvme_path", help=f"folder for parameters on disk; default: {SWAP}/swap")
    parser.add_argument("--dtype", default="auto", help="auto (as stored), float32 or bfloat16")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, metavar="TEXT", help="dealt to the ranks in turn")
    parser.add_argument("--no_chat", action="store_true", help="prompts as they are, not as a user's message")
    parser.add_argument("--batch_size", type=int, default=4, help="prompts of a rank in one call of generate")
    parser.add_argument("--max_new_tokens", type=int, default=40)
    parser.add_argument("--num_beams", type=int, default=1)
    parser.add_argument("--do_sample", action="store_true", help="draw tokens; without it the likeliest are taken")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top_p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="with the texts of plain transformers in one process")
    args = parser.parse_args(command)
    if args.batch_size < 1:
        parser.error("--batch_size takes a number from 1 up")
    return args


def make_options(args: argparse.Namespace, tokenizer: Any) -> Options:
    return Options(
        max_new_tokens=args.max_new_tokens,
        do_sample=args.do_sample,
        temperature=args.temperature,
        top_p=args.top_p,
        num_beams=args.num_beams,
        seed=args.seed,
        chat=bool(tokenizer.chat_template) and not args.no_chat,
    )


def main() -> int:
    args = parse()
    if int(os.environ.get("RANK", "0")) != 0 or not sys.stderr.isatty():
        disable_progress_bar()
    source = resolve_model(args.model, args.layers)
    tokenizer = prepare_tokenizer(AutoTokenizer.from_pretrained(source))
    options = make_options(args, tokenizer)
    device, by_rank, outcomes = run(args, source, tokenizer, options)
    same = True
    if int(os.environ.get("RANK", "0")) == 0:
        show(outcomes)
        if args.compare:
            expected, peak = plain.ask(source, dtype=args.dtype, device=device, options=options, batches=by_rank)
            same = compare(outcomes, expected, peak)
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
