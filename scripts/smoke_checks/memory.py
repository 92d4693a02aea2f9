"""Peak memory of the device beside the plan that `hf-zero estimate` makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from smoke_checks import place
from smoke_checks.rows import NOT_SEEN, Row
from smoke_checks.settings import Setting
from smoke_checks.training import Task, run_steps

PLANNED = (Setting(0, precision="bf16"), Setting(2, "cpu", "bf16"), Setting(3, "cpu+cpu", "bf16"))
# A training may take this share more than planned, and what kernels need for themselves, which no plan knows.
SHARE, WORKSPACE_BYTES = 1.15, 256 << 20


def check(task: Task, device: str) -> Iterator[Row]:
    for setting in task.of(PLANNED):
        yield _row(task, setting, device)


def _row(task: Task, setting: Setting, device: str) -> Row:
    name = f"peak memory, {setting}"
    before = place.allocated()
    torch.accelerator.reset_peak_memory_stats()
    engine = task.start(setting, device)
    run_steps(engine, task, range(task.shape.steps))
    engine.finish_updates()
    measured = torch.accelerator.max_memory_allocated() - before
    engine.teardown()
    planned = plan(task, setting).device_peak
    detail = f"{measured / 1e6:.1f} MB, planned {planned / 1e6:.1f} MB, x {measured / planned:.2f}"
    if measured <= 0:
        return Row(name, NOT_SEEN, "the device does not count its memory")
    return Row.judged(name, measured <= SHARE * planned + WORKSPACE_BYTES, detail)


def plan(task: Task, setting: Setting) -> Any:
    """The plan of the only rank."""
    from hf_zero.config import ZeroConfig
    from hf_zero.estimate import measure, plan_model

    with torch.device("meta"):
        model = task.size.build()
        ids = torch.empty(task.shape.micro_batch, task.shape.tokens, dtype=torch.long)
    config = ZeroConfig.load(setting.config(task.shape, task.folder)).resolve(
        model=model, world_size=1, client_optimizer=True
    )
    profile = measure(model, config, {"input_ids": ids, "labels": ids}, on_host=False)

    return plan_model(model, config, on_host=False, profile=profile, optimizer=torch.optim.AdamW)
