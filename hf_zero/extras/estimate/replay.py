"""Steps of planned units along a profile: what is gathered, and what gradients take, at every moment."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_zero.config import ResolvedConfig
from hf_zero.extras.estimate.pretend import PretendedComm
from hf_zero.extras.estimate.profile import Event, Profile
from hf_zero.extras.estimate.tracker import StorageTracker
from hf_zero.runtime.build import BuiltUnits
from hf_zero.runtime.prefetch import PrefetchLimits
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.runtime.step_events import StepEvents
from hf_zero.runtime.unit_pass import Phase
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.unit import ShardUnit, UnitKind

# Steps to replay. Prefetching follows the order of the pass before the last one. Where nothing is gathered, the second
# step shows what the first one has left.
_STEPS = 3
_STEPS_WITHOUT_GATHERS = 2


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment of a step."""

    tracked: int  # shards, states, gradients and what is kept for reuse
    gathered: int  # unsharded parameters of on-demand units
    activations: int

    @property
    def total(self) -> int:
        return self.tracked + self.gathered + self.activations


class PlannedStep(StepEvents):
    """Parameters and gradients of planned units, and the micro-batch that is replayed on them."""

    def __init__(self, built: BuiltUnits, comm: PretendedComm, config: ResolvedConfig) -> None:
        self.traffic = comm.traffic
        self.is_last = True  # the micro-batch before the update
        self.times = 1  # how many micro-batches are as this one
        on_arrival = not any(unit.on_demand for unit in built.units)
        self.reducer = GradReducer(built.grads, comm, self, overlap=config.zero.overlap_comm, on_arrival=on_arrival)
        self.params = OnDemandParams(built.units, PrefetchLimits.of(config.zero), self, comm.largest)

    def is_boundary(self) -> bool:
        """See StepEvents."""
        return self.is_last

    def unit_left(self, unit: ShardUnit) -> None:
        """See StepEvents."""
        self.reducer.unit_left(unit)


class _Watch:
    """Keeps the moment with the most bytes."""

    def __init__(self, params: OnDemandParams, tracker: StorageTracker) -> None:
        self._params = params
        self._tracker = tracker
        self.most = Moment(tracker.live, params.live.nbytes, 0)

    def computing(self, activations: int) -> None:
        """The model runs between two events."""
        self._see(self._tracker.live, self._params.live.nbytes, activations)

    def handling(self, act: Callable[[], None], activations: int) -> None:
        """The engine acts at an event."""
        before = self._params.live.nbytes
        self._tracker.restart_peak()
        act()
        self._see(self._tracker.restart_peak(), max(before, self._params.live.nbytes), activations)

    def _see(self, tracked: int, gathered: int, activations: int) -> None:
        seen = Moment(tracked, gathered, activations)
        if seen.total > self.most.total:
            self.most = seen


def replay(
    profile: Profile | None,
    built: BuiltUnits,
    step: PlannedStep,
    tracker: StorageTracker,
    config: ResolvedConfig,
) -> Moment:
    """Run a few accumulation windows and return the peak."""
    events = profile.events if profile is not None else tuple(_plain_events(built))
    acting = _Acting(built, step)
    watch = _Watch(step.params, tracker)
    micro_steps = min(config.gradient_accumulation_steps, 3)  # those between the first and the last are alike
    gathers = any(unit.on_demand for unit in built.units)
    for _ in range(_STEPS if gathers else _STEPS_WITHOUT_GATHERS):
        step.traffic.begin_step()
        for number in range(micro_steps):
            step.is_last = number + 1 == micro_steps
            step.times = config.gradient_accumulation_steps - 2 if number == 1 and not step.is_last else 1
            step.traffic.begin("forward", step.times)
            for event in events:
                watch.computing(event.peak)
                watch.handling(functools.partial(acting.do, event), event.live)
        step.traffic.begin("update")
        watch.handling(step.reducer.reduce_remaining, 0)
        step.reducer.clear()
        for acc in built.grads:
            acc.flat.shard_changed()
        step.params.end_step()
    return watch.most


class _Acting:
    """Does what the engine does at an event."""

    def __init__(self, built: BuiltUnits, step: PlannedStep) -> None:
        self._units = {unit.name: unit for unit in built.units if unit.on_demand}
        self._shapes = {slot.name: slot.shape for b in built.grads for slot in b.flat.layout.slots}
        self._places = {
            slot.name: (acc, index) for acc in built.grads for index, slot in enumerate(acc.flat.layout.slots)
        }
        self._step = step

    def do(self, event: Event) -> None:
        if event.call == "begin_backward":
            self._step.traffic.begin("backward", self._step.times)
        if event.call == "gradient":
            self._gradient(event)
        elif event.call == "end_backward":
            self._step.params.end_gathers()
            self._step.reducer.end_backward(boundary=self._step.is_last)
            self._step.params.end_backward()
        elif event.unit:
            unit = self._units.get(event.unit)
            if unit is None:
                return  # never resharded at this stage
            arguments = (unit,) if event.phase is None else (unit, event.phase)
            with torch.enable_grad():
                getattr(self._step.params, event.call)(*arguments)
        elif event.call in ("begin_forward", "end_forward", "begin_backward", "reshard_idle"):
            with torch.enable_grad():
                getattr(self._step.params, event.call)()

    def _gradient(self, event: Event) -> None:
        # Its bytes are among the activations: this one is a name for them.
        shape = self._shapes[event.param]
        grad = torch.empty_strided(shape, [0] * len(shape), dtype=event.dtype, device="meta")
        acc, index = self._places[event.param]
        acc.receive(index, grad)
        if acc.is_complete:
            self._step.reducer.start_complete()


def _plain_events(built: BuiltUnits) -> list[Event]:
    """Return events for a model that was not profiled: every layer once, in order, and back."""
    layers = [unit for unit in built.units if unit.kind is UnitKind.LAYER]
    root = next(unit for unit in built.units if unit.kind is UnitKind.ROOT)
    others = [unit for unit in built.units if unit.kind is UnitKind.PERSISTENT]

    def event(call: str, unit: str = "", phase: Phase | None = None) -> Event:
        return Event(call, unit, phase, "", None, 0, 0)

    def gradients(name: str) -> list[Event]:
        unit = next(unit for unit in built.units if unit.name == name)
        slots = [(slot, b) for b in unit.flats if b.layout.trainable for slot in b.layout.slots]
        return [Event("gradient", "", None, slot.name, b.dtype, 0, 0) for slot, b in slots]

    events = [event("before_use", root.name, Phase.FORWARD), event("begin_forward")]
    for layer in layers:
        events += [event("before_use", layer.name, Phase.FORWARD), event("after_use", layer.name)]
    events += [event("end_forward"), event("reshard_idle"), event("hold", root.name), event("begin_backward")]
    late = [gradients(unit.name) for unit in (root, *others)]
    for mine in late:  # the head's comes first, and with it the memory of the flat parameter; the embedding's last
        events += mine[-1:]
    leaving: list[Event] = []
    for layer in reversed(layers):  # a layer's inputs have their gradients when the one before has been entered
        events += [event("before_use", layer.name, Phase.BACKWARD), *leaving, *gradients(layer.name)]
        leaving = [event("after_use", layer.name)]
    events += leaving
    for mine in late:
        events += mine[:-1]
    return [*events, event("end_backward")]
