"""The `flops_profiler` block: floating-point operations, parameters and times of one step, module by module.

Operations are counted by torch's FlopCounterMode while a micro-batch of the step runs: matrix products, convolutions
and attention, in forward and in backward, repeated forwards of activation checkpointing too. What torch.compile has
made one kernel of is not seen. Keys and lines are DeepSpeed's, which multiplies the forward for the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_zero.config import FlopsProfilerSection, ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.flops_table import ModuleProfile, StepProfile, text_of
from hf_zero.engine.reports import Event, Watcher
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.errors import ConfigError
from hf_zero.runtime.clocks import Clock, clock_of
from hf_zero.runtime.hooks import in_backward
from hf_zero.runtime.log_lines import log_line
from hf_zero.sharding.unit import ShardUnit


def check_output_file(config: ResolvedConfig, comm: Comm) -> None:
    """Raise ConfigError on every rank if rank 0 could not write where the profile is to go. All ranks must call."""
    section = config.flops_profiler
    if not (section.enabled and section.output_file):
        return
    problem = ""
    if comm.rank == 0:
        try:
            Path(section.output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(section.output_file).open("a", encoding="utf-8").close()
        except OSError as error:
            problem = f"cannot write {section.output_file}: {error.strerror or error}. Set flops_profiler.output_file."
    if problem := comm.all_gather_object(problem, "flops_profiler")[0]:
        raise ConfigError(problem)


class _Totals(FlopCounterMode):
    """Counts from where it begins, which may be inside a forward: modules are told apart by `_ModuleClock`."""

    class _Everything:
        parents = frozenset({"Global"})

        def __enter__(self) -> None: ...

        def __exit__(self, *args: object) -> None: ...

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = self._Everything()  # type: ignore[assignment]


@dataclass
class _Running:
    """A call of a module."""

    module: nn.Module
    flops: int
    start: Any


class _ModuleClock:
    """Operations and time of the forward of each module, what is inside it included."""

    def __init__(self, model: nn.Module, clock: Clock, flops: Callable[[], int]) -> None:
        self._clock = clock
        self._flops = flops
        self._calls: list[_Running] = []
        self._found: dict[nn.Module, list[tuple[int, Any, Any]]] = {}
        self._handles: list[Any] = []
        for module in model.modules():
            if module is not model:  # its forward has begun
                self._handles.append(module.register_forward_pre_hook(self._before))
                self._handles.append(module.register_forward_hook(self._after))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def profile(self, module: nn.Module) -> tuple[int, float]:
        """Operations and milliseconds of all its calls; those of its children where only they are called (a list of
        layers). Waits for the device."""
        calls = self._found.get(module)
        if calls is None:
            inside = [self.profile(child) for child in module.children()]
            return sum(flops for flops, _ in inside), sum(ms for _, ms in inside)
        return sum(flops for flops, _, _ in calls), sum(self._clock.ms(start, end) for _, start, end in calls)

    def _before(self, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self._calls.append(_Running(module, self._flops(), self._clock.mark()))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        while self._calls and self._calls[-1].module is not module:  # left by an error that somebody has caught
            self._calls.pop()
        if self._calls:
            call = self._calls.pop()
            done = (self._flops() - call.flops, call.start, self._clock.mark())
            self._found.setdefault(module, []).append(done)


class FlopsProfiler(Watcher):
    """Counts in the first micro-batch of step `profile_step`, from 0, and shows the profile after the step."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardUnit],
        schedule: StepSchedule,
        config: ResolvedConfig,
        device: torch.device,
    ) -> None:
        self._model = model
        self._units = units
        self._schedule = schedule
        self._config = config
        self._section: FlopsProfilerSection = config.flops_profiler
        self._clock = clock_of(device)
        self._counting = contextlib.ExitStack()
        self._counter: _Totals | None = None  # while it counts
        self._modules: _ModuleClock | None = None
        self._marks: dict[Event, Any] = {}
        self._flops: dict[Event, int] = {}

    def on(self, event: Event) -> None:
        if event is Event.FORWARD_STARTS:
            self._begin()
        elif event in (Event.STEP_STARTS, Event.STEP_ENDS):
            self._stop_counting()
            if self._has_counted:
                self._marks[event] = self._clock.mark()
        elif self._counter is not None and event not in self._marks:
            self._marks[event] = self._clock.mark()
            self._flops[event] = self._counter.get_total_flops()

    def micro_ends(self, boundary: bool) -> None:
        self._stop_counting()
        if boundary and self._has_counted:
            self._show()
            self._forget()

    def close(self) -> None:
        self._stop_counting()
        self._forget()

    @property
    def _has_counted(self) -> bool:
        return Event.BACKWARD_ENDS in self._flops

    def _begin(self) -> None:
        """A forward starts: count it, unless the step is another one, or one of its micro-batches was counted."""
        self._stop_counting()
        if self._schedule.global_steps != self._section.profile_step or self._has_counted:
            return
        self._forget()  # of a micro-batch that was broken off
        self._counter = counter = _Totals()
        self._modules = _ModuleClock(self._model, self._clock, counter.get_total_flops)
        self._counting.enter_context(counter)
        self._marks[Event.FORWARD_STARTS] = self._clock.mark()

    def _stop_counting(self) -> None:
        """Outside of a backward, which would put the mode back that it was begun with."""
        self._counting.close()
        self._counter = None
        if self._modules is not None:
            self._modules.remove()

    def _forget(self) -> None:
        self._modules = None
        self._marks.clear()
        self._flops.clear()

    # ---------------------------------------------------------------- what is shown
    def _show(self) -> None:
        text = text_of(self._step_profile(), self._model, self._module_profiles(), self._section)
        if self._section.output_file:
            with Path(self._section.output_file).open("w", encoding="utf-8") as file:
                file.write(f"{text}\n")
            log_line(
                f"flops_profiler: the profile of step {self._section.profile_step} is in {self._section.output_file}"
            )
        else:
            log_line(f"flops_profiler\n{text}")

    def _step_profile(self) -> StepProfile:
        between = self._seconds_between
        forward = self._flops[Event.FORWARD_ENDS]
        return StepProfile(
            step=self._section.profile_step,
            world_size=self._config.world_size,
            micro_batch=self._config.train_micro_batch_size_per_gpu,
            params=sum(self._numels().values()),
            forward_flops=forward,
            backward_flops=self._flops[Event.BACKWARD_ENDS] - forward,
            forward_s=between(Event.FORWARD_STARTS, Event.FORWARD_ENDS),
            backward_s=between(Event.BACKWARD_STARTS, Event.BACKWARD_ENDS),
            step_s=between(Event.STEP_STARTS, Event.STEP_ENDS),
        )

    def _seconds_between(self, start: Event, end: Event) -> float:
        return self._clock.ms(self._marks[start], self._marks[end]) / 1000.0

    def _numels(self) -> Mapping[nn.Parameter, int]:
        """Elements of the whole parameters, which at stage 3 are placeholders."""
        found: dict[nn.Parameter, int] = {}
        for flat in (flat for unit in self._units for flat in unit.flats):
            found.update(zip(flat.params, (slot.numel for slot in flat.layout.slots), strict=True))
        return {param: found.get(param, param.numel()) for param in self._model.parameters()}

    def _module_profiles(self) -> dict[nn.Module, ModuleProfile]:
        assert self._modules is not None
        numels = self._numels()
        found = {}
        for module in self._model.modules():
            flops, ms = self._modules.profile(module)
            if module is self._model:
                flops = self._flops[Event.FORWARD_ENDS]
                ms = 1000.0 * self._seconds_between(Event.FORWARD_STARTS, Event.FORWARD_ENDS)
            found[module] = ModuleProfile(_sum(numels, module.parameters()), flops, ms / 1000.0)
        return found


def _sum(numels: Mapping[nn.Parameter, int], params: Iterable[nn.Parameter]) -> int:
    return sum(numels[param] for param in params)
