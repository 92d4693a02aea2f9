"""What a run logs of itself: progress, throughput, times, memory. Keys and forms are DeepSpeed's.

`Reports` turns what happens to an engine into events of micro-batches and steps, and calls watchers. Each watcher is
one key of the configuration; without any, and on ranks that do not log, nothing is hooked on and nothing is measured.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.config.notices import start_text
from hf_zero.engine.memory_usage import device_memory, log_memory_usage
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.optim.hyperparameters import learning_rates, momenta
from hf_zero.runtime.backward_watch import PassEvents, in_backward
from hf_zero.runtime.clocks import Clock, Stopwatch, clock_of
from hf_zero.runtime.log_lines import log_line

# Steps that throughput leaves out: the first ones allocate, record orders and compile. DeepSpeed's ThroughputTimer.
_WARM_UP_STEPS = 2
_EPSILON_S = 1e-6
_GIB = 1024**3


class Event(enum.Enum):
    """What happens in a micro-batch, in this order; a forward without gradients is no part of it."""

    FORWARD_STARTS = "before forward"
    FORWARD_ENDS = "after forward"
    BACKWARD_STARTS = "before backward"
    REDUCE_STARTS = "before the last reduces"  # the backward itself is over; what is left of its reduces follows
    BACKWARD_ENDS = "after backward"
    STEP_STARTS = "before step"
    STEP_ENDS = "after step"


class Watcher:
    """Called as things happen."""

    def on(self, event: Event) -> None: ...

    def loss(self, loss: torch.Tensor) -> None:
        """That of a micro-batch, as the script gave it to the engine."""

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Around a backward that the script leaves to the engine or to accelerate."""
        return contextlib.nullcontext()

    def forget(self) -> None:
        """A pass was broken off."""

    def close(self) -> None:
        """The engine leaves its model."""

    def micro_ends(self, boundary: bool) -> None:
        """A micro-batch is over; with `boundary` the parameters were updated, or the update was skipped."""


class ProgressLines(Watcher):
    """steps_per_print: number of steps, skipped steps, learning rates and momenta."""

    def __init__(self, schedule: StepSchedule, every: int) -> None:
        self._schedule = schedule
        self._every = every
        self._began = False

    def on(self, event: Event) -> None:
        if event is Event.FORWARD_STARTS and not self._began:
            self._began = True
            self._log()

    def micro_ends(self, boundary: bool) -> None:
        if boundary and self._schedule.global_steps % self._every == 0:
            self._log()

    def _log(self) -> None:
        schedule = self._schedule
        groups = [] if schedule.optimizer is None else schedule.optimizer.param_groups
        log_line(
            f"[Rank 0] step={schedule.global_steps}, skipped={schedule.skipped_steps}, lr={learning_rates(groups)}, "
            f"mom={momenta(groups)}"
        )


class ThroughputLines(Watcher):
    """steps_per_print: samples per second over all ranks, from a forward to the end of its backward or step.

    What lies between, such as loading data, does not count. Counts are of this process: a resumed run begins at zero.
    """

    def __init__(self, clock: Clock, every: int, batch_size: Callable[[], int]) -> None:
        self._clock = clock
        self._every = every
        self._batch_size = batch_size
        self._all, self._step = Stopwatch(clock), Stopwatch(clock)
        self._start: Any = None
        self._last: Any = None
        self._micro_steps = self._steps = 0
        self._samples = 0  # of the steps that were timed

    def on(self, event: Event) -> None:
        if event is Event.FORWARD_STARTS and self._start is None and self._steps >= _WARM_UP_STEPS:
            self._start = self._clock.mark()
        elif event in (Event.BACKWARD_ENDS, Event.STEP_ENDS):
            self._last = self._clock.mark()

    def micro_ends(self, boundary: bool) -> None:
        self._micro_steps += 1
        self._steps += boundary
        if self._start is None:
            return
        for watch in (self._all, self._step):
            watch.add(self._start, self._last)
        self._start = None
        if not boundary:
            return
        batch_size = self._batch_size()
        self._samples += batch_size
        if self._steps % self._every == 0:
            self._log(batch_size)
        self._step = Stopwatch(self._clock)

    def _log(self, batch_size: int) -> None:
        memory = device_memory()
        running = self._samples / (self._all.read_ms() / 1000.0 + _EPSILON_S)
        current = batch_size / (self._step.read_ms() / 1000.0 + _EPSILON_S)
        log_line(
            f"epoch=0/micro_step={self._micro_steps}/global_step={self._steps}, RunningAvgSamplesPerSec={running}, "
            f"CurrSamplesPerSec={current}, MemAllocated={round(memory.allocated / _GIB, 2)}GB, "
            f"MaxMemAllocated={round(memory.max_allocated / _GIB, 2)}GB"
        )


# The phases of wall_clock_breakdown, by the events that start and end them.
_STARTS = {
    Event.FORWARD_STARTS: "fwd",
    Event.BACKWARD_STARTS: "bwd_inner",
    Event.REDUCE_STARTS: "bwd_allreduce",
    Event.STEP_STARTS: "step",
}
_ENDS = {
    Event.FORWARD_ENDS: "fwd",
    Event.REDUCE_STARTS: "bwd_inner",
    Event.BACKWARD_ENDS: "bwd_allreduce",
    Event.STEP_ENDS: "step",
}


class WallClockLines(Watcher):
    """wall_clock_breakdown: milliseconds of each phase, per micro-batch and per step.

    bwd is bwd_inner, in which most reduces run beside the backward, and bwd_allreduce, which waits for the rest.
    """

    def __init__(self, clock: Clock) -> None:
        self._watches = {phase: Stopwatch(clock) for phase in _STARTS.values()}
        self._sums: dict[str, float] = {}

    def on(self, event: Event) -> None:
        if event in _ENDS:
            self._watches[_ENDS[event]].stop()
        if event in _STARTS:
            self._watches[_STARTS[event]].start()

    def micro_ends(self, boundary: bool) -> None:
        ms = {phase: watch.take_ms() for phase, watch in self._watches.items()}
        micro = {"fwd": ms["fwd"], "bwd": ms["bwd_inner"] + ms["bwd_allreduce"], **ms}
        self._log({f"{name}_microstep": ms for name, ms in micro.items()})
        self._sums = {name: self._sums.get(name, 0.0) + ms for name, ms in micro.items()}
        if boundary:
            self._log(self._sums)
            self._sums = {}

    def _log(self, times: dict[str, float]) -> None:
        log_line("[Rank 0] time (ms)" + "".join(f" | {name}: {ms:.2f}" for name, ms in times.items()))


class MemoryLines(Watcher):
    """memory_breakdown: what is allocated before and after each phase."""

    def __init__(self) -> None:
        log_memory_usage("Engine made")

    def on(self, event: Event) -> None:
        if event is not Event.REDUCE_STARTS:
            log_memory_usage(f"Engine {event.value}")


class Reports:
    """Calls watchers as things happen to one engine."""

    def __init__(self, watchers: Sequence[Watcher] = ()) -> None:
        self._watchers = tuple(watchers)
        self._backward_done = False  # of a micro-batch that is not over

    @classmethod
    def of(
        cls,
        schedule: StepSchedule,
        config: ResolvedConfig,
        device: torch.device,
        batch_size: Callable[[], int],
        more: Sequence[Watcher] = (),
    ) -> Reports:
        """What `config` asks for. Call on the rank that logs; shows the configuration for `dump_state`."""
        if config.dump_state:
            log_line(start_text(config))
        clock = clock_of(device)
        watchers: list[Watcher] = []
        if config.steps_per_print > 0:
            watchers.append(ProgressLines(schedule, config.steps_per_print))
            if config.settings.get("timers.throughput.enabled") is not False:
                watchers.append(ThroughputLines(clock, config.steps_per_print, batch_size))
        if config.wall_clock_breakdown:
            watchers.append(WallClockLines(clock))
        if config.memory_breakdown:
            watchers.append(MemoryLines())
        return cls([*watchers, *more])

    def joined_by(self, watchers: Sequence[Watcher]) -> Reports:
        """Reports to `watchers` too."""
        return type(self)([*self._watchers, *watchers])

    def loss(self, loss: torch.Tensor) -> None:
        """The script has given the engine the loss of a micro-batch."""
        for watcher in self._watchers:
            watcher.loss(loss)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The script leaves a backward to the engine or to accelerate."""
        with contextlib.ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher.backward())
            yield

    def close(self) -> None:
        """The engine leaves its model."""
        for watcher in self._watchers:
            watcher.close()

    def around(self, events: PassEvents) -> PassEvents:
        """Return `events` that tell the watchers too; themselves where there are none."""
        return _WatchedPass(events, self) if self._watchers else events

    def watch_forward(self, model: nn.Module) -> Callable[[], None]:
        """Learn when the model's forward ends; returns what takes that back."""
        if not self._watchers:
            return lambda: None

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if _trains():
                self._notify(Event.FORWARD_ENDS)

        # Last of all hooks, and outside of what torch.compile traces.
        return model.register_forward_hook(torch.compiler.disable(after)).remove

    def step_starts(self) -> None:
        self._notify(Event.STEP_STARTS)

    def step_ends(self, *, boundary: bool) -> None:
        """What ends a micro-batch; `boundary` as in Watcher.micro_ends."""
        self._notify(Event.STEP_ENDS)
        self._micro_ends(boundary)

    def forget(self) -> None:
        """A pass was broken off: no micro-batch is under way."""
        self._backward_done = False
        for watcher in self._watchers:
            watcher.forget()

    def _forward_starts(self) -> None:
        if self._backward_done:  # Trainer and Accelerate call no step between micro-batches
            self._micro_ends(False)
        self._notify(Event.FORWARD_STARTS)

    def _micro_ends(self, boundary: bool) -> None:
        self._backward_done = False
        for watcher in self._watchers:
            watcher.micro_ends(boundary)

    def _notify(self, event: Event) -> None:
        for watcher in self._watchers:
            watcher.on(event)


class _WatchedPass(PassEvents):
    """The events of a pass, of which the watchers of `reports` hear too."""

    def __init__(self, events: PassEvents, reports: Reports) -> None:
        self._events = events
        self._reports = reports

    def begin_forward(self) -> None:
        self._events.begin_forward()
        if _trains():
            self._reports._forward_starts()

    def end_forward(self) -> None:
        self._events.end_forward()

    def begin_backward(self) -> None:
        self._reports._notify(Event.BACKWARD_STARTS)
        self._events.begin_backward()

    def gradients_complete(self) -> None:
        self._events.gradients_complete()

    def end_backward(self) -> None:
        self._reports._notify(Event.REDUCE_STARTS)
        self._events.end_backward()
        self._reports._backward_done = True
        self._reports._notify(Event.BACKWARD_ENDS)

    def check_current(self) -> None:
        self._events.check_current()


def _trains() -> bool:
    """A forward that a backward is to follow; one that is repeated inside a backward belongs to that."""
    return torch.is_grad_enabled() and not in_backward()
