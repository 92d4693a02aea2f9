"""SmolLM2-135M in a pipeline, from its files: losses beside DDP's, what each rank read, and its peak memory.

python -m recipes.causal_lm.prepare            # once: the packaged weights, as safetensors
ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 recipes/pipeline/smollm2.py
ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 3 recipes/pipeline/smollm2.py
ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 recipes/pipeline/smollm2.py --ddp
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_zero
from recipes.causal_lm.data import load_blocks
from recipes.causal_lm.model import resolve_model
from recipes.zero_inference.texts import peak_memory

Micro = tuple[torch.Tensor, torch.Tensor]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ddp", action="store_true", help="torch's DDP, with the same batches, instead of a pipeline")
    add("--schedule", default="1f1b", choices=("gpipe", "1f1b", "zero_bubble"))
    add("--steps", type=int, default=4)
    add("--micros", type=int, default=6, help="micro-batches of a batch: divided by the ranks with --ddp")
    add("--length", type=int, default=64, help="tokens")
    add("--lr", type=float, default=3e-5)
    add("--out", type=Path, help="file for the losses, as JSON")
    return parser.parse_args()


def micro_batches(args: argparse.Namespace, folder: str) -> list[list[Micro]]:
    """Return the micro-batches of every step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted = args.steps * args.micros
    blocks, _ = load_blocks(
        "stdlib", tokenizer, config=None, text_column="text", length=args.length, num_train=wanted, num_eval=0
    )
    rows = [(row["input_ids"][None], row["labels"][None]) for row in (blocks[number] for number in range(wanted))]
    return [rows[start : start + args.micros] for start in range(0, wanted, args.micros)]


def adam(args: argparse.Namespace, params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=args.lr)


def pipeline(args: argparse.Namespace, folder: str, data: list[list[Micro]]) -> tuple[Iterator[float], int]:
    """Losses, and the bytes of the files that this rank has read."""
    module = hf_zero.pipeline.from_transformers(folder, dist.get_world_size(), model_kwargs={"dtype": torch.float32})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.micros,
        "gradient_clipping": 1.0,
        "pipeline": {"schedule": args.schedule},
    }
    engine, *_ = hf_zero.initialize(model=module, optimizer=lambda params: adam(args, params), config=config)
    assert module.load_report is not None
    return (engine.train_batch(iter(batch)).item() for batch in data), module.load_report.bytes_read


def with_ddp(args: argparse.Namespace, folder: str, data: list[list[Micro]]) -> tuple[Iterator[float], int]:
    """Train without a pipeline: every rank has the whole model, and a share of the micro-batches."""
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train())
    optimizer = adam(args, model.parameters())

    def step(batch: list[Micro]) -> float:
        mine = batch[dist.get_rank() :: dist.get_world_size()]
        total = torch.zeros(())
        for number, (ids, labels) in enumerate(mine):
            with nullcontext() if number == len(mine) - 1 else model.no_sync():
                loss = model(input_ids=ids, labels=labels).loss / len(mine)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    files = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    return (step(batch) for batch in data), files


def main() -> None:
    args = parse()
    hf_zero.init_distributed()
    folder = resolve_model()
    data = micro_batches(args, folder)
    losses, nbytes = (with_ddp if args.ddp else pipeline)(args, folder, data)
    found, began = [], time.perf_counter()
    for loss in losses:
        found.append(loss)
        if dist.get_rank() == 0:
            print(f"step {len(found)}: loss {loss:.6f}", flush=True)
    seconds = (time.perf_counter() - began) / len(found)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (nbytes, peak_memory()))
    if dist.get_rank():
        return
    name = "DDP" if args.ddp else args.schedule
    for rank, (read, peak) in enumerate(everyone):
        print(f"{name}, rank {rank}: {read / 1e6:.0f} MB read of the files, peak memory {peak / 1e6:.0f} MB")
    print(f"{seconds:.2f} s a step")
    if args.out:
        args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
