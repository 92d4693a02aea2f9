"""Lines that a run logs of itself: progress, throughput, times, memory. Keys and forms are DeepSpeed's.

Each watcher is one key of the configuration, on the rank that logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_zero.config.notices import start_text
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.engine.reports import Event, Watcher
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.extras.monitors.clocks import Clock, Stopwatch, clock_of
from hf_zero.extras.monitors.memory_usage import device_memory, log_memory_usage
from hf_zero.logs import log_line
from hf_zero.optim.hyperparameters import learning_rates, momenta

# Steps that throughput leaves out: the first ones allocate, record orders and compile. DeepSpeed's ThroughputTimer.
_WARM_UP_STEPS = 2
_EPSILON_S = 1e-6
_GIB = 1024**3


class LinesPart(EnginePart):
    """Gives the engine on rank 0 a watcher for each key, and shows the configuration for `dump_state`."""

    engine: ZeroEngine

    def start(self) -> Sequence[Watcher]:
        engine, config = self.engine, self.engine.config
        if not engine.trains:
            return []
        clock = clock_of(engine.device)
        engine.tput_timer = ThroughputLines(clock, config.steps_per_print, lambda: engine.config.train_batch_size)
        if engine.run_comm.rank != 0:
            return []
        if config.dump_state:
            log_line(start_text(config))
        watchers: list[Watcher] = []
        if config.steps_per_print > 0:
            watchers.append(ProgressLines(engine.schedule, config.steps_per_print))
            if config.settings.get("timers.throughput.enabled") is not False:
                watchers.append(engine.tput_timer)
        if config.wall_clock_breakdown:
            watchers.append(WallClockLines(clock))
        if config.memory_breakdown:
            watchers.append(MemoryLines())
        return watchers


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
        self.epoch_count = self._micro_steps = self._steps = 0
        self._samples = 0  # of the steps that were timed

    def update_epoch_count(self) -> None:
        """Count an epoch; DeepSpeed's programs call it."""
        self.epoch_count += 1
        self._micro_steps = 0

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of all steps that were timed; minus infinity where none was."""
        return self._samples / (self._all.read_ms() / 1000.0 + _EPSILON_S) if self._samples else float("-inf")

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
        allocated, most = (round(size / _GIB, 2) for size in (memory.allocated, memory.max_allocated))
        running = self.avg_samples_per_sec()
        current = batch_size / (self._step.read_ms() / 1000.0 + _EPSILON_S)
        log_line(
            f"epoch={self.epoch_count}/micro_step={self._micro_steps}/global_step={self._steps}, "
            f"RunningAvgSamplesPerSec={running}, CurrSamplesPerSec={current}, MemAllocated={allocated}GB, "
            f"MaxMemAllocated={most}GB"
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
