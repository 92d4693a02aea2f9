"""A rank that fails in the middle of training: all that are left end with a sentence of ours, within seconds."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import hf_zero
from smoke_checks import ranks
from smoke_checks.rows import NOT_SEEN, Row
from smoke_checks.settings import Setting
from smoke_checks.training import Task, run_steps

LIMIT_S = 30.0
_FAILS_AT = 2  # the step


def _die(mark: Path, engine: Any) -> None:
    """The process is killed in the forward of a layer."""

    def die(*_: object) -> None:
        mark.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    engine.module.model.layers[1].register_forward_pre_hook(die)


def _read(mark: Path, engine: Any) -> None:
    """The loop reads a weight of a layer between two forwards, as no other rank does."""

    def read(*_: object) -> None:
        mark.write_text(str(time.time()))
        engine.module.model.layers[1].mlp.up_proj.weight.sum()

    engine.module.register_forward_pre_hook(read, prepend=True)


def _ask_in_backward(mark: Path, engine: Any) -> None:
    """The backward starts an operation that no other rank starts."""

    def ask(*_: object) -> None:
        mark.write_text(str(time.time()))
        engine.comm.all_reduce(torch.ones(1, device=engine.device), "of one rank alone").wait()

    engine.module.model.layers[1].register_full_backward_pre_hook(ask)


FAULTS: tuple[tuple[Setting, str, Callable[[Path, Any], None]], ...] = (
    (Setting(2), "is killed", _die),
    (Setting(3), "is killed", _die),
    (Setting(3), "reads a weight alone", _read),
    (Setting(2), "starts another operation in backward", _ask_in_backward),
    (Setting(3), "starts another operation in backward", _ask_in_backward),
)


def train_until_it_fails(task: Task, device: str, number: int, mark: Path) -> None:
    """Train on every rank with fault `number`; the last rank has it, from its third step on."""
    setting, _, make_fail = FAULTS[number]
    hf_zero.init_distributed()
    engine = task.start(setting, device)
    run_steps(engine, task, range(_FAILS_AT))
    if engine.rank == engine.world_size - 1:
        make_fail(mark, engine)
    run_steps(engine, task, range(_FAILS_AT, 500))


def check(program: Sequence[str], count: int, folder: Path, limit_s: float) -> Iterator[Row]:
    """`program` runs `train_until_it_fails` if it gets the fault's number and the mark's path."""
    for number, (setting, what, make_fail) in enumerate(FAULTS):
        name = f"a rank of {count} {what}, {setting}"
        mark, started = folder / f"failed-{number}", time.time()
        ended = ranks.run([*program, str(number), str(mark)], count, timeout_s=limit_s)
        if not mark.exists():
            yield Row.judged(name, False, f"it did not come so far: {ended[-1].text[-300:]}")
            continue
        left = ended[:-1] if make_fail is _die else ended
        yield _judged(name, left, float(mark.read_text()) - started)


def _judged(name: str, left: Sequence[ranks.Ended], failed_after: float) -> Row:
    if any(re.search(r"RuntimeError: lag: \w+ failed", end.text) for end in left):
        return Row(name, NOT_SEEN, "a collective of the lag device raised gloo's error, in the midst of a kernel")
    problems = []
    for rank, end in enumerate(left):
        if end.status in (0, None):
            problems.append(f"rank {rank} went on: {end.text[-300:]}")
        elif "DivergenceError" not in end.text:
            problems.append(f"rank {rank} said nothing of ours (status {end.status}): {end.text[-300:]}")
    slowest = max(end.seconds for end in left) - failed_after
    if slowest > LIMIT_S:
        problems.append(f"they took {slowest:.0f} s")
    return Row.judged(name, not problems, "; ".join(problems) or f"DivergenceError after {slowest:.1f} s")
