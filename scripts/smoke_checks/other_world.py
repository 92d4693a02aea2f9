"""A checkpoint that another number of ranks resumes. All ranks take the same data, so their number changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

import hf_zero
from smoke_checks.rows import Row
from smoke_checks.settings import Setting
from smoke_checks.training import TOLERANCE, Task, difference, run_steps

SETTINGS = (Setting(1), Setting(3), Setting(3, "cpu+cpu"))


def save(task: Task, device: str) -> Iterator[Row]:
    """Train, save, train on; what follows the checkpoint is written beside it. On every rank."""
    hf_zero.init_distributed()
    task, steps = replace(task, same_data=True), task.shape.steps
    for number, setting in enumerate(task.of(SETTINGS)):
        engine = task.start(setting, device)
        run_steps(engine, task, range(steps))
        engine.save_checkpoint(f"{task.folder}/{number}")
        losses = run_steps(engine, task, range(steps, 2 * steps)).losses
        engine.teardown()
        if engine.rank == 0:
            Path(f"{task.folder}/{number}.json").write_text(json.dumps([engine.world_size, losses]))
        detail = f"by {engine.world_size} ranks"
        yield Row.judged(f"checkpoint saved, {setting}", True, detail)


def resume(task: Task, device: str) -> Iterator[Row]:
    """Resume on every rank, of another number."""
    hf_zero.init_distributed()
    task, steps = replace(task, same_data=True), task.shape.steps
    for number, setting in enumerate(task.of(SETTINGS)):
        count, expected = json.loads(Path(f"{task.folder}/{number}.json").read_text())
        engine = task.start(setting, device)
        engine.load_checkpoint(f"{task.folder}/{number}")
        off = difference(run_steps(engine, task, range(steps, 2 * steps)).losses, expected)
        engine.teardown()
        name = f"checkpoint of {count} ranks, resumed by {dist.get_world_size()}, {setting}"
        yield Row.judged(name, off <= TOLERANCE[setting.precision], f"losses within {off:.1e}")
