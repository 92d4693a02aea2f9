"""deepspeed.utils.timer's names, over the package's own Stopwatch. Times are in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hf_zero.distributed.processes import default_device
from hf_zero.extras.monitors.clocks import Stopwatch, clock_of
from hf_zero.logs import log_line


class Timer(Stopwatch):
    """A Stopwatch under DeepSpeed's names."""

    def __init__(self) -> None:
        super().__init__(clock_of(default_device()))

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the stretch that `start` began. The arguments change nothing, as in DeepSpeed."""
        super().stop()

    def reset(self) -> None:
        """Begin from zero."""
        self.stop()
        self.take_ms()

    def elapsed(self, reset: bool = True) -> float:
        """Return the time so far, with that of a stretch under way, and begin from zero unless `reset` is False."""
        runs = self._start is not None
        self.stop()
        total = self.take_ms() if reset else self.read_ms()
        if runs:
            self.start()
        return total


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer())

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the times of these names, each divided by `normalizer`, on rank 0 or on `ranks`."""
        times = {name: self.timers[name].elapsed(reset) / normalizer for name in names if name in self.timers}
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank in (ranks or [0]):
            log_line(f"[Rank {rank}] time (ms)" + "".join(f" | {name}: {ms:.2f}" for name, ms in times.items()))


class ThroughputTimer:
    """Samples per second from `start` to `stop`, without those of the first steps.

    Args:
        config: An object whose `enabled` says whether anything is timed.
        batch_size: The number of samples of one step.
        start_step: The number of steps that are not timed.
        steps_per_output: A line is logged at each multiple of it; None logs none.
        monitor_memory: This is for DeepSpeed's sake: `see_memory_usage` shows the host's memory.
        logging_fn: It is called with each line.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.steps_per_output, self.logging = steps_per_output, logging_fn or log_line
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.started = False
        self._all, self._step = Timer(), Timer()

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        self.started = self.config.enabled
        if self.started and self.global_step_count >= self.start_step:
            self._all.start()
            self._step.start()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End the stretch that `start` began; with `global_step` it was the last one of a step."""
        if not self.started:
            return
        self.started = False
        self._all.stop()
        self._step.stop()
        self.micro_step_count += 1
        if not global_step:
            return
        self.global_step_count += 1
        step_ms, every = self._step.elapsed(), self.steps_per_output
        if report_speed and step_ms and every and self.global_step_count % every == 0:
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
                f"CurrSamplesPerSec={1000 * self.batch_size / step_ms}"
            )

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of all steps that were timed; minus infinity before the first."""
        steps, total_ms = self.global_step_count - self.start_step, self._all.elapsed(reset=False)
        return 1000 * self.batch_size * steps / total_ms if steps > 0 and total_ms else float("-inf")
