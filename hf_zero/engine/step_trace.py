"""Records chosen steps of an engine, for `hf-zero profile`: spans in lanes, memory over time, units.

Nothing is in the way before the first chosen step and after the last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.memory_usage import device_memory
from hf_zero.engine.parts import EnginePart
from hf_zero.engine.reports import Event, Watcher
from hf_zero.runtime.backward_watch import in_backward
from hf_zero.runtime.spans import CommSpans, DiskSpans, Replacements, SpanLog, record_copies

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
    """

    def __init__(
        self, engine: ZeroEngine, skip: int, steps: int, on_done: Callable[[ZeroEngine, list[Recorded]], None]
    ) -> None:
        super().__init__(engine)
        self.updates = 0  # that the engine has made
        self._first, self._last = skip, skip + steps - 1
        self._on_done = on_done
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
            self._recording = Recording(self.engine)
        if self._recording is not None:
            self._recording.begin_step()

    def _hook(self) -> None:
        """Learn of a forward before the engine does, which unshards the root unit before it calls `on`."""

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
    """Of one rank, from now on until `close`. Waits for the device at both ends."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._log = SpanLog(engine.device)
        self._open: dict[str, tuple[str, Any]] = {}  # name of a phase -> lane and mark
        self._steps: list[dict[str, float]] = []
        self._step_began: float | None = None
        self._samples: list[dict[str, float]] = []
        self._replaced = Replacements()
        self._comms = CommSpans(engine.comm, self._log, self._sample)
        self._disks = DiskSpans(engine.placements.disks.values(), self._log)
        self._watch()

    def _watch(self) -> None:
        log, replaced, engine = self._log, self._replaced, self._engine

        def then_sample(change: Callable[..., None]) -> Callable[..., None]:
            def changed(*args: Any) -> None:
                change(*args)
                self._sample()

            return changed

        for name in ("add", "remove"):
            replaced.put(engine.params.live, name, then_sample)
        record_copies(engine.placements.copies, log, replaced, engine.device)
        if engine.optimizer is not None:
            replaced.put(engine.optimizer.strategy, "update", self._around_update)
            if (worker := engine.optimizer.update_worker) is not None:
                replaced.put(worker, "submit", self._around_submit)

    def _around_update(self, update: Callable[..., None]) -> Callable[..., None]:
        def logged(*args: Any) -> None:
            with self._log.span("update", "optimizer"):
                update(*args)
            self._sample()

        return logged

    def _around_submit(self, submit: Callable[[Sequence[Any]], None]) -> Callable[[Sequence[Any]], None]:
        def wrapped(jobs: Sequence[Any]) -> None:
            for job in jobs:
                self._time_job(job)
            submit(jobs)

        return wrapped

    def _time_job(self, job: Any) -> None:
        run, log = job.run, self._log

        def timed(look_ahead: Callable[[], None]) -> None:
            begun = log.host_mark()
            try:
                run(look_ahead)
            finally:
                log.add_on_host("update", job.state.flat.layout.name, begun, log.host_mark())

        job.run = timed

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
        """Those of the last step run beside the next forward, and belong to the picture with their transfers."""
        optimizer = self._engine.optimizer
        if optimizer is not None and optimizer.update_worker is not None:
            optimizer.update_worker.wait()

    def forget(self) -> None:
        """A pass was broken off."""
        self._open.clear()

    def close(self) -> None:
        self._comms.close()
        self._disks.close()
        self._replaced.undo()

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
    """What the model is divided into; `kind`: layer, root, persistent; `gathered`: sharded between uses."""
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
