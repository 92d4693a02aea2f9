"""The memory that a rank will need, from the code that will allocate it.

Units, layouts, padding, stores, gradient buffers, receive buffers and the optimizer's state are made by the engine's
own functions, on the meta device (see `pretend`); a training step is replayed through the engine's own policies of
gathering and reducing, along a `Profile`. So a change of the engine changes its plan, and `Plan.report` is what
`engine.memory_report()` will return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.extras.estimate.pretend import META, PretendedComm, PretendedPlacements
from hf_zero.extras.estimate.profile import Profile
from hf_zero.extras.estimate.replay import Moment, PlannedStep, replay
from hf_zero.extras.estimate.states import PlannedStates
from hf_zero.extras.estimate.tracker import StorageTracker
from hf_zero.extras.estimate.traffic import Pass
from hf_zero.runtime.build import BuiltUnits, make_units
from hf_zero.runtime.memory_report import memory_report
from hf_zero.runtime.unit_specs import BuildSettings, Drafted, UnitSpec, flat_param_specs
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.placement import FlatParamSpec
from hf_zero.sharding.unit import ShardUnit, gather_resident
from hf_zero.storage.memory import MemoryStore

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]

_KINDS = {
    "param": "parameters",
    "row": "parameters",
    "master": "master",
    "exp_avg": "optimizer",
    "exp_avg_sq": "optimizer",
    "grad": "gradients",
    "staged": "staged parameters",
}


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank.

    `device`, `host` and `disk` count by kind what is there at the peak of a step; on the CPU device and host are the
    same memory. `phases` are the peaks of everything in memory (device and host) while the engine is made from a full
    model, in forward and backward, and in the update.
    """

    report: dict[str, int]  # as engine.memory_report()
    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    phases: dict[str, int]
    between: int  # in memory between steps, with what is kept for reuse
    passes: tuple[Pass, ...] = ()  # what the rank gets from others in a step

    @property
    def device_peak(self) -> int:
        return sum(self.device.values())

    @property
    def host_peak(self) -> int:
        return sum(self.host.values())

    @property
    def memory_peak(self) -> int:
        """The peak of device and host together, over all phases."""
        return max(self.phases.values())


def plan_model(
    model: nn.Module,
    config: ResolvedConfig,
    *,
    rank: int = 0,
    on_host: bool = False,
    per_host: int | None = None,
    profile: Profile | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Plan:
    """The plan of `rank` of `config.world_size` ranks that train `model`, which may be on the meta device.

    No process group, no weights; the model is left alone.

    Args:
        on_host: The ranks compute on the CPU.
        per_host: The ranks of each host; None: all are on one.
        profile: Of the micro-batch; without it the plan has no activations, and no order of units to gather along.
        optimizer: Makes the optimizer; None takes the configuration's block, else torch's AdamW.
    """
    comm = PretendedComm(rank, config.world_size, on_host=on_host, per_host=per_host)
    comm.shard_in_groups(config.zero.sharding_group, replicates=config.zero.hybrid_shard)
    settings = BuildSettings.of(config)
    comm.quantize(settings.quantized)
    drafted = flat_param_specs(model, settings, comm)
    return _Planner(config, settings, comm, profile, optimizer).plan(drafted, model.buffers())


def plan_units(
    units: Iterable[ShardUnit],
    config: ResolvedConfig,
    comm: Comm,
    *,
    buffers: Iterable[torch.Tensor],
    optimizer: OptimizerFactory | None,
) -> Plan:
    """The plan of this rank of a live engine: as `plan_model`, from the layouts that its units have.

    Args:
        optimizer: None where the engine does not train.
    """
    pretended = PretendedComm(comm.rank, comm.world_size, on_host=comm.computes_on_host)
    pretended.groups, pretended.routes, pretended.quantizes = comm.groups, comm.routes, comm.quantizes
    drafted = [
        (
            UnitSpec(unit.name, unit.kind, unit.module, tuple(_parameters_of(unit))),
            [FlatParamSpec(flat.layout, flat.dtype, flat.on_demand, flat.scaled) for flat in unit.flats],
        )
        for unit in units
    ]
    settings = BuildSettings.of(config, train=optimizer is not None)
    return _Planner(config, settings, pretended, None, optimizer).plan(drafted, buffers)


def _parameters_of(unit: ShardUnit) -> Iterator[tuple[str, nn.Parameter]]:
    for flat in unit.flats:
        for slot, param in zip(flat.layout.slots, flat.params, strict=True):
            yield slot.name, param


class _Planner:
    """Makes one plan: build, first update, two steps along the profile, another update."""

    def __init__(
        self,
        config: ResolvedConfig,
        settings: BuildSettings,
        comm: PretendedComm,
        profile: Profile | None,
        optimizer: OptimizerFactory | None,
    ) -> None:
        self._config = config
        self._settings = settings
        self._comm = comm
        self._profile = profile
        self._optimizer = optimizer
        self._tracker = StorageTracker()

    def plan(self, drafted: Drafted, buffers: Iterable[torch.Tensor]) -> Plan:
        tracker = self._tracker
        buffer_bytes = sum(buffer.nbytes for buffer in buffers)
        with torch.no_grad():
            built, stand_ins, start = self._build(drafted)
            assert isinstance(built.placements, PretendedPlacements)
            step = PlannedStep(built, self._comm, self._config)
            with tracker:
                states = PlannedStates(self._config, built, stand_ins, self._optimizer, on_host=self._on_host)
                states.update()  # the first one makes the states
                tracker.refresh()
                static = tracker.live
                moment = replay(self._profile, built, step, tracker, self._config)
                before = tracker.live
                tracker.restart_peak()
                states.update()
                update = tracker.restart_peak()
                between = tracker.live
            gather_resident([acc.flat for acc in built.grads])
        flats = [flat for unit in built.units for flat in unit.flats]
        # The first gathers have made the rows that groups share, which are no tensors where they are on a disk.
        static += sum(flat.row_bytes for flat in flats if isinstance(flat.placement.param, MemoryStore))
        report = memory_report(built.units, step.reducer, built.placements, states.state_bytes) | {
            "gathered_peak": step.params.live.peak_bytes,
            "gradients_peak": built.pool.peak_live_bytes,
        }
        lost = int(_FRAGMENTED * (moment.total - static)) if self._on_host else 0
        phases = {"start": start, "forward and backward": moment.total + lost, "update": max(update, before)}
        staging = built.placements.staging_bytes
        phases = {name: peak + buffer_bytes + (staging if name != "start" else 0) for name, peak in phases.items()}
        if self._profile is not None and (inputs := self._profile.inputs) is not None:
            phases["forward and backward"] += inputs.host
        between += buffer_bytes + staging
        return self._by_medium(built, states, report, moment, static, buffer_bytes, phases, between)

    @property
    def _on_host(self) -> bool:
        return self._comm.computes_on_host

    def _build(self, drafted: Drafted) -> tuple[BuiltUnits, dict[int, nn.Parameter], int]:
        """Make units of stand-ins for the model's parameters; return also the peak with the full model beside them."""
        tracker = self._tracker
        stand_ins: dict[int, nn.Parameter] = {}
        specs = []
        for spec, flat_specs in drafted:
            for _, param in spec.params:
                shell = torch.empty(param.shape, dtype=param.dtype, device=META)
                stand_ins[id(param)] = nn.Parameter(shell, requires_grad=param.requires_grad)
            mine = tuple((name, stand_ins[id(param)]) for name, param in spec.params)
            specs.append((dataclasses.replace(spec, params=mine), flat_specs))
        tracker.hold(param.data for param in stand_ins.values())

        def fill(flat: FlatParam) -> None:
            tracker.refresh()  # those before may have been resharded
            flat.initialize_from_params()

        with tracker:
            built = make_units(specs, self._settings, self._comm, fill, PretendedPlacements)
        tracker.refresh()
        return built, stand_ins, tracker.restart_peak()

    def _by_medium(
        self,
        built: BuiltUnits,
        states: PlannedStates,
        report: Mapping[str, int],
        moment: Moment,
        static: int,
        buffer_bytes: int,
        phases: dict[str, int],
        between: int,
    ) -> Plan:
        placements = built.placements
        assert isinstance(placements, PretendedPlacements)
        host = _by_kind(placements.host_usage())
        disk = _by_kind({key: size for store in placements.disks.values() for key, size in store.usage().items()})
        device = {kind: report[kind] - host.get(kind, 0) - disk.get(kind, 0) for kind in _ORDER}
        device["gradients"] = max(device["gradients"], 0) + states.lent_bytes
        device["whole gradients"] = sum(acc.resident_bytes for acc in built.grads)
        device["buffers of the model"] = buffer_bytes
        device["gathered parameters"] = moment.gathered
        device["gradient buffers"] = max(moment.tracked - static, 0)
        device["activations"] = moment.activations
        device["lost to the allocator"] = int(_FRAGMENTED * (moment.total - static)) if self._on_host else 0
        forward = phases["forward and backward"]
        device["update"] = max(phases["update"] - forward, 0)
        if placements.disks:
            host["staging"] = placements.staging_bytes
        if self._profile is not None and (inputs := self._profile.inputs) is not None:
            host["saved inputs"] = inputs.host
        if states.early:
            disk["staged states"] = states.staged_bytes
        return Plan(
            dict(report),
            {kind: size for kind, size in device.items() if size},
            {kind: size for kind, size in host.items() if size},
            {kind: size for kind, size in disk.items() if size},
            phases,
            between,
            tuple(self._comm.traffic.passes),
        )


_ORDER = ("parameters", "master", "optimizer", "gradients")
# On the CPU, of what comes and goes in a step: glibc keeps freed blocks below 32 MB, and does not always find room in
# them for the next ones. scripts/estimate_check.py shows the peak with it.
_FRAGMENTED = 0.2


def _by_kind(usage: Mapping[str, int]) -> dict[str, int]:
    """Bytes under the keys of a store ("LAYOUT/kind" or "LAYOUT/kind/number"), by what they are for."""
    sizes: dict[str, int] = {}
    for key, size in usage.items():
        kind = next(_KINDS[part] for part in reversed(key.split("/")) if part in _KINDS)
        sizes[kind] = sizes.get(kind, 0) + size
    return sizes
