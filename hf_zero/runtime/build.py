"""Makes planned units: memory, the parameters in it, and memory for gradients. unit_specs.py plans them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_zero.distributed.comm import Comm
from hf_zero.distributed.processes import call_site
from hf_zero.errors import ConfigError, DivergenceError
from hf_zero.fp8.linears import convert_linears
from hf_zero.layout import UnitLayout
from hf_zero.native.host_memory import return_freed_memory
from hf_zero.progress import Done, ignore, progress
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.loss_scale import LossScale
from hf_zero.runtime.reduce_schedule import MAX_REDUCES
from hf_zero.runtime.scaled_grads import ScaledGradAccumulator
from hf_zero.runtime.unit_specs import BuildSettings, Drafted, UnitSpec, flat_param_specs, refuse_types
from hf_zero.runtime.unreduced_grads import UnreducedPool
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.param_data import set_data
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.placement import FlatParamSpec, Placement, Placements
from hf_zero.sharding.unit import ShardUnit, UnitKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltUnits:
    """The parts that an engine is built from, which its parameters and gradients share."""

    settings: BuildSettings
    comm: Comm
    placements: Placements
    units: list[ShardUnit]
    pool: UnreducedPool
    loss_scale: LossScale
    # In the order of reduces: the last layer first, root and persistent units last.
    grads: list[GradAccumulator] = field(default_factory=list)


Initialize = Callable[[FlatParam], None]
Reuse = Callable[[FlatParamSpec, list[nn.Parameter], Placement], FlatParam | None]


def build_units(
    model: nn.Module,
    settings: BuildSettings,
    comm: Comm,
    initialize: Initialize = FlatParam.initialize_from_params,
    *,
    reuse: Reuse | None = None,
) -> BuiltUnits:
    """Take the model's parameters over. All ranks must call; rank 0's values win.

    `initialize` gives a flat parameter its first values: from full parameters, unless they are elsewhere. `reuse`
    gives one that is there already, or None.
    Raises ConfigError for parameters that cannot be cut, or of a type that the device lacks, or groups of ranks that
    do not exist, DivergenceError if the ranks built different models, OffloadError where a folder to offload to
    cannot be used.
    """
    if settings.fp8.enabled and settings.train:

        def convert() -> None:  # the names of the layers need not travel
            convert_linears(model, settings.fp8, comm.device)

        comm.agree("FP8 layers", convert, ConfigError)
    comm.shard_in_groups(settings.sharding_group, replicates=settings.hybrid_shard)
    if not comm.quantize(settings.quantized) and settings.quantized and comm.run_rank == 0:
        keys = " and ".join(f"zero_optimization.zero_quantized_{kind}" for kind in settings.quantized)
        logger.warning("%s = true has no effect: no message leaves a host, nor a sharding_group", keys)
    drafted = flat_param_specs(model, settings, comm)
    if not comm.computes_on_host:
        look = functools.partial(refuse_types, drafted, settings, comm.device)
        comm.agree("types of the device", look, ConfigError)
    _tell_lost_strides([spec for spec, _ in drafted], comm)
    _check_equal(comm, [flat_spec.layout for _, mine in drafted for flat_spec in mine])
    total = sum(_shard_bytes(flat_spec) for _, mine in drafted for flat_spec in mine)
    on_disk = settings.offload.param.medium.needs_folder or settings.offload.optimizer.medium.needs_folder
    title = "Writing shards to disk" if on_disk else "Partitioning parameters"
    with progress(title, total, shown=comm.rank == 0) as done:
        built = make_units(drafted, settings, comm, initialize, reuse=reuse, done=done)
    return_freed_memory(total * comm.world_size)  # the whole parameters'
    return built


def _shard_bytes(flat_spec: FlatParamSpec) -> int:
    return flat_spec.layout.shard_numel * flat_spec.dtype.itemsize


def make_units(
    drafted: Drafted,
    settings: BuildSettings,
    comm: Comm,
    initialize: Initialize,
    placements_class: type[Placements] = Placements,
    *,
    reuse: Reuse | None = None,
    done: Done = ignore,
) -> BuiltUnits:
    """The second half of `build_units`: memory, and the parameters in it. `done` is told bytes of shards."""
    placements = placements_class(settings.offload, comm, [flat_spec for _, mine in drafted for flat_spec in mine])
    units: list[ShardUnit] = []
    for spec, mine in drafted:
        params = dict(spec.params)
        flats = []
        for flat_spec in mine:
            members = [params[slot.name] for slot in flat_spec.layout.slots]
            placement = placements.placement_of(flat_spec)
            with comm.stop_together():  # the disk may be full on one rank
                flat = reuse(flat_spec, members, placement) if reuse is not None else None
                if flat is None:
                    flat = FlatParam(flat_spec, members, comm, placement, initialize)
            flats.append(flat)
            done(_shard_bytes(flat_spec))
        unit = ShardUnit(spec.name, spec.kind, spec.module, flats)
        if unit.on_demand:
            unit.reshard()
        units.append(unit)
    # Rank 0 broadcasts without waiting: here it hears of a rank that could not keep its own.
    comm.barrier("all shards")
    pool = UnreducedPool(comm.device, max_kept=MAX_REDUCES if comm.computes_on_host else 0)
    built = BuiltUnits(settings, comm, placements, units, pool, LossScale())
    for unit in _reduce_order(units):
        built.grads.extend(make_grads(built, unit, flat) for flat in unit.flats if flat.layout.trainable)
    return built


def make_grads(built: BuiltUnits, unit: ShardUnit, flat: FlatParam) -> GradAccumulator:
    """The gradient memory of a trainable flat parameter of `unit`."""
    settings = built.settings
    kind = ScaledGradAccumulator if flat.scaled else GradAccumulator
    return kind(
        flat,
        built.comm,
        built.pool,
        settings.grads,
        built.placements.host,
        built.loss_scale,
        unit=unit.name,
        eager=settings.plan(unit.kind, built.comm.world_size).eager,
        reduction=settings.reduction,
        allow_unused=settings.allow_unused,
    )


def _reduce_order(units: list[ShardUnit]) -> Iterable[ShardUnit]:
    """Backward meets the last layer first, and the parts of the root unit and of the persistent one all the time."""
    layers = [unit for unit in units if unit.kind is UnitKind.LAYER]
    others = [unit for unit in units if unit.kind is not UnitKind.LAYER]
    return [*reversed(layers), *others]


def _tell_lost_strides(specs: list[UnitSpec], comm: Comm) -> None:
    """Flat parameters hold elements in logical order: a channels_last weight becomes contiguous, and slower."""
    names = [name for spec in specs for name, param in spec.params if _has_other_strides(param)]
    if names and comm.rank == 0:
        logger.warning("%d parameters lose their memory format (channels_last), first: %s", len(names), names[0])


def _has_other_strides(param: nn.Parameter) -> bool:
    is_placeholder = not any(param.stride())  # of another engine
    return not param.is_contiguous() and not is_placeholder


def _check_equal(comm: Comm, layouts: list[UnitLayout]) -> None:
    """All ranks must cut the same parameters in the same way."""
    mine = [(layout.name, layout.digest()) for layout in layouts]
    everyone = comm.all_gather_object(mine, "layouts")
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        names = sorted({name for name, _ in set(theirs) ^ set(everyone[0])})
        raise DivergenceError(
            f"rank {rank} built another model than rank 0: units {names[:5]} differ in names, shapes, types or "
            "requires_grad.\nBuild the same model on every rank, before hf_zero takes it over, and make this call on "
            f"every rank.\nCalled from: {call_site()}"
        )


def share_the_rest(model: nn.Module, units: Iterable[ShardUnit], comm: Comm) -> None:
    """Buffers, and parameters that no unit holds (integers, one byte), go to the compute device: rank 0's values.

    Parameters of a class of their own (quantized ones) are left to who made them.
    """
    index, shared_params = ParamIndex(units), set[nn.Parameter]()
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None and value.numel():
                module._buffers[name] = _from_rank_0(value, comm, f"buffer {name}")
        for name, param in module._parameters.items():
            is_left = param not in index and param not in shared_params
            if type(param) is nn.Parameter and is_left and param.numel():
                set_data(param, _from_rank_0(param, comm, f"parameter {name}"))
                shared_params.add(param)


def _from_rank_0(value: torch.Tensor, comm: Comm, what: str) -> torch.Tensor:
    # The broadcast takes bytes: gloo does not know every type.
    raw = value.detach().to(comm.device, copy=True).reshape(-1).view(torch.uint8)
    comm.broadcast(raw, what)
    return raw.view(value.dtype).view(value.shape)
