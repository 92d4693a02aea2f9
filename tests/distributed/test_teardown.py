"""An engine's part of the process (group, sockets, threads) goes with it, whichever way it ends."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine, engine_of
from tests.harness.launches import launch, write_script
from tests.harness.ranks import RankFailure, run_ranks


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def config(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 4, "desync_timeout": 30, "zero_optimization": zero}


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def start(stage: int, model: nn.Module | None = None) -> ZeroEngine:
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config(stage))[0]


def train(engine: ZeroEngine, steps: int = 2) -> float:
    for _ in range(steps):
        loss = engine(batch())
        engine.backward(loss)
        engine.step()
    return loss.item()


def held() -> tuple[int, int]:
    """Open files and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def torn_down(stage: int) -> None:
    engine = start(stage)
    train(engine)
    engine.teardown()


def forgotten(stage: int) -> None:
    train(start(stage))


def forgotten_after_an_error(stage: int) -> None:
    """A backward is left half done: on every rank alike, as where a batch was bad."""
    engine = start(stage)
    train(engine, 1)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("bad batch")

    x = batch().requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ValueError, match="bad batch"):
        engine.backward(engine(x))


def replaced(stage: int) -> None:
    """Two models that were spread on their own become one in training: one of the two groups is left over."""
    parts = nn.Sequential(hf_zero.shard(Net(), config(stage)), hf_zero.shard(Net(), config(stage)))
    parts[1].forward = lambda x: x  # type: ignore[method-assign]
    parts.requires_grad_(True)
    engine = start(stage, parts)
    train(engine)
    engine.teardown()


def copied(stage: int) -> None:
    """A copy runs over the original's group, which lasts until both have ended."""
    engine = start(stage)
    loss = train(engine)
    twin = copy.deepcopy(engine.module)
    want = engine(batch()).item()
    engine.teardown()
    assert want != loss, "vacuous: nothing was learned"
    with torch.no_grad():
        assert twin(batch()).item() == want
    theirs = engine_of(twin)
    assert theirs is not None
    theirs.teardown()


# More than one engine has, less than two have (5 or 6 files, 3 threads, and the update's).
FILES, THREADS = 7, 5
WAYS: list[Callable[[int], None]] = [torn_down, forgotten, forgotten_after_an_error, replaced, copied]


def again_and_again(ways: list[Callable[[int], None]], stage: int) -> list[tuple[str, list[tuple[int, int]]]]:
    results = []
    for way in ways:
        counts = []
        for _ in range(5):
            way(stage)
            counts.append(held())
        results.append((way.__name__, counts))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world_size"), [(3, 2), (3, 3), (1, 2)])
def test_nothing_is_left_of_an_engine(stage: int, world_size: int) -> None:
    ways = [way for way in WAYS if stage == 3 or way not in (copied, replaced)]
    for rank in run_ranks(again_and_again, world_size, ways, stage, timeout=120):
        for name, counts in rank:
            if name == "torn_down":
                assert len(set(counts[1:])) == 1, counts
            # A forgotten group goes when others are made, if all that it had begun is over by then: one may linger.
            files, threads = zip(*counts, strict=True)
            assert max(files) - files[0] <= FILES and max(threads) - threads[0] <= THREADS, f"{name}: {counts}"


def on_one_rank(stage: int) -> None:
    engine = start(stage)
    train(engine)
    engine.comm.timeout_s = 2.0
    if engine.rank == 0:
        engine.teardown()
    else:
        torch.distributed.barrier()


@pytest.mark.parametrize("stage", [1, 3])
def test_teardown_on_one_rank_raises(stage: int) -> None:
    first = run_ranks(on_one_rank, 2, stage, expect_error=True)[0]
    assert isinstance(first, RankFailure) and first.kind == "StateError", first
    assert "engine.teardown" in first.message and "[1]" in first.message


def used_afterwards() -> list[str]:
    said = []
    engine = start(1)
    train(engine)
    engine.teardown()
    engine.module(batch()).backward()  # the model is a plain one
    assert engine.module.layers[0].weight.grad is not None
    for call in (engine.step, lambda: engine.comm.barrier("again")):
        with pytest.raises(hf_zero.StateError) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_an_engine_that_was_torn_down_says_so() -> None:
    for said in run_ranks(used_afterwards, 2):
        assert all("torn down" in text for text in said)


def after_an_error() -> bool:
    engine = start(1)
    train(engine)
    engine.comm.abandon(hf_zero.StateError("enough"))
    engine.teardown()
    return bool(engine.module.layers[0].weight.isfinite().all())


def test_teardown_after_an_error_waits_for_nobody() -> None:
    assert run_ranks(after_an_error, 2, timeout=20) == [True, True]


KEEPS_ITS_ENGINE = r"""
import atexit, os

@atexit.register  # first, so that it runs last
def count_threads_of_gloo():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    print(f"threads of gloo: {sum('gloo' in name for name in names)}\n", end="")  # one write: ranks share the output

import hf_zero, torch
model = torch.nn.Linear(8, 8)
engine = hf_zero.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})[0]
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print(f"threads before: {sum('gloo' in name for name in names) > 0}\n", end="")
engine.comm.barrier("the last operation")
"""


@pytest.mark.slow
def test_no_thread_of_gloo_outlives_python(tmp_path: Path) -> None:
    """A thread that still held tensors of the last operation would abort the process: a good job reported SIGABRT."""
    done = launch(tmp_path, "--num_gpus", 2, write_script(tmp_path, KEEPS_ITS_ENGINE))
    assert done.status == 0, done.err
    assert done.out.count("threads before: True") == 2, done.out
    assert done.out.count("threads of gloo: 0") == 2, done.out


def calls_after_the_end(folder: str) -> dict[str, str]:
    engine = start(3)
    engine.backward(engine(batch()))
    engine.step()
    saved = engine.save_checkpoint(folder)
    engine.teardown()
    calls = {
        "step": engine.step,
        "optimizer.step": engine.optimizer.step,
        "memory_report": engine.memory_report,
        "full_state_dict": lambda: engine.full_state_dict(keep=True),
        "save_checkpoint": lambda: engine.save_checkpoint(folder),
        "load_checkpoint": lambda: engine.load_checkpoint(folder),
        "teardown": engine.teardown,
    }
    said = {"saved": str(saved)}
    for name, call in calls.items():
        try:
            said[name] = str(call())
        except hf_zero.StateError as error:
            said[name] = str(error)
    return said


def test_calls_after_the_end_say_so(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(calls_after_the_end, 2, str(tmp_path))):
        assert said.pop("saved") == "True" and said.pop("teardown") == "None"
        assert "a step is not possible after its engine has left the model" in said.pop("optimizer.step")
        for call, text in said.items():
            assert text.startswith(f"rank {rank}: ") and f"{call}: this engine was torn down" in text, text
