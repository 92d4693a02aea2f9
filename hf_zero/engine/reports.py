"""What a run tells of itself while it goes: progress, throughput, times, memory. Keys and forms are DeepSpeed's.

`Reports` turns what happens to an engine into micro-batches and steps, and tells watchers. Each watcher is one key of
the configuration; without any, and on ranks that do not speak, nothing is hooked on and nothing is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.config.announce import start_text
from hf_zero.engine.clocks import Clock, Stopwatch, clock_of
from hf_zero.engine.memory_usage import device_memory, see_memory_usage
from hf_zero.runtime.attach import Callbacks
from hf_zero.runtime.hooks import in_backward
from hf_zero.runtime.log_lines import log_line

# Steps that throughput leaves out: the first ones allocate, record orders and compile. DeepSpeed's ThroughputTimer.
_WARM_UP_STEPS = 2
_EPSILON_S = 1e-6
_GIB = 1024**3


class Run(Protocol):
    """What the lines say of an engine."""

    @property
    def global_steps(self) -> int: ...

    @property
    def skipped_steps(self) -> int: ...

    def get_lr(self) -> list[float]: ...

    def get_mom(self) -> list[Any]: ...


class Watcher:
    """Is told what happens, in this order; a forward without gradients is no part of it."""

    def forward_starts(self) -> None: ...

    def forward_ends(self) -> None: ...

    def backward_starts(self) -> None: ...

    def reduce_starts(self) -> None:
        """The backward itself is over; what is left of its reduces follows."""

    def backward_ends(self) -> None: ...

    def step_starts(self) -> None: ...

    def step_ends(self) -> None: ...

    def micro_ends(self, boundary: bool) -> None:
        """A micro-batch is over; with `boundary` the parameters were updated, or the update was skipped."""


class ProgressLines(Watcher):
    """steps_per_print: number of steps, skipped steps, learning rates and momenta."""

    def __init__(self, run: Run, every: int) -> None:
        self._run = run
        self._every = every
        self._began = False

    def forward_starts(self) -> None:
        if not self._began:
            self._began = True
            self._log()

    def micro_ends(self, boundary: bool) -> None:
        if boundary and self._run.global_steps % self._every == 0:
            self._log()

    def _log(self) -> None:
        run = self._run
        log_line(
            f"[Rank 0] step={run.global_steps}, skipped={run.skipped_steps}, lr={run.get_lr()}, mom={run.get_mom()}"
        )


class ThroughputLines(Watcher):
    """steps_per_print: samples per second over all ranks, from a forward to the end of its backward or step.

    What lies between, such as loading data, does not count. Counts are of this process: a resumed run begins anew.
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

    def forward_starts(self) -> None:
        if self._start is None and self._steps >= _WARM_UP_STEPS:
            self._start = self._clock.mark()

    def backward_ends(self) -> None:
        self._last = self._clock.mark()

    def step_ends(self) -> None:
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


class WallClockLines(Watcher):
    """wall_clock_breakdown: milliseconds of each phase, per micro-batch and per step.

    bwd is bwd_inner, in which most reduces run beside the backward, and bwd_allreduce, which waits for the rest.
    """

    def __init__(self, clock: Clock) -> None:
        self._fwd, self._inner, self._reduce, self._step = (Stopwatch(clock) for _ in range(4))
        self._sums: dict[str, float] = {}

    def forward_starts(self) -> None:
        self._fwd.start()

    def forward_ends(self) -> None:
        self._fwd.stop()

    def backward_starts(self) -> None:
        self._inner.start()

    def reduce_starts(self) -> None:
        self._inner.stop()
        self._reduce.start()

    def backward_ends(self) -> None:
        self._reduce.stop()

    def step_starts(self) -> None:
        self._step.start()

    def step_ends(self) -> None:
        self._step.stop()

    def micro_ends(self, boundary: bool) -> None:
        inner, reduce = self._inner.take_ms(), self._reduce.take_ms()
        micro = {
            "fwd": self._fwd.take_ms(),
            "bwd": inner + reduce,
            "bwd_inner": inner,
            "bwd_allreduce": reduce,
            "step": self._step.take_ms(),
        }
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
        self._see("Engine made")

    def forward_starts(self) -> None:
        self._see("Engine before forward")

    def forward_ends(self) -> None:
        self._see("Engine after forward")

    def backward_starts(self) -> None:
        self._see("Engine before backward")

    def backward_ends(self) -> None:
        self._see("Engine after backward")

    def step_starts(self) -> None:
        self._see("Engine before step")

    def step_ends(self) -> None:
        self._see("Engine after step")

    def _see(self, message: str) -> None:
        see_memory_usage(message, force=True)


class Reports:
    """Tells watchers what happens to one engine."""

    def __init__(self, watchers: Sequence[Watcher] = ()) -> None:
        self._watchers = tuple(watchers)
        self._backward_done = False  # of a micro-batch that is not over

    @classmethod
    def of(cls, run: Run, config: ResolvedConfig, device: torch.device, batch_size: Callable[[], int]) -> Reports:
        """What `config` asks for. Call on the rank that speaks; shows the configuration for `dump_state`."""
        settings = config.settings
        if settings["dump_state"]:
            log_line(start_text(config))
        clock = clock_of(device)
        watchers: list[Watcher] = []
        if config.steps_per_print > 0:
            watchers.append(ProgressLines(run, config.steps_per_print))
            if settings.get("timers.throughput.enabled", True):
                watchers.append(ThroughputLines(clock, config.steps_per_print, batch_size))
        if settings["wall_clock_breakdown"]:
            watchers.append(WallClockLines(clock))
        if settings["memory_breakdown"]:
            watchers.append(MemoryLines())
        return cls(watchers)

    def around(self, callbacks: Callbacks) -> Callbacks:
        """`callbacks` that tell the watchers too; themselves where there are none."""
        if not self._watchers:
            return callbacks

        def forward_starts() -> None:
            callbacks.forward_starts()
            if _trains():
                self._forward_starts()

        def backward_starts() -> None:
            self._tell("backward_starts")
            callbacks.backward_starts()

        def backward_ends() -> None:
            self._tell("reduce_starts")
            callbacks.backward_ends()
            self._backward_done = True
            self._tell("backward_ends")

        return dataclasses.replace(
            callbacks, forward_starts=forward_starts, backward_starts=backward_starts, backward_ends=backward_ends
        )

    def watch_forward(self, model: nn.Module) -> Callable[[], None]:
        """Learn when the model's forward ends; returns what takes that back."""
        if not self._watchers:
            return _nothing

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if _trains():
                self._tell("forward_ends")

        # Last of all hooks, and outside of what torch.compile traces.
        return model.register_forward_hook(torch.compiler.disable(after)).remove

    def step_starts(self) -> None:
        self._tell("step_starts")

    def step_ends(self, *, boundary: bool) -> None:
        """What ends a micro-batch; `boundary` as in Watcher.micro_ends."""
        self._tell("step_ends")
        self._micro_ends(boundary)

    def forget(self) -> None:
        """A pass was broken off: no micro-batch is under way."""
        self._backward_done = False

    def _forward_starts(self) -> None:
        if self._backward_done:  # Trainer and Accelerate call no step between micro-batches
            self._micro_ends(False)
        self._tell("forward_starts")

    def _micro_ends(self, boundary: bool) -> None:
        self._backward_done = False
        for watcher in self._watchers:
            watcher.micro_ends(boundary)

    def _tell(self, event: str) -> None:
        for watcher in self._watchers:
            getattr(watcher, event)()


def _trains() -> bool:
    """A forward that a backward is to follow; one that is repeated inside a backward belongs to that."""
    return torch.is_grad_enabled() and not in_backward()


def _nothing() -> None:
    pass
