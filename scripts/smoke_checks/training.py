"""A training of a smoke run, by hf_zero on any device, and by torch alone in one process on the CPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from benchlib import ModelSize, make_batch

import hf_zero
from smoke_checks import place, waits
from smoke_checks.settings import BRIEF, Setting, Shape

# Largest relative difference of a loss from the reference's: other kernels, another order of sums.
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}


@dataclass
class Trained:
    """The training of this rank."""

    losses: list[float] = field(default_factory=list)  # of every micro-batch
    waits: waits.Waits = field(default_factory=waits.Waits)  # of the last step
    collectives: dict[str, int] = field(default_factory=dict)  # calls of the last step


@dataclass(frozen=True)
class Task:
    """A model and its data."""

    size: ModelSize
    shape: Shape
    folder: str  # for files of offload and checkpoints
    same_data: bool = False  # on all ranks: then their number changes nothing
    brief: bool = False  # train a few of the settings, to rehearse

    def of(self, settings: Iterable[Setting]) -> Iterator[Setting]:
        """Yield those `settings` that the task trains: all, or those that stand for others."""
        return (setting for setting in settings if not self.brief or setting in BRIEF)

    def batch(self, rank: int, number: int) -> dict[str, torch.Tensor]:
        shape = (self.shape.micro_batch, self.shape.tokens)
        return make_batch(self.size.vocab, shape, 0 if self.same_data else rank, number)

    def start(self, setting: Setting, device: str) -> Any:
        """An engine with torch's fused AdamW, which is Trainer's default. All ranks must call."""
        model = place.put(self.size.build(), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.shape.lr, weight_decay=0.01, fused=True)
        return hf_zero.initialize(model=model, optimizer=optimizer, config=setting.config(self.shape, self.folder))[0]


def run_steps(engine: Any, task: Task, steps: range, *, count_waits: bool = False) -> Trained:
    """Train; the last step is counted. All ranks must call."""
    trained = Trained()
    for step in steps:
        counts = count_waits and step == steps[-1]
        engine.comm.counts.clear()
        numbers = range(step * task.shape.accumulation, (step + 1) * task.shape.accumulation)
        batches = [
            {name: value.to(engine.device) for name, value in task.batch(engine.rank, number).items()}
            for number in numbers
        ]
        losses = []
        with waits.counted(engine.device) if counts else _uncounted() as found:
            for batch in batches:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
        trained.waits = found
        trained.collectives = {name: count.calls for name, count in sorted(engine.comm.counts.items())}
        trained.losses += [loss.item() for loss in losses]
    return trained


@contextlib.contextmanager
def _uncounted() -> Iterator[waits.Waits]:
    yield waits.Waits()


def train(task: Task, setting: Setting, device: str, *, count_waits: bool = False) -> Trained:
    """An engine from its beginning to its teardown. All ranks must call."""
    engine = task.start(setting, device)
    trained = run_steps(engine, task, range(task.shape.steps), count_waits=count_waits)
    engine.finish_updates()
    engine.teardown()
    return trained


def wrong_waits(trained: Trained, setting: Setting) -> str:
    """The places where the host should not have waited, in words; empty if all is right."""
    return waits.wrong(trained.waits, offloaded=setting.is_offloaded, pinned=setting.pin)


def train_on_the_cpu(task: Task, setting: Setting) -> list[float]:
    """The same run of one process on the CPU."""
    with place.on_the_cpu():
        return train(task, setting, "cpu").losses


def train_by_torch(task: Task, world_size: int = 1, *, lr: float | None = None) -> list[list[float]]:
    """[rank][micro-batch]: losses of one process on the CPU that takes the batches of all ranks."""
    model, shape = task.size.build(), task.shape
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.lr if lr is None else lr, weight_decay=0.01)
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(shape.steps):
        for micro in range(shape.accumulation):
            for rank in range(world_size):
                loss = model(**task.batch(rank, step * shape.accumulation + micro)).loss
                (loss / (world_size * shape.accumulation)).backward()
                losses[rank].append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), shape.clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative one; infinite where a loss is missing or no number."""
    if len(found) != len(expected) or not all(map(math.isfinite, found)):
        return math.inf
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(found, expected, strict=True))


def of_all_ranks(value: Any) -> list[Any]:
    """`value` of every rank. All ranks must call."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    group = dist.new_group(backend="gloo")
    dist.all_gather_object(everyone, value, group=group)
    return everyone
