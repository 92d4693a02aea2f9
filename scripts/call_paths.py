"""The calls of hf_zero while a unit is gathered, and those that a gradient goes through, as they happen.

    python scripts/call_paths.py

Two gloo ranks train three linear layers at stage 3, one unit each. Shown is the third step of rank 0: the hook that
gathers a layer, the one that takes a gradient, and the one that reduces a layer's gradients. The way is marked with a
star: the calls from the hook to the work that a thread does, and to the wait for it (a gradient's: to where it is
added). The others look after something on that way: checks, counters, hooks of the backward.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

import hf_zero
from hf_zero.extras.launcher.node import free_port

_PACKAGE = Path(hf_zero.__file__).parent
_ENDS = ("group_work.py:HostWork.__init__", "group_work.py:HostWork.wait", ":GradAccumulator.take")
_AROUND_BACKWARD = "_watched_backward"  # all that autograd calls is called below it
_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0},
}


class Blocks(nn.Module):
    """Layers in a list: each is a unit."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@contextmanager
def calls_of_hf_zero() -> Iterator[list[list[str]]]:
    """Record the calls of hf_zero that this thread makes in the block: per call from outside, indented by depth."""
    trees: list[list[str]] = []
    depth = 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(_PACKAGE):
            return
        if frame.f_code.co_name == _AROUND_BACKWARD:
            return
        if event == "return":
            depth -= 1
            return
        if depth == 0:
            trees.append([])
        trees[-1].append(f"{'  ' * depth}{path.relative_to(_PACKAGE)}:{_name(frame)}")
        depth += 1

    sys.setprofile(watch)
    try:
        yield trees
    finally:
        sys.setprofile(None)


def _name(frame: FrameType) -> str:
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    return f"{type(owner).__name__}.{name}" if owner is not None else name


def paths() -> dict[str, list[str]]:
    """The calls of the third step, by what happens. Two ranks must call."""
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=_CONFIG)
    for _ in range(3):
        with calls_of_hf_zero() as forward:
            loss = engine.module(torch.ones(1, 8))
        with calls_of_hf_zero() as backward:
            loss.backward()
        engine.step()
    engine.teardown()
    return {
        "gather of a layer": tree_with(forward, ":Comm.all_gather"),
        "arrival of a gradient": tree_with(backward, ":GradAccumulator.take"),
        "reduce of a layer's gradients": tree_with(backward, ":GradReducer.unit_left"),
    }


def tree_with(trees: list[list[str]], name: str) -> list[str]:
    """The last of them: what comes first in a step (the root, the count of units) is not a layer's."""
    return [tree for tree in trees if any(call.endswith(name) for call in tree)][-1]


def show(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    for title, calls in paths().items():
        marked = way(calls)
        if rank == 0:
            print(f"\n{title}: {_size([calls[at] for at in marked])} on the way; {_size(calls)} in all")
            print("\n".join(f"{'*' if at in marked else ' '} {call}" for at, call in enumerate(calls)), flush=True)


def _size(calls: list[str]) -> str:
    return f"{len(calls)} calls over {len(files(calls))} files"


def files(calls: list[str]) -> set[str]:
    return {call.strip().partition(":")[0] for call in calls}


def way(calls: list[str]) -> list[int]:
    """The indices of those `calls` (indented by depth) that lead to the ends of the way, and of the ends."""
    found: list[int] = []
    above: list[int] = []
    for at, call in enumerate(calls):
        depth = (len(call) - len(call.lstrip())) // 2
        above[depth:] = [at]
        if call.endswith(_ENDS):
            found += [one for one in above if one not in found]
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.multiprocessing.spawn(show, (free_port(),), nprocs=2)


if __name__ == "__main__":
    main()
