"""Makes units out of a model: partition, plan, layout, memory."""

from __future__ import annotations

import fnmatch
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.processes import call_site
from hf_zero.errors import ConfigError, DivergenceError
from hf_zero.layout import UnitLayout
from hf_zero.native.host_memory import return_freed_memory
from hf_zero.progress import Done, ignore, progress
from hf_zero.runtime.device_types import refuse_missing_types
from hf_zero.runtime.grad_accumulator import GradAccumulator, GradSettings
from hf_zero.runtime.loss_scale import LossScale
from hf_zero.runtime.reduce_op import Reduction
from hf_zero.runtime.reduce_schedule import MAX_REDUCES
from hf_zero.runtime.unreduced_grads import UnreducedPool
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.param_data import set_data
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.partition import UnitKind, UnitSpec, partition
from hf_zero.sharding.placement import FlatParamSpec, OffloadSettings, Placement, Placements
from hf_zero.sharding.stages import UnitPlan, keeps_small_parameters_unsharded, plan_unit
from hf_zero.sharding.unit import ShardUnit

logger = logging.getLogger(__name__)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The type that a configuration names, such as "bfloat16"."""
    if name is None:
        return None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class BucketSizes:
    """How many elements of a flat parameter one collective may move.

    [Note: Whole units]
    On gloo large collectives fall out of the cache, and the sizes of the configuration hold. On other backends every
    collective costs a launch and its latency, and one operation per unit is the best there is. There a unit is cut for
    one reason only: a reduce in another type than that of the gradients copies what it moves. "auto" and the default
    do not ask for that to be bounded, a number does. Up to MAX_BUCKETS_IN_FLIGHT buckets are under way at once, so a
    unit with no more of them is whole: its cut would save nothing.

    Args:
        most: The smaller of `reduce_bucket_size` and `allgather_bucket_size`.
        written: `reduce_bucket_size` where it is a number in the file; None for "auto" and the default.
    """

    most: int
    written: int | None

    @classmethod
    def of(cls, config: ResolvedConfig) -> BucketSizes:
        zero = config.zero
        written = zero.reduce_bucket_size if config.is_written("zero_optimization.reduce_bucket_size") else None
        return cls(min(zero.reduce_bucket_size, zero.allgather_bucket_size), written)

    def limit(self, comm: Comm, numel: int, in_flight: int | None) -> int | None:
        """The most for a flat parameter of `numel` elements; None for no limit.

        Args:
            in_flight: Most buckets of its gradient that are reduced at once, see Reduction.buckets_in_flight.
        """
        if comm.max_bucket_numel is not None:
            return min(self.most, comm.max_bucket_numel)
        if self.written is None or in_flight is None or numel <= in_flight * self.written:
            return None
        return self.written


@dataclass(frozen=True)
class BuildSettings:
    """What of the configuration decides the shape of units."""

    stage: int
    buckets: BucketSizes
    persistence_threshold: int
    model_persistence_threshold: int
    cast_to: torch.dtype | None  # bf16.enabled: parameters' type; None keeps the model's own types
    keep_fp32: tuple[str, ...]  # name patterns that a cast leaves in fp32
    train: bool  # parameters that require gradients get masters and gradients
    grads: GradSettings
    reduction: Reduction
    allow_unused: bool  # `ignore_unused_parameters`
    offload: OffloadSettings

    @classmethod
    def of(cls, config: ResolvedConfig, *, train: bool = True) -> BuildSettings:
        zero = config.zero
        return cls(
            stage=config.stage,
            buckets=BucketSizes.of(config),
            persistence_threshold=zero.stage3_param_persistence_threshold,
            model_persistence_threshold=zero.stage3_model_persistence_threshold,
            cast_to=torch_dtype(config.dtype),
            keep_fp32=config.keep_fp32,
            train=train,
            grads=GradSettings(torch_dtype(config.grad_accum_dtype), torch_dtype(config.communication_data_type)),
            reduction=Reduction.of(config),
            allow_unused=zero.ignore_unused_parameters,
            offload=OffloadSettings.of(config),
        )

    def plan(self, kind: UnitKind, world_size: int) -> UnitPlan:
        return plan_unit(
            self.stage,
            kind,
            world_size,
            params_offloaded=self.offload.param.device != "none",
            updates_offloaded=self.offload.optimizer.device != "none",
        )

    def layout(
        self,
        name: str,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        comm: Comm,
        *,
        trainable: bool,
        world_size: int,
    ) -> UnitLayout:
        """Where the parameters of `shapes` lie in a flat parameter."""
        accumulates_in = self.grads.accumulation_dtype(dtype)
        copied = self.reduction.buckets_in_flight(comm, accumulates_in, self.grads.wire_dtype) if trainable else None
        return UnitLayout.build(
            name,
            shapes,
            dtype=str(dtype).removeprefix("torch."),
            trainable=trainable,
            world_size=world_size,
            max_bucket_numel=self.buckets.limit(comm, sum(map(math.prod, shapes.values())), copied),
        )


@dataclass(frozen=True)
class BuiltUnits:
    """What one engine has been built from: the parts that its parameters and gradients share."""

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
# Units before memory exists, with the flat parameters that they will have.
Drafted = list[tuple[UnitSpec, list[FlatParamSpec]]]


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
    Raises ConfigError for parameters that cannot be cut, or of a type that the device lacks, DivergenceError if the
    ranks built different models, OffloadError where a folder to offload to cannot be used.
    """
    drafted = flat_param_specs(model, settings, comm)
    if not comm.computes_on_host:
        look = functools.partial(_refuse_missing_types, drafted, settings, comm.device)
        comm.agree("types of the device", look, ConfigError)
    _tell_lost_strides([spec for spec, _ in drafted], comm)
    _check_equal(comm, [flat_spec.layout for _, mine in drafted for flat_spec in mine])
    total = sum(_shard_bytes(flat_spec) for _, mine in drafted for flat_spec in mine)
    on_disk = "nvme" in (settings.offload.param.device, settings.offload.optimizer.device)
    title = "Writing shards to disk" if on_disk else "Partitioning parameters"
    with progress(title, total, shown=comm.rank == 0) as done:
        built = make_units(drafted, settings, comm, initialize, reuse=reuse, done=done)
    return_freed_memory(total * comm.world_size)  # the whole parameters'
    return built


def _shard_bytes(flat_spec: FlatParamSpec) -> int:
    return flat_spec.layout.shard_numel * flat_spec.dtype.itemsize


def flat_param_specs(model: nn.Module, settings: BuildSettings, comm: Comm) -> Drafted:
    """What the units of `model` will be. No memory, no communication; the model may be on the meta device."""
    if keeps_small_parameters_unsharded(settings.stage) and settings.plan(UnitKind.LAYER, comm.world_size).on_demand:
        threshold = settings.persistence_threshold
    else:
        threshold = 0
    specs = partition(
        model, persistence_threshold=threshold, model_persistence_threshold=settings.model_persistence_threshold
    )
    dtype_of = _dtype_rule(model, settings)
    return [(spec, _flat_specs(spec, settings, comm, dtype_of)) for spec in specs]


def _refuse_missing_types(drafted: Drafted, settings: BuildSettings, device: torch.device) -> None:
    """Raise ConfigError if the device lacks a type of parameters or gradients."""
    grads = settings.grads
    named = {"data_types.grad_accum_dtype": grads.accum_dtype, "communication_data_type": grads.wire_dtype}
    wanted = {dtype: key for key, dtype in named.items() if dtype is not None and settings.train}
    wanted |= {one.dtype: f"the type of {one.layout.slots[0].name}" for _, mine in drafted for one in mine}
    refuse_missing_types(wanted, device)


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
    return GradAccumulator(
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


def _flat_specs(
    spec: UnitSpec, settings: BuildSettings, comm: Comm, dtype_of: Callable[[str, nn.Parameter], torch.dtype]
) -> list[FlatParamSpec]:
    """One flat parameter per type and trainability."""
    plan = settings.plan(spec.kind, comm.world_size)
    groups: dict[tuple[torch.dtype, bool], dict[str, tuple[int, ...]]] = {}
    for name, param in spec.params:
        trainable = param.requires_grad and settings.train
        groups.setdefault((dtype_of(name, param), trainable), {})[name] = tuple(param.shape)
    world_size = comm.world_size if plan.sharded else 1
    flat_specs = []
    for (dtype, trainable), shapes in groups.items():
        name = f"{spec.name}/{str(dtype).removeprefix('torch.')}{'' if trainable else '/frozen'}"
        layout = settings.layout(name, shapes, dtype, comm, trainable=trainable, world_size=world_size)
        flat_specs.append(FlatParamSpec(layout, dtype, plan.on_demand))
    return flat_specs


def _dtype_rule(model: nn.Module, settings: BuildSettings) -> Callable[[str, nn.Parameter], torch.dtype]:
    """The type of each parameter: cast unless a pattern, or the model itself, keeps it in fp32."""
    own: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):  # transformers' convention
        for module in model.modules():
            own.update(getattr(module, attribute, None) or ())
    # Parts of names: "wo", but "mlp.gate.weight" and "embed.*.norm" too.
    kept_parts = [f"*.{part}.*" for part in own]
    # Buffers are never cast, and a batch norm wants its weights in the type of its running statistics.
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    with_statistics = {id(param) for module in norms for param in module.parameters(recurse=False)}

    def rule(name: str, param: nn.Parameter) -> torch.dtype:
        if settings.cast_to is None:
            return param.dtype
        kept = id(param) in with_statistics or any(fnmatch.fnmatch(f".{name}.", part) for part in kept_parts)
        if kept or any(fnmatch.fnmatch(name, pattern) for pattern in settings.keep_fp32):
            return torch.float32
        return settings.cast_to

    return rule


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
    # As bytes: gloo does not know every type.
    raw = value.detach().to(comm.device, copy=True).reshape(-1).view(torch.uint8)
    comm.broadcast(raw, what)
    return raw.view(value.dtype).view(value.shape)
