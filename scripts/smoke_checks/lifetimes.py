"""Engines that come and go: a resume with the default optimizer, a teardown that gives memory back, another engine,
states that leave the device between steps."""

from __future__ import annotations

from collections.abc import Iterator

from smoke_checks import place
from smoke_checks.rows import Row
from smoke_checks.settings import Setting
from smoke_checks.training import TOLERANCE, Task, difference, run_steps, train

RESUMED = (Setting(0), Setting(2), Setting(3), Setting(2, "cpu"), Setting(3, "cpu+cpu"), Setting(3, "nvme+nvme"))
REPLACED = (Setting(0), Setting(3), Setting(3, "cpu+cpu"), Setting(3, "nvme+nvme"))
MOVED = (Setting(1), Setting(3), Setting(3, precision="bf16"))
# Libraries take memory once in a process (workspaces): that is no leak.
ONCE_BYTES = 64 << 20
SHARE_MOVED = 0.9  # of the states' bytes, at least: step counts stay


def check(task: Task, device: str) -> Iterator[Row]:
    for setting in task.of(RESUMED):
        yield _resume(task, setting, device)
    for setting in task.of(REPLACED):
        yield _replace(task, setting, device)
    for setting in task.of(MOVED):
        yield _move(task, setting, device)


def _resume(task: Task, setting: Setting, device: str) -> Row:
    """torch's fused AdamW wants its step counts on the device, wherever the file was read."""
    steps, folder = task.shape.steps, f"{task.folder}/checkpoints/{setting}".replace(" ", "_").replace(",", "")
    engine = task.start(setting, device)
    run_steps(engine, task, range(steps))
    engine.save_checkpoint(folder)
    expected = run_steps(engine, task, range(steps, 2 * steps)).losses
    engine.teardown()
    engine = task.start(setting, device)
    engine.load_checkpoint(folder)
    found = run_steps(engine, task, range(steps, 2 * steps)).losses
    engine.teardown()
    off = difference(found, expected)
    detail = f"losses after it within {off:.1e} of those without"
    return Row.judged(f"resume, {setting}", off <= TOLERANCE[setting.precision], detail)


def _replace(task: Task, setting: Setting, device: str) -> Row:
    before = place.allocated()
    first = train(task, setting, device).losses
    kept = place.allocated() - before
    second = train(task, setting, device).losses
    more = place.allocated() - before - kept
    off = difference(second, first)
    good = off <= TOLERANCE[setting.precision] and kept <= ONCE_BYTES and more <= 0
    detail = f"the second engine's losses within {off:.1e}; {kept} bytes stay on the device, then {more} more"
    return Row.judged(f"teardown and second engine, {setting}", good, detail)


def _move(task: Task, setting: Setting, device: str) -> Row:
    """The training states wait on the host between two steps, as while another program uses the device."""
    steps, expected = task.shape.steps, train(task, setting, device).losses
    engine = task.start(setting, device)
    losses = run_steps(engine, task, range(1)).losses
    engine.module.zero_grad()
    report, in_use = engine.memory_report(), place.allocated()
    states = report["device"] - report["parameters"]  # one rank has all parameters in use: they stay
    engine.offload_states()
    freed = in_use - place.allocated()
    engine.reload_states()
    kept = place.allocated() - in_use
    losses += run_steps(engine, task, range(1, steps)).losses
    engine.teardown()
    off = difference(losses, expected)
    good = off <= TOLERANCE[setting.precision] and freed >= SHARE_MOVED * states and kept <= (1 - SHARE_MOVED) * states
    detail = f"{freed / 1e6:.2f} of {states / 1e6:.2f} MB leave the device, losses within {off:.1e}"
    return Row.judged(f"states to the host and back, {setting}", good, detail)
