"""The loop of a plain PyTorch script: forward, engine.backward, engine.step. The configuration is a file or a dict.

    cd recipes/engine_loop
    hf-zero launch --num_gpus 2 train.py --deepspeed_config=zero_dp_config.org.json
    torchrun --standalone --nproc_per_node 2 train.py --config zero_config.3

A small GPT-2 learns from scratch, byte by byte, the functions of Python's standard library. Every run writes a file
with a line of JSON for each micro-batch; one_process.py trains the same without ZeRO, and report.py draws them all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero
from hf_zero.optim import CPUAdam
from recipes.causal_lm.data import Blocks, load_blocks
from recipes.engine_loop.configs import CONFIGS
from recipes.pipeline.texts import END, VOCABULARY, Bytes
from recipes.zero_offload.configs import with_nvme_path

MOST_ROWS = 16  # of a micro-batch of all ranks together, in all of these configurations


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add what a run and its reference must have alike."""
    parser.add_argument("--steps", type=int, default=301, help="micro-batches [301]")
    parser.add_argument("--length", type=int, default=16, help="bytes of a text [16]")
    parser.add_argument("--width", type=int, default=192, help="hidden size of two layers [192]")
    parser.add_argument("--output", type=Path, default=Path("outputs/engine_loop"), help="[outputs/engine_loop]")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--deepspeed_config", help="a file with a configuration")
    add("--config", choices=CONFIGS, help="the dict of configs.py with this name, in the place of a file")
    add("--optimizer", default="Adam", help="CPUAdam, or a class of torch.optim [Adam]")
    add("--checkpoint_layers", action="store_true", help="recompute the activations of each layer in backward")
    add("--nvme_path", help="folder for what a configuration offloads to nvme, in the place of its own")
    add("--nan_from", type=int, help="from this micro-batch on, gradients hold NaN while losses are finite")
    add("--local_rank", type=int, default=0, help="set by launchers")
    add_sizes(parser)
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": args.width, "n_positions": args.length, "vocab_size": VOCABULARY}
    ends = {"bos_token_id": END, "eos_token_id": END}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # runs that are compared have no dropout
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, **without))


def texts_of(args: argparse.Namespace) -> Blocks:
    source: dict[str, Any] = {"config": None, "text_column": "text", "length": args.length}
    return load_blocks("stdlib", Bytes(), **source, num_train=args.steps * MOST_ROWS, num_eval=0)[0]


def main() -> None:
    args = parse()
    config: Any = CONFIGS.get(args.config)
    name = args.config or Path(args.deepspeed_config).name.removesuffix(".json")
    if args.nvme_path:
        config = with_nvme_path(hf_zero.ZeroConfig.load(args.deepspeed_config).raw, args.nvme_path)
        args.deepspeed_config = None

    model = model_of(args)
    if args.checkpoint_layers:
        model.activation_checkpointing_enable()
    optimizer_class = CPUAdam if args.optimizer == "CPUAdam" else getattr(torch.optim, args.optimizer)
    optimizer = optimizer_class(model.parameters(), lr=3e-5, weight_decay=3e-7)
    engine, optimizer, loader, _ = hf_zero.initialize(
        args=args, model=model, optimizer=optimizer, training_data=texts_of(args), config=config
    )

    args.output.mkdir(parents=True, exist_ok=True)
    suffix = "" if args.nan_from is None else "-nan"
    path = args.output / f"{name}{suffix}.jsonl" if dist.get_rank() == 0 else Path("/dev/null")
    with path.open("w", buffering=1) as file:  # a line at a time, as a run may end with an error
        for i, batch in zip(range(args.steps), loader, strict=False):
            began = time.perf_counter()
            loss = engine(**{key: value.to(engine.device) for key, value in batch.items()}).loss
            if args.nan_from is not None and i >= args.nan_from:
                loss.register_hook(lambda grad: grad * float("nan"))
            engine.backward(loss)
            engine.step()
            seconds = time.perf_counter() - began

            loss = loss.detach().double()
            dist.all_reduce(loss)  # the document prints the loss of rank 0
            loss = loss.item() / dist.get_world_size()
            scale = optimizer.cur_scale
            file.write(json.dumps({"loss": loss, "scale": scale, "seconds": round(seconds, 4)}) + "\n")
            if i % 10 == 0 and dist.get_rank() == 0:
                print(f"step:{i}, loss:{loss}, Loss Scale: {scale:g}", flush=True)
    engine.teardown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
