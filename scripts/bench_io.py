"""Sequential reads and writes of one file: hf_zero's AioQueue beside fio and DeepSpeed's aio_handle, in turn.

    python scripts/bench_io.py FOLDER
    python scripts/bench_io.py FOLDER --blocks 262144,1048576 --depths 8,32 --rounds 7 --json

All of them use O_DIRECT, the same block size and queue depth, and the same file, whose space is written once before.
A disk's speed changes from second to second, so the variants take turns; medians over rounds, and the median of the
ratio within a round to fio's better engine (by median). fio and DeepSpeed are left out where they are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_zero.config.resolved import Aio
from hf_zero.extras.cli.bench_io import Setting, fio_speed, our_speed
from hf_zero.native.host_memory import transfer_memory

# (block size, queue depth, "read" or "write") -> bytes per second
Slice = Callable[[int, int, str], float]
FIO_ENGINES = ("libaio", "io_uring")


def ours(path: Path, buffer: torch.Tensor, engine: str) -> Slice:
    return lambda block, depth, mode: our_speed(path, buffer, Setting(engine, Aio(block, depth, 1)), mode)


def fio(path: Path, size: int, engine: str) -> Slice:
    return lambda block, depth, mode: fio_speed(path, size, Setting(engine, Aio(block, depth, 1)), mode, engine)


def deepspeed(path: Path, size: int) -> Slice:
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-not-found, unused-ignore]

    aio = get_accelerator().get_op_builder("AsyncIOBuilder")().load(verbose=False)
    pinned = aio.aio_handle(1 << 20, 8, False, True, 1).new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    pinned.fill_(3)

    def run(block: int, depth: int, mode: str) -> float:
        handle = aio.aio_handle(block, depth, False, True, 1)
        start = time.perf_counter()
        started = (handle.async_pwrite if mode == "write" else handle.async_pread)(pinned, str(path), 0)
        if started != 0 or handle.wait() != 1:
            raise RuntimeError(f"DeepSpeed's {mode} failed")
        return size / (time.perf_counter() - start)

    return run


def make_variants(path: Path, size: int, args: argparse.Namespace) -> dict[str, Slice]:
    memory = transfer_memory(size).fill_(3)
    small_pages = torch.full((size + 4096,), 3, dtype=torch.uint8)
    small_pages = small_pages[-small_pages.data_ptr() % 4096 :][:size]
    variants: dict[str, Slice] = {
        f"hf_zero {engine}": ours(path, memory, engine) for engine in ("io_uring", "threads")
    }
    variants["hf_zero io_uring, small pages"] = ours(path, small_pages, "io_uring")
    # Torch allocates 64 bytes off, which the device does not take.
    variants["hf_zero io_uring, unaligned"] = ours(path, memory[64 : size - 4096 + 64], "io_uring")
    if shutil.which("fio"):
        variants |= {f"fio {engine}": fio(path, size, engine) for engine in FIO_ENGINES}
    if not args.no_deepspeed:
        with contextlib.suppress(ImportError):
            variants["DeepSpeed aio_handle"] = deepspeed(path, size)
    return variants


def measure(path: Path, size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    variants = make_variants(path, size, args)
    path.write_bytes(b"")
    ours(path, transfer_memory(size).fill_(3), "threads")(1 << 20, 8, "write")  # allocates the space
    rng = random.Random(0)
    rows = []
    for block in args.blocks:
        for depth in args.depths:
            for mode in ("write", "read"):
                speeds: dict[str, list[float]] = {name: [] for name in variants}
                for _ in range(args.rounds):
                    for name in rng.sample(list(variants), len(variants)):  # nobody always comes after the same one
                        speeds[name].append(variants[name](block, depth, mode))
                rows.append(summary(speeds, block, depth, mode))
                print_rows(rows[-1:], args)
    return rows


def summary(speeds: dict[str, list[float]], block: int, depth: int, mode: str) -> dict[str, Any]:
    medians = {name: statistics.median(values) / 1e9 for name, values in speeds.items()}
    rivals = [name for name in speeds if name.startswith("fio")]
    ratios = {}
    if rivals:
        best = speeds[max(rivals, key=lambda name: medians[name])]
        for name, values in speeds.items():
            ratios[name] = statistics.median(value / other for value, other in zip(values, best, strict=True))
    return {"mode": mode, "block_size": block, "queue_depth": depth, "gb_s": medians, "over_best_fio": ratios}


def print_rows(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    for row in rows if not args.json else ():
        print(f"{row['mode']}, block {row['block_size'] >> 10} KiB, queue depth {row['queue_depth']}")
        for name, speed in row["gb_s"].items():
            ratio = row["over_best_fio"].get(name)
            print(f"  {name:<30} {speed:6.2f} GB/s" + (f"  {ratio:5.2f} x fio" if ratio else ""), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=1024, help="file size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", default="1048576", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--depths", default="8,32", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--no-deepspeed", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    path = args.folder / f"bench_io.{os.getpid()}.bin"
    try:
        rows = measure(path, args.mib << 20, args)
    finally:
        path.unlink(missing_ok=True)
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
