"""What watching costs: Python calls and time of a step with nothing on, and with monitors.

    python scripts/bench_monitors.py
    PYTHONPATH=OTHER_CHECKOUT python scripts/bench_monitors.py --only off    # calls of another version

Calls are those of Python functions in the main thread, counted in one step, so they do not depend on what else the
machine does. Times are CPU seconds of the process with its threads, of blocks of steps that take turns: the median of
their ratios. One rank, stage 2, small Llama; monitors write at every step. Exit status 1 if one costs 1 % or more.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero

LIMIT = 1.01  # of the time without
OFF = "off"


def make(folder: str, monitor: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    block = {} if monitor == OFF else {monitor: {"enabled": True, "output_path": folder, "job_name": "bench"}}
    keys = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, **block}
    optimizer = torch.optim.AdamW(model.parameters())
    return hf_zero.initialize(model=model, optimizer=optimizer, config=keys)[0]


def steps(engine: Any, count: int, ids: torch.Tensor) -> float:
    """CPU seconds of `count` steps."""
    start = time.process_time()
    for _ in range(count):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return time.process_time() - start


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


def monitors() -> list[str]:
    found = ["csv_monitor"]
    if importlib.util.find_spec("tensorboard"):
        found.append("tensorboard")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--only", choices=(OFF, "all"), default="all")
    args = parser.parse_args()
    ids = torch.arange(512).view(2, 256) % 1000
    costs: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: make(folder, name) for name in [OFF, *(monitors() if args.only == "all" else [])]}
        for name, engine in engines.items():
            steps(engine, 3, ids)
            print(f"{name}: {calls(engine, ids)} Python calls in a step")
        rounds = [
            {name: steps(engine, args.steps, ids) for name, engine in engines.items()} for _ in range(args.rounds)
        ]
        print(f"{OFF}: {1000 * statistics.median(one[OFF] for one in rounds) / args.steps:.1f} ms of CPU time a step")
        for name in [name for name in engines if name != OFF]:
            costs[name] = statistics.median(one[name] / one[OFF] for one in rounds)
            print(f"{name}: {costs[name]:.4f} of that")
        for engine in engines.values():
            engine.teardown()
    sys.exit(any(cost >= LIMIT for cost in costs.values()))


if __name__ == "__main__":
    main()
