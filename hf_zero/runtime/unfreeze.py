"""Parameters that are frozen when their units are made and require gradients later: they get masters and gradients.

A frozen flat parameter is split into what stays frozen and what is trained from now on, or goes on as a trained one
where all of it is. Those that are trained already, and their optimizer state, stay as they are. Freezing needs
nothing: a parameter without gradient is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from hf_zero.runtime.backward_watch import in_backward
from hf_zero.runtime.build import BuiltUnits, make_grads
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.step_events import StepEvents
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.placement import FlatParamSpec, Placement
from hf_zero.sharding.sharded_param import asks_nobody
from hf_zero.sharding.unit import ShardUnit


def frozen_parameters(units: Sequence[ShardUnit]) -> list[nn.Parameter]:
    """The parameters that have no masters."""
    return [p for unit in units for flat in unit.flats if not flat.layout.trainable for p in flat.params]


class Unfreeze:
    """Splits frozen flat parameters of one engine's units.

    Args:
        built: What the engine was built from; new accumulators are appended to its list.
    """

    def __init__(self, built: BuiltUnits, params: OnDemandParams, events: StepEvents) -> None:
        self._built = built
        self._params = params
        self._events = events
        self._count = 0
        self._scale = 1.0
        self._frozen = frozen_parameters(built.units) if built.settings.train else []

    @asks_nobody
    def begin_forward(self) -> None:
        """Split what requires gradients by now. All ranks must call, alike."""
        if torch.is_grad_enabled() and not in_backward() and any(param.requires_grad for param in self._frozen):
            added = self.split()
            self._frozen = frozen_parameters(self._built.units)
            self._events.unfrozen(added)

    def use_scale(self, scale: float) -> None:
        """Set what new gradient accumulators multiply with; see GradAccumulator.use_scale."""
        self._scale = scale

    def split(self) -> list[GradAccumulator]:
        """Gradient accumulators for every parameter that requires gradients by now. All ranks must call, alike.

        Raises StateError between forward and backward, and where states are on disk: their staging memory was cut for
        what was trained at first.
        """
        if self._params.awaits_backward:
            raise StateError("parameters cannot begin to require gradients between a forward and its backward")
        found = []
        for unit in self._built.units:
            for flat in list(unit.flats):
                if not flat.layout.trainable and any(param.requires_grad for param in flat.params):
                    found.append(self._split(unit, flat))
        self._built.grads.extend(found)
        return found

    def _split(self, unit: ShardUnit, old: FlatParam) -> GradAccumulator:
        comm = self._built.comm
        self._count += 1
        flat_specs = list(self._flat_specs(unit, old, comm))
        self._built.placements.admit(flat_specs)
        placements = [self._built.placements.placement_of(flat_spec) for flat_spec in flat_specs]
        if len(flat_specs) == 1 and old.can_become(flat_specs[0], old.params, placements[0], comm):
            self._params.reshard(unit)
            old.become(flat_specs[0].layout, placements[0])
            new = [old]
        else:
            with torch.no_grad():
                self._params.unshard(unit, exact=True)
                new = [
                    self._copy(flat_spec, placement, old, comm)
                    for flat_spec, placement in zip(flat_specs, placements, strict=True)
                ]
                unit.replace(old, new)
                self._params.reshard(unit)
            old.discard()
        grads = make_grads(self._built, unit, next(flat for flat in new if flat.layout.trainable))
        grads.use_scale(self._scale)
        return grads

    def _flat_specs(self, unit: ShardUnit, old: FlatParam, comm: Comm) -> Iterator[FlatParamSpec]:
        base = old.layout.name.partition("/frozen")[0]
        for trainable in (True, False):
            members = {
                slot.name: slot.shape
                for slot, param in zip(old.layout.slots, old.params, strict=True)
                if param.requires_grad == trainable
            }
            if members:
                layout = self._built.settings.layout(
                    f"{base}{'' if trainable else '/frozen'}/{self._count}",
                    members,
                    old.dtype,
                    comm,
                    trainable=trainable,
                    world_size=old.layout.world_size,
                )
                yield FlatParamSpec(layout, old.dtype, old.on_demand)

    def _copy(self, flat_spec: FlatParamSpec, placement: Placement, old: FlatParam, comm: Comm) -> FlatParam:
        by_name = {slot.name: param for slot, param in zip(old.layout.slots, old.params, strict=True)}
        members = [by_name[slot.name] for slot in flat_spec.layout.slots]
        with comm.stop_together():
            return FlatParam(flat_spec, members, comm, placement, FlatParam.initialize_from_params)
