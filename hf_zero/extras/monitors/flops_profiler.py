"""The `flops_profiler` block: floating-point operations, parameters and times of one step, module by module.

Operations are counted by torch's FlopCounterMode while a micro-batch of the step runs: matrix products, convolutions
and attention, in forward and in backward, repeated forwards of activation checkpointing too. DeepSpeed multiplies the
forward for the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.utils.flop_counter import convert_to_percent_str

from hf_zero.config import FlopsProfilerSection
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.engine.reports import Event, Watcher
from hf_zero.errors import ConfigError
from hf_zero.extras.monitors.clocks import Stopwatch, clock_of
from hf_zero.extras.monitors.module_costs import WHOLE, FlopCounter, ForwardCosts
from hf_zero.logs import log_line

_UNKNOWN = "unknown: use engine.backward(loss)"
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


class FlopsPart(EnginePart):
    """Checks before training that rank 0 can write the profile, and gives its engine a FlopsProfiler."""

    engine: ZeroEngine

    def __init__(self, engine: ZeroEngine) -> None:
        super().__init__(engine)
        section, comm = engine.config.flops_profiler, engine.run_comm
        self._is_on = section.enabled and engine.trains
        if not (section.enabled and section.output_file):
            return
        problem = ""
        if comm.rank == 0:
            try:
                Path(section.output_file).parent.mkdir(parents=True, exist_ok=True)
                Path(section.output_file).open("a", encoding="utf-8").close()
            except OSError as error:
                problem = (
                    f"cannot write {section.output_file}: {error.strerror or error}. Set flops_profiler.output_file."
                )
        if problem := comm.all_gather_object(problem, "flops_profiler")[0]:
            raise ConfigError(problem)

    def start(self) -> Sequence[Watcher]:
        return [FlopsProfiler(self.engine)] if self._is_on and self.engine.run_comm.rank == 0 else []


class FlopsProfiler(Watcher):
    """Counts in the first micro-batch of step `profile_step`, from 0, and shows the profile after the step.

    The counter is on inside the model's forward and inside engine.backward only. A mode that stayed on between them
    would be popped instead of one that the script opened meanwhile, and remain where a pass is broken off.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._section: FlopsProfilerSection = engine.config.flops_profiler
        self._clock = clock_of(engine.device)
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
        self._costs = ForwardCosts(self._engine.module, self._clock)
        self._backward_watch, self._step_watch = Stopwatch(self._clock), Stopwatch(self._clock)
        self._backward_flops: list[int] = []  # one for each call
        self._backwards = 0  # of that micro-batch
        self._micro_batches = 0  # of the step, that are over

    def _forward_starts(self) -> None:
        steps, wanted = self._engine.schedule.global_steps, self._section.profile_step
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
        lines = [f"Flops profile of step {self._section.profile_step}, rank 0", *self._summary()]
        lines += _largest(self._costs.flops, self._section.module_depth, self._section.top_modules)
        if self._section.detailed:
            lines += _table(self._costs.flops)
        text = "\n".join(lines)
        if self._section.output_file:
            with Path(self._section.output_file).open("w", encoding="utf-8") as file:
                file.write(f"{text}\n")
            log_line(
                f"flops_profiler: the profile of step {self._section.profile_step} is in {self._section.output_file}"
            )
        else:
            log_line(f"flops_profiler\n{text}")

    def _summary(self) -> Iterator[str]:
        config = self._engine.config
        batch, forward = config.train_micro_batch_size_per_gpu, self._costs.flops[WHOLE]
        # A backward that the script began itself, which nobody counted, leaves the number unknown.
        is_counted = len(self._backward_flops) == self._backwards
        backward = sum(self._backward_flops) if is_counted else None
        both = None if backward is None else forward + backward
        forward_s, backward_s = self._costs.seconds(), self._backward_watch.read_ms() / 1000.0
        step_s = self._step_watch.read_ms() / 1000.0
        # Each micro-batch has its part of the update.
        whole_s = forward_s + backward_s + step_s / self._micro_batches
        share = f" / {self._micro_batches}" if self._micro_batches > 1 else ""
        rows = {
            "world size": config.world_size,
            "batch size per GPU": batch,
            "params per GPU": scaled(self._num_params()),
            "fwd flops per GPU": scaled(forward),
            "bwd flops per GPU": _UNKNOWN if backward is None else scaled(backward),
            "fwd latency": _seconds(forward_s),
            "bwd latency": _seconds(backward_s),
            "step latency": _seconds(step_s),
            f"iter latency = fwd + bwd + step{share}": _seconds(whole_s),
            "FLOPS per GPU = fwd+bwd flops per GPU / iter latency": _UNKNOWN
            if both is None
            else scaled(both / whole_s),
            "samples/second": round(batch * config.world_size / whole_s, 2),
        }
        yield from (f"{name + ':':<56} {value}" for name, value in rows.items())

    def _num_params(self) -> int:
        """Return the elements of the whole parameters, which at stage 3 are placeholders."""
        flats = [flat for unit in self._engine.units for flat in unit.flats]
        whole = {
            param: slot.numel for flat in flats for param, slot in zip(flat.params, flat.layout.slots, strict=True)
        }
        return sum(whole.get(param, param.numel()) for param in self._engine.module.parameters())


def scaled(number: float) -> str:
    """Return a number by powers of 1000, two digits behind the point: "1.5 G"."""
    scale, prefix = next((one for one in _SCALES if number >= one[0]), (1.0, ""))
    return f"{round(number / scale, 2):g} {prefix}".rstrip()


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.2f} us"


def _largest(flops: Mapping[str, int], depth: int, top: int) -> Iterator[str]:
    """Yield the `top` modules with most operations at each depth down to `depth`; -1: at all."""
    levels: dict[int, list[str]] = {}
    for name in sorted(flops.keys() - {WHOLE}, key=lambda name: -flops[name]):
        levels.setdefault(name.count(".") + 1, []).append(name)
    for level, names in sorted(levels.items()):
        if depth < 0 or level <= depth:
            listed = ", ".join(f"{name} {scaled(flops[name])}" for name in names[:top])
            yield f"most fwd flops at depth {level}: {listed}"


def _table(flops: Mapping[str, int]) -> Iterator[str]:
    """Yield a row for every module: its name, the operations in it and their share."""
    yield f"{'module':<56} {'fwd flops':>12} {'share':>8}"
    for name, count in flops.items():
        yield f"{name:<56} {scaled(count):>12} {convert_to_percent_str(count, flops[WHOLE]):>8}"
