"""The `flops_profiler` block: floating-point operations, parameters and times of one step, module by module.

Operations are counted by torch's FlopCounterMode while a micro-batch of the step runs: matrix products, convolutions
and attention, in forward and in backward, repeated forwards of activation checkpointing too. Keys and lines are
DeepSpeed's, which multiplies the forward for the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from hf_zero.config import FlopsProfilerSection, ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.flops_table import ModuleProfile, StepProfile, text_of
from hf_zero.engine.reports import Event, Watcher
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.errors import ConfigError
from hf_zero.runtime.clocks import Stopwatch, clock_of
from hf_zero.runtime.log_lines import log_line
from hf_zero.runtime.module_costs import FlopCounter, ForwardCosts
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


class FlopsProfiler(Watcher):
    """Counts in the first micro-batch of step `profile_step`, from 0, and shows the profile after the step.

    The counter is on inside the model's forward and inside engine.backward only. A mode that stayed on between them
    would be popped in the place of one that the script opened meanwhile, and remain where a pass is broken off.
    """

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
        self._is_over = False
        self._begin()

    def on(self, event: Event) -> None:
        if self._is_over:
            return
        if event is Event.FORWARD_STARTS:
            self._forward_starts()
        elif not self._costs.is_known:
            return
        elif event is Event.BACKWARD_STARTS:
            if self._micro_batches == 0:
                self._backwards += 1
                self._backward_watch.start()
        elif event is Event.BACKWARD_ENDS:
            self._backward_watch.stop()
        elif event is Event.STEP_STARTS:
            self._step_watch.start()
        elif event is Event.STEP_ENDS:
            self._step_watch.stop()

    def backward(self) -> contextlib.AbstractContextManager[None]:
        if self._is_over or not self._costs.is_known or self._micro_batches > 0:
            return contextlib.nullcontext()
        return self._count_backward()

    def micro_ends(self, boundary: bool) -> None:
        if self._is_over or not self._costs.is_known:
            return
        self._micro_batches += 1
        if not boundary:
            self._step_watch.take_ms()  # a call inside the accumulation updates nothing
            return
        self._show()
        self._is_over = True
        self._begin()  # the marks of a device are not kept

    def forget(self) -> None:
        self._costs.stop()
        self._begin()

    def close(self) -> None:
        self.forget()

    def _begin(self) -> None:
        self._costs = ForwardCosts(self._model, self._clock)
        self._backward_watch, self._step_watch = Stopwatch(self._clock), Stopwatch(self._clock)
        self._backward_flops: list[int] = []  # one for each call
        self._backwards = 0  # of that micro-batch
        self._micro_batches = 0  # of the step, that are over

    def _forward_starts(self) -> None:
        steps, wanted = self._schedule.global_steps, self._section.profile_step
        if steps > wanted:
            self._is_over = True
            log_line(f"flops_profiler: no profile, because step {wanted} (profile_step) is over")
        elif steps == wanted and self._backwards == 0:  # all forwards of a backward add up
            self._costs.begin()

    @contextlib.contextmanager
    def _count_backward(self) -> Iterator[None]:
        before = self._backwards
        with FlopCounter() as counter:
            yield
        if self._backwards > before:  # and not that of another engine, which accelerate has as well
            self._backward_flops.append(int(counter.get_total_flops()))

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
        # A backward that the script began itself, which nobody counted, leaves the number unknown.
        is_counted = len(self._backward_flops) == self._backwards
        return StepProfile(
            step=self._section.profile_step,
            world_size=self._config.world_size,
            micro_batch=self._config.train_micro_batch_size_per_gpu,
            micro_batches=self._micro_batches,
            params=sum(self._numels().values()),
            forward_flops=self._costs.flops(self._model),
            backward_flops=sum(self._backward_flops) if is_counted else None,
            forward_s=self._costs.seconds(self._model),
            backward_s=self._backward_watch.read_ms() / 1000.0,
            step_s=self._step_watch.read_ms() / 1000.0,
        )

    def _numels(self) -> Mapping[nn.Parameter, int]:
        """Elements of the whole parameters, which at stage 3 are placeholders."""
        found: dict[nn.Parameter, int] = {}
        for flat in (flat for unit in self._units for flat in unit.flats):
            found.update(zip(flat.params, (slot.numel for slot in flat.layout.slots), strict=True))
        return {param: found.get(param, param.numel()) for param in self._model.parameters()}

    def _module_profiles(self) -> dict[nn.Module, ModuleProfile]:
        numels, costs = self._numels(), self._costs
        return {
            module: ModuleProfile(_sum(numels, module.parameters()), costs.flops(module), costs.seconds(module))
            for module in self._model.modules()
        }


def _sum(numels: Mapping[nn.Parameter, int], params: Iterable[nn.Parameter]) -> int:
    return sum(numels[param] for param in params)
