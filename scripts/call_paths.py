"""The calls of hf_zero that a parameter, a gradient and a saved tensor go through, as they happen.

    python scripts/call_paths.py

Two gloo ranks train three linear layers at stage 3, one unit each. Shown is the third step of rank 0: the hook that
gathers a layer, the one that takes a gradient, and the one that reduces a layer's gradients. The way is marked with a
star: the calls from the hook to the work that a thread does, and to the wait for it (a gradient's: to where it is
added). The others look after something on that way: checks, counters, hooks of the backward. Of `initialize` and of
`save_checkpoint`, which make thousands of calls, only the way is shown: what leads to the first call of each function
that decides something of a parameter, and to those that write a tensor.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
# The unit of a parameter, its place in the unit, the medium of its shard, the shard, and the hook that gathers it.
_INITIALIZE_ENDS = (":partition", "layout.py:build", ".placement_of", ":make_shard", ".on_layer")
# The folder and tag, the states of a parameter, the header, the rank's file, and the commit.
_SAVE_ENDS = (":agree_on_target", ".slice_states", ":file_marks", "_Direct.copy", "_Direct.write", ":publish")
_AROUND_WORK = ("comm.py:Comm.agree", "processes.py:attempt")  # on the stack; a reader goes on with the work
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
    with calls_of_hf_zero() as setup:
        engine, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=_CONFIG)
    for _ in range(3):
        with calls_of_hf_zero() as forward:
            loss = engine.module(torch.ones(1, 8))
        with calls_of_hf_zero() as backward:
            loss.backward()
        engine.step()
    folder = [tempfile.mkdtemp() if engine.rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    with calls_of_hf_zero() as save:
        engine.save_checkpoint(folder[0])
    if engine.rank == 0:
        shutil.rmtree(folder[0])
    engine.teardown()
    return {
        "setup of a parameter": first_ways(tree_with(setup, ":initialize"), _INITIALIZE_ENDS),
        "save of a tensor": first_ways(tree_with(save, ":ZeroEngine.save_checkpoint"), _SAVE_ENDS),
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
        if rank == 0 and not marked:
            print(f"\n{title}: {_size(calls)}, {climbs(calls)} climbs")
            print("\n".join(calls), flush=True)
        elif rank == 0:
            print(f"\n{title}: {_size([calls[at] for at in marked])} on the way; {_size(calls)} in all")
            print("\n".join(f"{'*' if at in marked else ' '} {call}" for at, call in enumerate(calls)), flush=True)


def _size(calls: list[str]) -> str:
    return f"{len(calls)} calls over {len(files(calls))} files"


def files(calls: list[str]) -> set[str]:
    return {call.strip().partition(":")[0] for call in calls}


def first_ways(calls: list[str], ends: Sequence[str]) -> list[str]:
    """Return, in order, those of `calls` (indented by depth) that lead to the first call of each of `ends`."""
    found: dict[int, str] = {}
    above: list[int] = []
    missing = set(ends)
    for at, call in enumerate(calls):
        above[_depth(call) :] = [at]
        if reached := {end for end in missing if call.endswith(end)}:
            missing -= reached
            stack = [one for one in above if not calls[one].endswith(_AROUND_WORK)]
            found |= {one: f"{'  ' * depth}{calls[one].strip()}" for depth, one in enumerate(stack)}
    return [found[at] for at in sorted(found)]


def climbs(calls: list[str]) -> int:
    """Count how often a reader of `calls` (indented by depth) returns to a file above, which he has left."""
    count = 0
    above: list[str] = []
    here = ""  # the file that he reads
    for call in calls:
        depth, file = _depth(call), call.strip().partition(":")[0]
        count += depth > 0 and above[depth - 1] != here
        above[depth:] = [file]
        here = file
    return count


def _depth(call: str) -> int:
    return (len(call) - len(call.lstrip())) // 2


def way(calls: list[str]) -> list[int]:
    """The indices of those `calls` (indented by depth) that lead to the ends of the way, and of the ends."""
    found: list[int] = []
    above: list[int] = []
    for at, call in enumerate(calls):
        above[_depth(call) :] = [at]
        if call.endswith(_ENDS):
            found += [one for one in above if one not in found]
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.multiprocessing.spawn(show, (free_port(),), nprocs=2)


if __name__ == "__main__":
    main()
