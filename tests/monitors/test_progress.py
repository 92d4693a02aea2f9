"""steps_per_print, wall_clock_breakdown, memory_breakdown and dump_state: which lines there are, and what they say."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import time
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.extras.monitors.clocks import HostClock, Stopwatch
from tests.harness.ranks import run_ranks

SLEEP_S = 0.02
PROGRESS = re.compile(r"step=\d+, skipped=\d+, lr=\[[\d.e, -]+\], mom=\[(\[[\d.]+, [\d.]+\](, )?)+\]$")
THROUGHPUT = re.compile(
    r"epoch=0/micro_step=(\d+)/global_step=(\d+), RunningAvgSamplesPerSec=([\d.]+), CurrSamplesPerSec=([\d.]+), "
    r"MemAllocated=[\d.]+GB, MaxMemAllocated=[\d.]+GB$"
)
PHASES = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
MEMORY = re.compile(r"MA [\d.]+ GB +Max_MA [\d.]+ GB +CA [\d.]+ GB +Max_CA [\d.]+ GB$")
HOST = re.compile(r"CPU Virtual Memory:  used = [\d.]+ GB, percent = [\d.]+%$")


class Slow(nn.Module):
    """Its forward takes at least SLEEP_S."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_S)
        return torch.tanh(self.inner(x)).mean()


class Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "hf_zero.lines":
            self.lines.append(record.getMessage())


def start(stage: int = 2, **keys: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999]}},
        "zero_optimization": {"stage": stage},
        **keys,
    }
    return hf_zero.initialize(model=Slow(), config=config)[0]


def train(engine: Any, micro_batches: int) -> list[float]:
    """Returns the seconds of each micro-batch, and rests between them."""
    times = []
    for _ in range(micro_batches):
        before = time.perf_counter()
        engine.backward(engine(torch.ones(3, 8)))
        engine.step()
        times.append(time.perf_counter() - before)
        with torch.no_grad():
            engine(torch.ones(1, 8))  # an evaluation in between is no part of it
    return times


def lines_of(stage: int, micro_batches: int, **keys: Any) -> dict[str, Any]:
    collected = Collected()
    logging.getLogger("hf_zero").addHandler(collected)
    try:
        engine = start(stage, **keys)
        times = train(engine, micro_batches)
        hooks = len(engine.module._forward_hooks)
        engine.teardown()
    finally:
        logging.getLogger("hf_zero").removeHandler(collected)
    return {"lines": collected.lines, "times": times, "hooks": hooks, "left": len(engine.module._forward_hooks)}


def test_progress_every_5_steps() -> None:
    """The forms of the log in DeepSpeed's CIFAR-10 tutorial."""
    ranks = run_ranks(lines_of, 2, 2, 22, steps_per_print=5)
    assert not ranks[1]["lines"]
    found = ranks[0]["lines"]
    progress = [line for line in found if "skipped" in line]
    assert all(PROGRESS.search(line) for line in progress)
    assert [line.removeprefix("[Rank 0] ") for line in progress] == [
        f"step={step}, skipped=0, lr=[0.001], mom=[[0.8, 0.999]]" for step in (0, 5, 10)
    ]
    speeds = [match for line in found if (match := THROUGHPUT.search(line))]
    assert len(speeds) + len(progress) == len(found)
    assert [match.groups()[:2] for match in speeds] == [("10", "5"), ("20", "10")]
    for match in speeds:
        steps = int(match[2])
        seconds = ranks[0]["times"][4 : 2 * steps]  # two steps of two micro-batches warm up
        # Within what was measured around each micro-batch, and not without the sleep in each.
        assert 12 * (steps - 2) / sum(seconds) <= float(match[3]) <= 6 / SLEEP_S
        assert 12 / sum(seconds[-2:]) <= float(match[4]) <= 6 / SLEEP_S


def test_every_phase_has_its_time() -> None:
    result = run_ranks(lines_of, 2, 3, 4, wall_clock_breakdown=True)[0]
    number = r"(\d+\.\d\d)"
    micro = re.compile(
        r"\[Rank 0\] time \(ms\)" + "".join(rf" \| {name}_microstep: {number}" for name in PHASES) + "$"
    )
    whole = re.compile(r"\[Rank 0\] time \(ms\)" + "".join(rf" \| {name}: {number}" for name in PHASES) + "$")
    kinds = ["micro" if micro.match(line) else "whole" if whole.match(line) else line for line in result["lines"]]
    assert kinds == ["micro", "micro", "whole"] * 2
    first, second, both = ([float(value) for value in re.findall(number, line)] for line in result["lines"][:3])
    for values in (first, second, both):
        assert values[1] == pytest.approx(values[2] + values[3], abs=0.02)
        assert values[2] > 0
    assert both == pytest.approx([a + b for a, b in zip(first, second, strict=True)], abs=0.02)
    assert min(first[0], second[0]) >= 1000 * SLEEP_S
    for values, seconds in zip((first, second), result["times"], strict=False):
        assert values[0] + values[1] + values[4] < 1000 * seconds + 0.02


@pytest.mark.slow
def test_memory_before_and_after_every_phase() -> None:
    result = run_ranks(lines_of, 1, 1, 2, memory_breakdown=True)[0]
    found = result["lines"]
    assert all(MEMORY.match(line) for line in found[1::3]) and all(HOST.match(line) for line in found[2::3])
    phases = [f"Engine {when} {what}" for what in ("forward", "backward", "step") for when in ("before", "after")]
    assert found[0::3] == ["Engine made", *phases, *phases]


def test_the_configuration_is_shown() -> None:
    found = run_ranks(lines_of, 2, 2, 2, dump_state=True)
    assert not found[1]["lines"] and len(found[0]["lines"]) == 1
    text = found[0]["lines"][0]
    assert json.loads(text.partition("json = ")[2])["dump_state"] is True
    assert len(re.findall(r"^ *[\w.]+ \.+ .* \[\w+", text, re.MULTILINE)) >= 60


def quiet() -> dict[str, Any]:
    return lines_of(2, 2)


def test_nothing_is_hooked_on_unless_asked_for() -> None:
    off, on = run_ranks(quiet, 1)[0], run_ranks(lines_of, 1, 2, 2, wall_clock_breakdown=True)[0]
    assert not off["lines"]
    assert on["hooks"] == off["hooks"] + 1
    assert on["left"] == off["left"] == 0


def to_stdout() -> str:
    """Return what a program that has set up no logging prints."""
    logging.getLogger().handlers.clear()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(start(steps_per_print=1), 2)
    return out.getvalue()


def test_lines_are_shown_without_logging_being_set_up() -> None:
    shown = run_ranks(to_stdout, 2)
    assert not shown[1]
    assert [line.rpartition(" [hf_zero] ")[2] for line in shown[0].splitlines()] == [
        f"[Rank 0] step={step}, skipped=0, lr=[0.001], mom=[[0.8, 0.999]]" for step in (0, 1)
    ]


def test_see_memory_usage(caplog: pytest.LogCaptureFixture) -> None:
    hf_zero.see_memory_usage("not now")
    assert not caplog.messages
    hf_zero.see_memory_usage("now", force=True)
    assert caplog.messages[0] == "now" and MEMORY.match(caplog.messages[1]) and HOST.match(caplog.messages[2])
    allocated = float(caplog.messages[1].split()[1])
    assert allocated > 0.01  # of this very process


class LateClock(HostClock):
    """A clock that is late, like a device's: what was marked is over once somebody waits."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def is_past(self, mark: float) -> bool:
        return self.now - mark >= 4

    def ms(self, start: float, end: float) -> float:
        self.waits += not self.is_past(end)
        return end - start


def test_a_stopwatch_waits_for_the_device_only_when_it_is_read() -> None:
    clock = LateClock()
    watch = Stopwatch(clock)
    for _ in range(100):
        watch.start()
        watch.stop()
    assert clock.waits == 0 and len(watch._unread) <= 3
    assert watch.take_ms() == 100.0 and clock.waits > 0
    watch.stop()  # without a start
    assert watch.take_ms() == 0.0
