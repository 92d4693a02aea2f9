"""Ways to gather and to scatter one flat parameter over gloo, in turn: what hf_zero/distributed/comm.py chooses from.

    python scripts/bench_comm.py                     # 12.6 M fp32 elements on 2 ranks
    python scripts/bench_comm.py --ranks 4 --numel 50000000 --rounds 9

Milliseconds from a barrier to a barrier, medians over rounds, by elements per call. The numbers say which primitive
and which bucket; they are not comparable between machines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import benchlib
import torch
import torch.distributed as dist

Slice = Callable[[torch.Tensor, torch.Tensor], list[Any]]


def parts(bucket: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return bucket.chunk(dist.get_world_size())


def peers() -> Iterator[tuple[int, int]]:
    """(rank to send to, rank to receive from) of every step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(1, world):
        yield (rank + step) % world, (rank - step) % world


def gather_by_collective(full: torch.Tensor, scratch: torch.Tensor) -> list[Any]:
    return [dist.all_gather_single(full, parts(full)[dist.get_rank()], async_op=True)]


def gather_by_messages(full: torch.Tensor, scratch: torch.Tensor) -> list[Any]:
    mine = parts(full)[dist.get_rank()]
    return [work for to, origin in peers() for work in (dist.isend(mine, to), dist.irecv(parts(full)[origin], origin))]


def scatter_by_collective(full: torch.Tensor, scratch: torch.Tensor) -> list[Any]:
    return [dist.reduce_scatter_single(parts(scratch)[0], full, async_op=True)]


def scatter_by_all_to_all(full: torch.Tensor, scratch: torch.Tensor) -> list[Any]:
    return [dist.all_to_all_single(scratch, full, async_op=True)]


def scatter_by_messages(full: torch.Tensor, scratch: torch.Tensor) -> list[Any]:
    rank = dist.get_rank()
    parts(scratch)[rank].copy_(parts(full)[rank])
    return [
        work
        for to, origin in peers()
        for work in (dist.isend(parts(full)[to], to), dist.irecv(parts(scratch)[origin], origin))
    ]


RUNS: dict[str, Slice] = {
    "gather, all-gather": gather_by_collective,
    "gather, messages (ours)": gather_by_messages,
    "scatter, reduce-scatter": scatter_by_collective,
    "scatter, all-to-all (ours, and a sum)": scatter_by_all_to_all,
    "scatter, messages (and a sum)": scatter_by_messages,
}


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    world = dist.get_world_size()
    numel = args.numel // world * world
    full, scratch = torch.zeros(numel), torch.zeros(numel)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in args.buckets] for name in RUNS}
    for _ in range(args.rounds):
        for name, run in RUNS.items():
            for place, bucket in enumerate(args.buckets):
                pairs = zip(full.split(bucket // world * world), scratch.split(bucket // world * world), strict=True)
                dist.barrier()
                start = time.perf_counter()
                works = [work for mine, other in pairs for work in run(mine, other)]
                for work in works:
                    work.wait()
                dist.barrier()
                seconds[name][place].append(time.perf_counter() - start)
    return {name: [statistics.median(each) for each in columns] for name, columns in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=12 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--buckets", type=int, nargs="+", default=[1 << 18, 1 << 20, 1 << 22, 12 << 20])
    args = parser.parse_args()
    if benchlib.in_rank():
        benchlib.run_rank(lambda: measure(args))
        return
    result = benchlib.launch(sys.argv, args.ranks, timeout_s=300, threads=1)
    print(f"{'elements per call':38}" + "".join(f"{bucket:>12}" for bucket in args.buckets))
    for name, columns in result.items():
        print(f"{name:38}" + "".join(f"{value * 1e3:>9.1f} ms" for value in columns))


if __name__ == "__main__":
    main()
