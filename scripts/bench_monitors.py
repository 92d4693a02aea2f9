"""What watching costs: Python calls and time of a step with nothing on, and with monitors.

    python scripts/bench_monitors.py
    PYTHONPATH=OTHER_CHECKOUT python scripts/bench_monitors.py --only off    # calls of another version

Calls are those of Python functions in the main thread, counted in one step, so they do not depend on what else the
machine does. Times are of blocks of steps that take turns, the median of their ratios. One rank, stage 2, small Llama;
monitors write at every step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero


def make(folder: str, monitors: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    block = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "bench"}} if monitors else {}
    keys = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, **block}
    optimizer = torch.optim.AdamW(model.parameters())
    return hf_zero.initialize(model=model, optimizer=optimizer, config=keys)[0]


def steps(engine: Any, count: int, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(count):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return time.perf_counter() - start


def calls(engine: Any, ids: torch.Tensor) -> int:
    """Of Python functions in one step."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        steps(engine, 1, ids)
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--only", choices=("off", "both"), default="both")
    args = parser.parse_args()
    ids = torch.arange(512).view(2, 256) % 1000
    with tempfile.TemporaryDirectory() as folder:
        engines = {"off": make(folder, False)}
        if args.only == "both":
            engines["csv_monitor"] = make(folder, True)
        for name, engine in engines.items():
            steps(engine, 3, ids)
            print(f"{name}: {calls(engine, ids)} Python calls in a step")
        if len(engines) == 2:
            ratios = []
            for _ in range(args.rounds):
                taken = {name: steps(engine, args.steps, ids) for name, engine in engines.items()}
                ratios.append(taken["csv_monitor"] / taken["off"])
            ms = 1000 * taken["off"] / args.steps
            print(f"time with csv_monitor: {statistics.median(ratios):.4f} of that without ({ms:.1f} ms a step)")
        for engine in engines.values():
            engine.teardown()


if __name__ == "__main__":
    main()
