"""Trains what train.py trains, in one process with torch alone: in fp32, with torch's AMP, or in fp16 by hand.

    python recipes/engine_loop/one_process.py --precision amp

`hand` is the walk of recipes/mixed_precision in a loop: Adam updates fp32 masters, and an fp16 copy of them computes.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2LMHeadModel

from recipes.engine_loop.train import add_sizes, model_of, texts_of

Batch = dict[str, torch.Tensor]
Steps = Iterator[tuple[float, float]]  # the loss of a micro-batch, and the loss scale behind it
WARMUP, TOTAL = 30, 300


def rate(update: int) -> float:
    """The share of the highest learning rate that WarmupDecayLR gives an update; the first two, 0 and 1, have none."""
    iteration = max(update - 1, 0)
    if iteration < WARMUP:
        return math.log(iteration + 1) / math.log(WARMUP)
    return max(0.0, (TOTAL - iteration) / (TOTAL - WARMUP))


class Masters:
    """fp32 weights, their Adam and its schedule."""

    def __init__(self, model: GPT2LMHeadModel, lr: float) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=3e-7)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)


def in_fp32(masters: Masters, batches: Iterator[Batch], accumulation: int, clip: float) -> Steps:
    for number, batch in enumerate(batches, 1):
        loss = masters.model(**batch).loss
        (loss / accumulation).backward()
        yield loss.item(), 1.0
        if number % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(masters.model.parameters(), clip)
            masters.optimizer.step()
            masters.optimizer.zero_grad()
            masters.schedule.step()


def by_amp(masters: Masters, batches: Iterator[Batch]) -> Steps:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, growth_interval=1000)
    for batch in batches:
        masters.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = masters.model(**batch).loss
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(masters.optimizer)
        scaler.update()
        yield loss.item(), scaler.get_scale()
        if scaler.get_scale() >= before:  # else the step was left out
            masters.schedule.step()


def by_hand(masters: Masters, batches: Iterator[Batch]) -> Steps:
    half, scale, left = copy.deepcopy(masters.model).half(), 2.0**32, 2  # the hysteresis
    for batch in batches:
        half.zero_grad()
        with torch.no_grad():
            for copied, master in zip(half.parameters(), masters.model.parameters(), strict=True):
                copied.copy_(master)
        loss = half(**batch).loss
        (loss.float() * scale).backward()
        for copied, master in zip(half.parameters(), masters.model.parameters(), strict=True):
            master.grad = copied.grad.float() / scale
        if all(bool(master.grad.isfinite().all()) for master in masters.model.parameters()):
            masters.optimizer.step()
            masters.schedule.step()
        elif left > 1:
            left -= 1
        else:
            scale /= 2
        yield loss.item(), scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "amp", "hand"), default="amp")
    parser.add_argument("--rows", type=int, default=16, help="texts of a micro-batch: all that the ranks have [16]")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of an update, with fp32 [1]")
    parser.add_argument("--clip", type=float, default=math.inf, help="gradient_clipping, with fp32 [none]")
    parser.add_argument("--lr", type=float, default=3e-5, help="the highest learning rate [3e-5]")
    add_sizes(parser)
    args = parser.parse_args()
    texts, masters = texts_of(args), Masters(model_of(args), args.lr)
    batches = iter(DataLoader(texts, args.rows, sampler=DistributedSampler(texts, num_replicas=1, rank=0)))
    if args.precision == "fp32":
        steps = in_fp32(masters, batches, args.accumulation, args.clip)
    else:
        steps = {"amp": by_amp, "hand": by_hand}[args.precision](masters, batches)

    args.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with (args.output / f"{args.precision}.jsonl").open("w") as file:
        for i, (loss, scale) in enumerate(itertools.islice(steps, args.steps)):
            seconds, began = time.perf_counter() - began, time.perf_counter()
            file.write(json.dumps({"loss": loss, "scale": scale, "seconds": round(seconds, 4)}) + "\n")
            if i % 10 == 0:
                print(f"step:{i}, loss:{loss}, Loss Scale: {scale:g}", flush=True)


if __name__ == "__main__":
    main()
