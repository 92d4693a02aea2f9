"""GPT-2 in a pipeline: one schedule after the other, beside one process, on the same batches.

ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 recipes/pipeline/train.py
ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 4 recipes/pipeline/train.py --stages 2 --zero 1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config

import hf_zero
from recipes.pipeline.layers import layers_of, loss_of
from recipes.pipeline.picture import draw
from recipes.pipeline.texts import VOCABULARY, Micro, batches

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
ALONE = "one process"


@dataclass
class Run:
    """The results of one schedule."""

    losses: list[float]
    seconds: float  # of a step: the fastest
    report: dict[str, Any] | None = None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--schedules", nargs="*", choices=SCHEDULES, default=list(SCHEDULES))
    add("--stages", type=int, help="number of stages [one for each process]")
    add("--micros", type=int, default=8, help="micro-batches of a batch and pipeline")
    add("--samples", type=int, default=2, help="texts in a micro-batch")
    add("--steps", type=int, default=8)
    add("--zero", type=int, choices=(0, 1), default=0, help="ZeRO stage among the ranks of a pipeline stage")
    add("--partition", default="type:GPT2Block", help="how layers are split: uniform, parameters, type:REGEX, 4,3,3,4")
    add("--layers", type=int, default=12)
    add("--width", type=int, default=192)
    add("--longest", type=int, default=256, help="bytes of a text")
    add("--lr", type=float, default=1e-3)
    add("--pictures", type=Path, help="folder for a picture of each schedule")
    add("--format", choices=("svg", "png", "pdf"), default="svg")
    add("--save", type=Path, help="folder for a checkpoint of the last schedule")
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=max(1, args.width // 32),
        n_positions=args.longest,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


def adam(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=lr)


def train_pipeline(args: argparse.Namespace, schedule: str, data: list[list[Micro]]) -> Run:
    """One schedule, from the same weights. All ranks must call."""
    torch.manual_seed(0)
    stages = args.stages or dist.get_world_size()
    module = hf_zero.PipelineModule(
        layers_of(config_of(args)),
        num_stages=stages,
        loss_fn=loss_of,
        partition_method=[int(one) for one in args.partition.split(",")] if "," in args.partition else args.partition,
        virtual_stages=2 if schedule == "interleaved" else 1,
        seed_layers=True,  # so that dropout is the same, however the layers are split
    )
    engine, *_ = hf_zero.initialize(
        model=module,
        optimizer=adam(args.lr),
        config={
            "train_micro_batch_size_per_gpu": args.samples,
            "gradient_accumulation_steps": args.micros,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": args.zero},
            "pipeline": {"schedule": schedule},
        },
    )
    grid, losses, seconds = engine.grid, [], []
    for batch in data:
        mine = batch[grid.data_parallel_id * args.micros :][: args.micros]
        began = time.perf_counter()
        losses.append(engine.train_batch(iter(mine)).item())
        seconds.append(time.perf_counter() - began)
    report = engine.schedule_report()
    if args.save and schedule == args.schedules[-1]:
        engine.save_checkpoint(args.save)
    engine.teardown()
    return Run(losses, min(seconds), report)


def train_alone(args: argparse.Namespace, data: list[list[Micro]]) -> Run:
    """torch alone, with the same layers and seeds."""
    torch.manual_seed(0)
    module = hf_zero.PipelineModule(layers_of(config_of(args)), num_stages=1, stage=0, seed_layers=True)
    optimizer = adam(args.lr)(module.parameters())
    losses, seconds = [], []
    for step, batch in enumerate(data):
        began, total = time.perf_counter(), 0.0
        for number, (ids, labels) in enumerate(batch):
            # A pipeline counts its own micro-batches: those of several pipelines have the same numbers.
            module.micro_offset = step * args.micros + number % args.micros
            loss = loss_of(module(ids), labels) / len(batch)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        seconds.append(time.perf_counter() - began)
    return Run(losses, min(seconds))


def show(runs: dict[str, Run]) -> None:
    alone = runs[ALONE]
    print(f"\n{'schedule':<12} {'step':>8} {'losses':>19} {'idle':>6} {'formula':>8}  live micro-batches")
    for name, run in runs.items():
        line = f"{name:<12} {1e3 * run.seconds:>5.0f} ms {run.losses[0]:>8.4f} -> {run.losses[-1]:.4f}"
        if run.report is not None:
            live = ", ".join(str(stage["peak_live"]) for stage in run.report["stages"])
            line += f" {run.report['idle_share']:>5.0%} {run.report['bubble_share']:>8.0%}  {live}"
        print(line)
    worst = max(abs(mine - its) for run in runs.values() for mine, its in zip(run.losses, alone.losses, strict=True))
    print(f"\nThe losses of all schedules are those of one process: the largest difference is {worst:.1e}.")
    if worst > 1e-4:
        sys.exit("They should be equal to some 1e-5.")


def main() -> None:
    args = parse()
    hf_zero.init_distributed()
    pipelines = dist.get_world_size() // (args.stages or dist.get_world_size())
    data = batches(args.steps, args.micros * pipelines, args.samples, args.longest)
    runs = {schedule: train_pipeline(args, schedule, data) for schedule in args.schedules}
    if dist.get_rank():
        return
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
        for schedule, run in runs.items():
            path = args.pictures / f"{schedule}.{args.format}"
            draw(run.report or {}, schedule, path)
            print(f"{path} shows {schedule}")
    show({ALONE: train_alone(args, data), **runs})


if __name__ == "__main__":
    main()
