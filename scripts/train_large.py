"""Trains a model whose training state does not fit into the memory of this machine, with the state on disk.

    python scripts/train_large.py /local_nvme                      # 2 B parameters, states and parameters on disk
    python scripts/train_large.py /local_nvme --offload none       # the same without offload: does not fit
    python scripts/train_large.py /local_nvme --layers 4 --steps 2 # a small one, to try

A Llama with random weights, AdamW with fp32 masters and moments: 18 bytes of training state per parameter beside the
gradients. Every rank may take an equal share of --memory (default: what the machine has); beyond it, allocations fail.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from benchlib import ModelSize


class MemoryWatch:
    """Peak anonymous memory of this process, looked at ten times a second."""

    def __init__(self) -> None:
        self.peak = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(0.1):
            self.peak = max(self.peak, benchlib.resident())

    def stop(self) -> int:
        self._end.set()
        self._thread.join()
        return self.peak


def train(args: argparse.Namespace) -> dict[str, Any]:
    import hf_zero

    limit = int(args.memory * 2**30) // dist.get_world_size()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    watch = MemoryWatch()
    torch.set_default_dtype(torch.bfloat16)
    size = ModelSize.of(args)
    model: Any = size.build()
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable()
    numel = sum(param.numel() for param in model.parameters())
    block = {"device": args.offload, "nvme_path": args.folder}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": block, "offload_param": {**block, "max_in_cpu": 0}}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": zero}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    say(f"built {numel / 1e9:.2f} B parameters")
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    say("on its shards")
    losses, seconds = [], []
    for step in range(args.steps):
        begin = time.perf_counter()
        # The same rows in every step: the loss must fall.
        loss = engine(**benchlib.make_batch(args.vocab, (1, args.seq), dist.get_rank(), 0)).loss
        engine.backward(loss)
        engine.step()
        if step + 1 == args.steps:
            engine.finish_updates()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        say(f"step {step}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s")
    stats = {name: vars(one) for name, one in engine.placements.stats().items()}
    mine = {"peak": watch.stop(), "report": engine.memory_report(), "disk": stats}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {"numel": numel, "losses": losses, "seconds": seconds, "ranks": everyone}


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"[train_large] {text}", file=sys.stderr, flush=True)


def report(args: argparse.Namespace, result: dict[str, Any]) -> str:
    ranks = result["ranks"]
    total = {kind: sum(rank["report"][kind] for rank in ranks) for kind in ("total", "disk", "gradients")}
    lines = [
        ", ".join(f"{key} {value}" for key, value in benchlib.environment().items()),
        f"{result['numel'] / 1e9:.2f} B parameters, bf16, {args.world} rank(s), {args.seq} tokens each, "
        f"offload {args.offload}",
        f"training state {total['total'] / 1e9:.1f} GB ({total['disk'] / 1e9:.1f} GB on disk, gradients "
        f"{total['gradients'] / 1e9:.1f} GB in memory); the machine may use {args.memory:.1f} GiB",
        "peak anonymous memory per rank: " + ", ".join(f"{rank['peak'] / 2**30:.2f} GiB" for rank in ranks),
        "losses: " + " ".join(f"{loss:.4f}" for loss in result["losses"]),
        "seconds per step: " + " ".join(f"{value:.1f}" for value in result["seconds"]),
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    add("folder", help="where the files go; about 14 bytes per parameter")
    add("--offload", choices=("none", "nvme"), default="nvme")
    add("--memory", type=float, default=pages, help="GiB that all ranks together may use (default: the machine's)")
    add("--world", type=int, default=2)
    add("--steps", type=int, default=4)
    add("--seq", type=int, default=64)
    benchlib.size_arguments(parser, ModelSize(2560, 6912, 24, 20, 32000))
    benchlib.common_arguments(parser)
    return parser.parse_args(argv)


def main() -> None:
    args = parse(sys.argv[1:])
    if benchlib.in_rank():
        benchlib.run_rank(lambda: train(args))
        return
    result = benchlib.launch(sys.argv, args.world, timeout_s=args.timeout, threads=args.threads)
    print(report(args, result))


if __name__ == "__main__":
    main()
