"""The tokens per second of offload to the host, beside DeepSpeed's where that is installed. Nothing is judged."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from smoke_checks.rows import NOT_SEEN, OK, Row
from smoke_checks.settings import Setting
from smoke_checks.training import Task

MEASURED = (Setting(2, precision="bf16"), Setting(2, "cpu", "bf16"), Setting(2, "delayed", "bf16"))
STREAMED = (Setting(3, "none+cpu", "bf16"), Setting(3, "cpu+cpu", "bf16"))
WARM_UP = 2


def check(task: Task, device: str) -> Iterator[Row]:
    for setting in task.of((*MEASURED, *STREAMED)):
        engine = task.start(setting, device)
        yield Row(f"speed, {setting}", OK, _timed(task, engine, engine.finish_updates))
        engine.teardown()


def check_theirs(task: Task, device: str) -> Iterator[Row]:
    """DeepSpeed, which has processes of its own."""
    for setting in (Setting(2, "cpu", "bf16"), Setting(3, "cpu+cpu", "bf16")):
        name = f"speed of DeepSpeed, {setting}"
        if importlib.util.find_spec("deepspeed") is None:
            yield Row(name, NOT_SEEN, "it is not installed: pip install -e .[peers]")
            continue
        import deepspeed

        config = setting.config(task.shape, task.folder)
        for block in ("offload_optimizer", "offload_param"):
            theirs = config["zero_optimization"][block]
            if theirs["device"] == "none":
                del config["zero_optimization"][block]
                continue
            config["zero_optimization"][block] = {
                key: theirs[key] for key in theirs if key in ("device", "pin_memory")
            }
        config["optimizer"] = {"type": "AdamW", "params": {"lr": task.shape.lr, "weight_decay": 0.01}}
        engine = deepspeed.initialize(model=task.size.build(), config=config)[0]
        yield Row(name, OK, _timed(task, engine, lambda: None))


def _timed(task: Task, engine: Any, finish: Callable[[], None]) -> str:
    """The tokens per second of the steps after those to warm up."""
    shape, started, done = task.shape, 0.0, 0
    for step in range(WARM_UP + shape.steps):
        if step == WARM_UP:
            finish()
            torch.accelerator.synchronize()
            started = time.perf_counter()
        for micro in range(shape.accumulation):
            batch = task.batch(0, step * shape.accumulation + micro)
            loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            done += shape.micro_batch * shape.tokens if step >= WARM_UP else 0
    finish()
    torch.accelerator.synchronize()
    return f"{done / (time.perf_counter() - started):.0f} tokens/s, loss {loss.item():.4f}"
