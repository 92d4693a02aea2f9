"""A rank that is killed in the middle of training: the others end with a sentence of ours, within seconds."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import hf_zero
from smoke_checks import ranks
from smoke_checks.rows import NOT_SEEN, Row
from smoke_checks.settings import Setting
from smoke_checks.training import Task, run_steps

KILLED = (Setting(2), Setting(3))
LIMIT_S = 30.0


def train_until_killed(task: Task, setting: Setting, device: str, mark: Path) -> None:
    """Train on every rank: the last one is killed inside its third step, at a layer's forward."""
    hf_zero.init_distributed()
    engine = task.start(setting, device)
    run_steps(engine, task, range(2))
    if engine.rank == engine.world_size - 1:

        def die(*_: object) -> None:
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        engine.module.model.layers[1].register_forward_pre_hook(die)
    run_steps(engine, task, range(2, 500))


def check(program: Sequence[str], count: int, folder: Path, limit_s: float) -> Iterator[Row]:
    """`program` runs `train_until_killed` if it gets the setting's number and the mark's path."""
    for number, setting in enumerate(KILLED):
        name = f"a rank of {count} is killed, {setting}"
        mark, started = folder / f"killed-{number}", time.time()
        ended = ranks.run([*program, str(number), str(mark)], count, timeout_s=limit_s)
        if not mark.exists():
            yield Row.judged(name, False, f"it did not come so far: {ended[-1].text[-300:]}")
            continue
        yield _judged(name, ended[:-1], float(mark.read_text()) - started)


def _judged(name: str, others: Sequence[ranks.Ended], killed_after: float) -> Row:
    if any(re.search(r"RuntimeError: lag: \w+ failed", end.text) for end in others):
        return Row(name, NOT_SEEN, "a collective of the lag device raised gloo's error, in the midst of a kernel")
    problems = []
    for rank, end in enumerate(others):
        if end.status in (0, None):
            problems.append(f"rank {rank} went on")
        elif "DivergenceError" not in end.text:
            problems.append(f"rank {rank} said nothing of ours: {end.text[-300:]}")
    slowest = max(end.seconds for end in others) - killed_after
    if slowest > LIMIT_S:
        problems.append(f"the others took {slowest:.0f} s")
    return Row.judged(name, not problems, "; ".join(problems) or f"DivergenceError after {slowest:.1f} s")
