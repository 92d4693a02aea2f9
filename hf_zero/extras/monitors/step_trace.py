"""Records chosen steps of an engine, for `hf-zero profile`: spans in lanes, memory over time, units.

Nothing is in the way before the first chosen step and after the last one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.engine.reports import Event, Watcher
from hf_zero.extras.monitors.memory_usage import device_memory
from hf_zero.extras.monitors.spans import CommSpans, CopySpans, DiskSpans, SpanLog
from hf_zero.runtime.backward_watch import in_backward
from hf_zero.storage.disk import DiskStore

# The phases of a micro-batch, by the events that start and end them: lane and name.
_STARTS = {
    Event.FORWARD_STARTS: ("forward", "forward"),
    Event.BACKWARD_STARTS: ("backward", "backward"),
    Event.REDUCE_STARTS: ("backward", "last reduces"),
    Event.STEP_STARTS: ("step", "step"),
}
_ENDS = {
    Event.FORWARD_ENDS: "forward",
    Event.REDUCE_STARTS: "backward",
    Event.BACKWARD_ENDS: "last reduces",
    Event.STEP_ENDS: "step",
}
Recorded = dict[str, Any]  # see StepTrace._recorded


class StepTrace(EnginePart, Watcher):
    """Steps `skip` to `skip + steps` of one engine, from 0 at its first one in this process.

    Args:
        on_done: Called on every rank, once, with what each rank has recorded, in rank order.
        trace: The file for this rank's trace of torch.profiler; None records none.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        skip: int,
        steps: int,
        on_done: Callable[[ZeroEngine, list[Recorded]], None],
        trace: Path | None = None,
    ) -> None:
        super().__init__(engine)
        self.updates = 0  # that the engine has made
        self._first, self._last = skip, skip + steps - 1
        self._on_done = on_done
        self.trace = trace
        if trace is not None and not torch._C._autograd._profiler_enabled():
            with torch.profiler.profile():  # the first one in a process loads modules, for seconds
                pass
        self._recording: Recording | None = None
        self._unhook: Callable[[], None] = lambda: None

    def start(self) -> Sequence[Watcher]:
        return [self] if self.engine.trains else []

    def on(self, event: Event) -> None:
        if event is Event.FORWARD_STARTS:
            self._forward_starts()
        if self._recording is not None:
            self._recording.on(event)

    def _forward_starts(self) -> None:
        if self._recording is None and self._first <= self.updates <= self._last:
            self._recording = Recording(self.engine, self.trace)
        if self._recording is not None:
            self._recording.begin_step()

    def _hook(self) -> None:
        """Put a hook on the model ahead of the engine's, which unshards the root unit before it calls `on`."""

        def before(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled() and not in_backward():
                self._forward_starts()

        handle = self.engine.module.register_forward_pre_hook(torch.compiler.disable(before), prepend=True)
        self._unhook = handle.remove

    def micro_ends(self, boundary: bool) -> None:
        if not boundary:
            return
        step, self.updates = self.updates, self.updates + 1
        if self.updates == self._first:
            self._hook()
        if self._recording is None:
            return
        self._recording.end_step(step)
        if step == self._last:
            recording = self._recording
            recording.wait_for_updates()
            self.close()
            everyone = self.engine.run_comm.all_gather_object(recording.result(), "profile of steps")
            self._on_done(self.engine, everyone)

    def forget(self) -> None:
        if self._recording is not None:
            self._recording.forget()

    def close(self) -> None:
        self._unhook()
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()


class Recording:
    """Records one rank, from now on until `close`. Waits for the device at both ends.

    Args:
        trace: The file for torch.profiler's own trace; None leaves that profiler off.
    """

    def __init__(self, engine: ZeroEngine, trace: Path | None) -> None:
        self._engine = engine
        self._trace = trace
        # A script may have a profiler of its own, and a process has one at a time.
        is_free = trace is not None and not torch._C._autograd._profiler_enabled()
        self._profiler = torch.profiler.profile() if is_free else None
        if self._profiler is not None:
            self._profiler.start()
        self._log = SpanLog(engine.device)
        self._open: dict[str, tuple[str, Any]] = {}  # name of a phase -> lane and mark
        self._steps: list[dict[str, float]] = []
        self._step_began: float | None = None
        self._update_began: Any = None
        self._samples: list[dict[str, float]] = []
        self._ends = contextlib.ExitStack()
        self._watch()

    def _watch(self) -> None:
        engine, log = self._engine, self._log
        self._observe(engine.params.live.observers, self._sample)
        if engine.optimizer is not None:
            if (worker := engine.optimizer.update_worker) is not None:
                self._observe(worker.observers, self._job_ended)
            optimizer = engine.optimizer.optimizer
            self._ends.callback(optimizer.register_step_pre_hook(self._update_starts).remove)
            self._ends.callback(optimizer.register_step_post_hook(self._update_ends).remove)
        for spans in (
            CopySpans(engine.placements.copies, log, engine.device),
            DiskSpans(cast(Iterable[DiskStore], engine.placements.disks.values()), log),
            CommSpans(engine.comm, log, self._sample),
        ):
            self._ends.callback(spans.close)

    def _observe(self, observers: list[Any], call: Callable[..., None]) -> None:
        observers.append(call)
        self._ends.callback(observers.remove, call)

    def _update_starts(self, *hooked: Any) -> None:
        self._update_began = self._log.mark()

    def _update_ends(self, *hooked: Any) -> None:
        self._log.add("update", "optimizer", self._update_began, self._log.mark())
        self._sample()

    def _job_ended(self, job: Any, begun: float) -> None:
        self._log.add_on_host("update", job.state.flat.layout.name, begun, self._log.host_mark())

    # ---------------------------------------------------------------- as the engine goes on
    def on(self, event: Event) -> None:
        if event in _ENDS and _ENDS[event] in self._open:
            name = _ENDS[event]
            lane, begun = self._open.pop(name)
            self._log.add(lane, name, begun, self._log.mark())
        if event in _STARTS:
            lane, name = _STARTS[event]
            self._open[name] = lane, self._log.mark()
        self._sample()

    def begin_step(self) -> None:
        """A forward starts; only the first of a step counts."""
        if self._step_began is None:
            self._step_began = self._log.host_ms()
            self._sample()

    def end_step(self, step: int) -> None:
        assert self._step_began is not None
        self._steps.append({"step": step, "start_ms": self._step_began, "end_ms": self._log.host_ms()})
        self._step_began = None

    def wait_for_updates(self) -> None:
        """Wait for the updates of the last step: they run beside the next forward, and belong to the picture."""
        optimizer = self._engine.optimizer
        if optimizer is not None and optimizer.update_worker is not None:
            optimizer.update_worker.wait()

    def forget(self) -> None:
        """A pass was broken off."""
        self._open.clear()

    def close(self) -> None:
        self._ends.close()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._trace))

    def _sample(self) -> None:
        engine = self._engine
        self._samples.append(
            {
                "at_ms": round(self._log.host_ms(), 4),
                "gathered": engine.params.live.nbytes,
                "gradients": engine.pool.live_bytes,
                "allocated": device_memory().allocated,
            }
        )

    def result(self) -> Recorded:
        """Times in milliseconds since `began_at` (of the host's clock, seconds since 1970), sizes in bytes."""
        spans = [dataclasses.asdict(span) for span in self._log.spans()]
        for span in spans:
            span["start_ms"], span["ms"] = round(span["start_ms"], 4), round(span["ms"], 4)
        return {
            "rank": self._engine.run_comm.rank,
            "began_at": self._log.began_at,
            "steps": self._steps,
            "spans": spans,
            "samples": self._samples,
            "memory": self._engine.memory_report(),
        }


def units_of(engine: ZeroEngine) -> list[dict[str, Any]]:
    """Return the units of the model; `kind`: layer, root, persistent; `gathered`: sharded between uses."""
    return [
        {
            "name": unit.name,
            "kind": unit.kind.value,
            "gathered": unit.on_demand,
            "numel": sum(flat.layout.numel for flat in unit.flats),
            "padded_numel": unit.numel,
            "bytes": unit.full_bytes,
            "parameters": [
                {
                    "name": slot.name,
                    "numel": slot.numel,
                    "shape": list(param.shape),
                    "trainable": flat.layout.trainable,
                }
                for flat in unit.flats
                for slot, param in zip(flat.layout.slots, flat.params, strict=True)
            ],
        }
        for unit in engine.units
    ]
