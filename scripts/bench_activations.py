"""Activation checkpointing beside torch's own and DeepSpeed's: time and memory of a step, in one run.

    python scripts/bench_activations.py                                     # 2 ranks, some 2 minutes
    python scripts/bench_activations.py --peers-python ~/peers/bin/python   # one that has DeepSpeed

Two ranks, which share the inputs of their regions as ranks of tensor parallelism do, run a stack of blocks forward and
backward. "held" is the anonymous memory between a forward and its backward, over that before the variant's first step
(so what a variant keeps between steps counts), also as a share of the run without checkpoints; "peak" the highest of a
step. Times are of a step over that of torch's reentrant checkpointing in the same process, median of the rounds (each
in another order of the variants), so two versions of torch can be compared; "cpu" the least CPU seconds of all rounds,
on which other work has little influence.

Checked: gradients of every variant are those of the run without checkpoints, to the bit. Exit status 1 if not, or if a
way of ours takes more than 1.1 x the CPU time of torch's or DeepSpeed's same way.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

PLAIN, BASE = "no checkpoints", "torch, reentrant"
# Ways of ours, and those that keep the same memory.
SAME_WAY = {
    "ours": ("deepspeed", BASE),
    "ours, not reentrant": ("torch, not reentrant",),
    "ours, partitioned": ("deepspeed, partitioned",),
    "ours, arena": ("deepspeed, arena",),
}
LIMIT = 1.1
SAMPLE_S = 0.002

Checkpoint = Callable[..., torch.Tensor]
Rows = dict[str, dict[str, list[float]]]  # variant -> figure -> rounds


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + inner


class Parallel:
    """The functions that DeepSpeed asks of an `mpu`: both ranks have the same inputs."""

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


# ---------------------------------------------------------------- the variants: contexts that give a `checkpoint`
@contextmanager
def plain() -> Iterator[Checkpoint]:
    yield lambda function, *args: function(*args)


@contextmanager
def of_torch(*, reentrant: bool) -> Iterator[Checkpoint]:
    yield lambda function, *args: torch_checkpoint(function, *args, use_reentrant=reentrant)


@contextmanager
def ours(*, reentrant: bool = True, **keys: Any) -> Iterator[Checkpoint]:
    from hf_zero import checkpointing
    from hf_zero.extras.deepspeed import checkpointing as configured

    checkpointing.configure(dist.group.WORLD if "partition_activations" in keys else None, **keys)
    yield checkpointing.checkpoint if reentrant else checkpointing.non_reentrant_checkpoint
    if configured._end is not None:
        configured._end()


@contextmanager
def deepspeed(**keys: Any) -> Iterator[Checkpoint]:
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    defaults = {"partition_activations": False, "contiguous_checkpointing": False, "checkpoint_in_cpu": False}
    deepspeed.checkpointing.configure(Parallel(), **{**defaults, **keys})
    yield deepspeed.checkpointing.checkpoint
    deepspeed.checkpointing.reset()


def variants(layers: int, *, peers: bool) -> dict[str, Callable[[], Any]]:
    whole: dict[str, Any] = {"partition_activations": True}
    arena = {**whole, "contiguous_checkpointing": True, "num_checkpoints": layers}
    common: dict[str, Callable[[], Any]] = {PLAIN: plain, BASE: lambda: of_torch(reentrant=True)}
    if peers:
        return common | {
            "deepspeed": deepspeed,
            "deepspeed, partitioned": lambda: deepspeed(**whole),
            "deepspeed, arena": lambda: deepspeed(**arena),
        }
    return common | {
        "torch, not reentrant": lambda: of_torch(reentrant=False),
        "ours": ours,
        "ours, not reentrant": lambda: ours(reentrant=False),
        "ours, partitioned": lambda: ours(**whole),
        "ours, arena": lambda: ours(**arena),
    }


# ---------------------------------------------------------------- a rank
@contextmanager
def peak_of(found: dict[str, float], before: int) -> Iterator[None]:
    """Highest anonymous memory inside, in bytes over `before`."""
    ended = threading.Event()
    found["peak"] = 0.0

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            found["peak"] = max(found["peak"], float(benchlib.resident() - before))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


class Bench:
    """One stack of blocks and one batch, the same on all ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self._blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self._batch = torch.randn(args.tokens, args.width)

    def step(self, checkpoint: Checkpoint, found: dict[str, float] | None = None) -> list[torch.Tensor]:
        """Gradients; in `found` the memory between forward and backward."""
        x = self._batch.clone().requires_grad_().clone()  # of a leaf, DeepSpeed empties the tensor itself
        for block in self._blocks:
            x = checkpoint(block, x)
        if found is not None:
            found["held"] = float(benchlib.resident())
        x.square().mean().backward()
        return [param.grad for param in self._blocks.parameters() if param.grad is not None]

    def forget(self) -> None:
        for param in self._blocks.parameters():
            param.grad = None
        gc.collect()

    def measure(self, make: Callable[[], Any], want: list[torch.Tensor]) -> dict[str, float]:
        """Measure the second step inside a variant: the first one allocates."""
        found: dict[str, float] = {}
        before = benchlib.resident()
        with make() as checkpoint:
            got = self.step(checkpoint)
            right = all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
            self.forget()
            with peak_of(found, before):
                self.step(checkpoint, found)
            found["held"] -= before
            self.forget()
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            self.step(checkpoint)
            dist.barrier()
            found["seconds"], found["cpu"] = time.perf_counter() - start, time.process_time() - cpu_start
        self.forget()
        return found | {"right": float(right)}


def rank_main(args: argparse.Namespace) -> None:
    if args.rank_of == "peers":
        import deepspeed  # type: ignore[import-not-found, unused-ignore]

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    bench, rows = Bench(args), Rows()
    want = [one.clone() for one in bench.step(lambda function, *given: function(*given))]
    bench.forget()
    for turn in range(args.rounds + 1):  # the first one warms up
        order = list(variants(args.layers, peers=args.rank_of == "peers").items())
        random.Random(turn).shuffle(order)  # a variant's time depends on the one before it, by a percent
        for name, make in order:
            for figure, value in bench.measure(make, want).items():
                if turn:
                    rows.setdefault(name, {}).setdefault(figure, []).append(value)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------- all of it
def job(python: str, who: str) -> Rows:
    """Every variant of one environment, in two ranks."""
    out = Path(f"/tmp/bench_activations_{os.getpid()}_{who}.json")
    # All that is large is mapped by itself, so that the process shrinks when it is freed.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    arguments = [__file__, *sys.argv[1:], "--rank-of", who, "--out", str(out)]
    benchlib.run_job(python, 2, arguments, timeout_s=1200, env=env)
    try:
        rows: Rows = json.loads(out.read_text())
        return rows
    finally:
        out.unlink(missing_ok=True)


def summary(rows: Rows) -> dict[str, Mapping[str, float]]:
    """Medians over the rounds; times over those of BASE in the same round."""
    without = statistics.median(rows[PLAIN]["held"])

    def ratio(figures: dict[str, list[float]], figure: str) -> float:
        return statistics.median(a / b for a, b in zip(figures[figure], rows[BASE][figure], strict=True))

    found: dict[str, Mapping[str, float]] = {}
    for name in variants(1, peers="deepspeed" in rows):  # rows are in the order of the first round
        figures = rows[name]
        held, peak = statistics.median(figures["held"]), statistics.median(figures["peak"])
        found[name] = {
            "time": ratio(figures, "seconds"),
            "cpu": min(figures["cpu"]) / min(rows[BASE]["cpu"]),
            "held": held / 1e6,
            "share": held / without,
            "peak": peak / 1e6,
            "right": min(figures["right"]),
        }
    return found


def main() -> int:
    args = parse()
    if args.rank_of:
        rank_main(args)
        return 0
    tables = [("", summary(job(sys.executable, "ours")))]
    if benchlib.has_deepspeed(args.peers_python):
        tables.append(("beside DeepSpeed", summary(job(args.peers_python, "peers"))))
    print(f"{args.layers} blocks, width {args.width}, {args.tokens} tokens, fp32, 2 ranks, {args.rounds} rounds\n")
    print(f"{'':28} {'time':>6} {'cpu':>6} {'held MB':>9} {'of plain':>9} {'peak MB':>9}")
    found: dict[str, Mapping[str, float]] = {}
    problems = []
    for where, table in tables:
        for name, one in table.items():
            shown = f"{name} {f'({where})' if where and name in (PLAIN, BASE) else ''}"
            columns = f"{one['time']:6.2f} {one['cpu']:6.2f} {one['held']:9.1f} {one['share']:9.2f} {one['peak']:9.1f}"
            print(f"{shown:28} {columns}")
            problems += [] if one["right"] else [f"{name}: other gradients than without checkpoints"]
            found.setdefault(name, one)
    for mine, others in SAME_WAY.items():
        for other in others:
            if other in found and found[mine]["cpu"] > LIMIT * found[other]["cpu"]:
                problems.append(f"{mine}: more than {LIMIT} x the CPU time of {other}")
    print("\n".join(["", *problems]) if problems else "\nall gradients are right, and no way of ours is slower")
    return 1 if problems else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=8)
    add("--width", type=int, default=256)
    add("--tokens", type=int, default=1024, help="of the batch of a rank")
    add("--rounds", type=int, default=3)
    add("--peers-python", default=sys.executable, help="of the environment that has DeepSpeed")
    add("--rank-of", default="", help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
