"""Makes units out of a model: partition, plan, layout, memory."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.comm import Comm
from hf_zero.errors import DivergenceError
from hf_zero.layout import UnitLayout
from hf_zero.runtime.grads import GradBuffer, GradSettings, MemoryPool
from hf_zero.runtime.plan import UnitPlan, keeps_small_parameters_whole, plan_unit
from hf_zero.shard.buffer import FlatBuffer
from hf_zero.shard.partition import UnitSpec, partition
from hf_zero.shard.unit import ShardUnit
from hf_zero.store.base import ShardStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildSettings:
    """What of the configuration decides the shape of units."""

    stage: int
    bucket_numel: int
    persistence_threshold: int
    model_persistence_threshold: int
    cast_to: torch.dtype | None  # bf16.enabled: parameters' type; None keeps the model's own types
    keep_fp32: tuple[str, ...]  # name patterns that a cast leaves in fp32
    grads: GradSettings


@dataclass(frozen=True)
class BuiltUnits:
    units: list[ShardUnit]
    grads: list[GradBuffer]  # in the order of reduces: the last layer first, root and persistent units last
    pool: MemoryPool


def build_units(model: nn.Module, settings: BuildSettings, comm: Comm, store: ShardStore) -> BuiltUnits:
    """Take the model's parameters over. All ranks must call; rank 0's values win.

    Raises ConfigError for parameters that cannot be cut, DivergenceError if the ranks built different models.
    """
    if keeps_small_parameters_whole(settings.stage) and comm.world_size > 1:
        threshold = settings.persistence_threshold
    else:
        threshold = 0
    specs = partition(
        model, persistence_threshold=threshold, model_persistence_threshold=settings.model_persistence_threshold
    )
    _tell_lost_strides(specs, comm)
    dtype_of = _dtype_rule(model, settings)
    drafts = [(spec, _layouts(spec, settings, comm, dtype_of)) for spec in specs]
    _check_equal(comm, [layout for _, layouts in drafts for layout in layouts])
    units: list[ShardUnit] = []
    eager: dict[int, bool] = {}
    for spec, layouts in drafts:
        plan = plan_unit(settings.stage, spec.kind, comm.world_size)
        params = dict(spec.params)
        buffers = []
        for layout, dtype in layouts.items():
            members = [params[slot.name] for slot in layout.slots]
            buffers.append(FlatBuffer(layout, members, comm, store, on_demand=plan.on_demand, dtype=dtype))
            eager[id(buffers[-1])] = plan.eager
        unit = ShardUnit(spec.name, spec.kind, spec.module, buffers)
        if unit.on_demand:
            unit.release()
        units.append(unit)
    _share_buffers(model, comm)
    pool = MemoryPool(comm.device)
    flats = [flat for unit in _reduce_order(units) for flat in unit.buffers if flat.layout.trainable]
    grads = [GradBuffer(flat, comm, pool, settings.grads, eager=eager[id(flat)]) for flat in flats]
    return BuiltUnits(units, grads, pool)


def _reduce_order(units: list[ShardUnit]) -> Iterable[ShardUnit]:
    """Backward meets the last layer first, and the parts of the root unit and of the persistent one all the time."""
    layers = [unit for unit in units if unit.kind.value == "layer"]
    others = [unit for unit in units if unit.kind.value != "layer"]
    return [*reversed(layers), *others]


def _layouts(
    spec: UnitSpec, settings: BuildSettings, comm: Comm, dtype_of: Callable[[str, nn.Parameter], torch.dtype]
) -> dict[UnitLayout, torch.dtype]:
    """One layout per type and trainability."""
    plan: UnitPlan = plan_unit(settings.stage, spec.kind, comm.world_size)
    groups: dict[tuple[torch.dtype, bool], dict[str, tuple[int, ...]]] = {}
    for name, param in spec.params:
        groups.setdefault((dtype_of(name, param), param.requires_grad), {})[name] = tuple(param.shape)
    limit = min(settings.bucket_numel, comm.max_bucket_numel or settings.bucket_numel)
    layouts = {}
    for (dtype, trainable), shapes in groups.items():
        kind = str(dtype).removeprefix("torch.")
        layout = UnitLayout.build(
            f"{spec.name}/{kind}{'' if trainable else '/frozen'}",
            shapes,
            dtype=kind,
            trainable=trainable,
            world_size=comm.world_size if plan.sharded else 1,
            max_bucket_numel=limit,
        )
        layouts[layout] = dtype
    return layouts


def _dtype_rule(model: nn.Module, settings: BuildSettings) -> Callable[[str, nn.Parameter], torch.dtype]:
    """The type of each parameter: cast unless a pattern, or the model itself, keeps it in fp32."""
    own: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):  # transformers' convention
        for module in model.modules():
            own.update(getattr(module, attribute, None) or ())
    # Buffers are never cast, and a batch norm wants its weights in the type of its running statistics.
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    with_statistics = {id(param) for module in norms for param in module.parameters(recurse=False)}

    def rule(name: str, param: nn.Parameter) -> torch.dtype:
        if settings.cast_to is None:
            return param.dtype
        kept = id(param) in with_statistics or any(part in own for part in name.split("."))
        if kept or any(fnmatch.fnmatch(name, pattern) for pattern in settings.keep_fp32):
            return torch.float32
        return settings.cast_to

    return rule


def _tell_lost_strides(specs: list[UnitSpec], comm: Comm) -> None:
    """Flat buffers hold elements in logical order; a channels_last weight becomes contiguous, which is only slower."""
    names = [name for spec in specs for name, param in spec.params if not param.is_contiguous()]
    if names and comm.rank == 0:
        logger.warning("%d parameters lose their memory format (channels_last), first: %s", len(names), names[0])


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
            "requires_grad.\nBuild the same model on every rank, before hf_zero takes it over."
        )


def _share_buffers(model: nn.Module, comm: Comm) -> None:
    """Buffers go to the compute device, with rank 0's values."""
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is None or not value.numel():
                continue
            # As bytes: gloo does not know every type.
            raw = value.detach().to(comm.device, copy=True).reshape(-1).view(torch.uint8)
            comm.broadcast(raw, f"buffer {name}")
            module._buffers[name] = raw.view(value.dtype).view(value.shape)
