"""Plans the units of a model: which flat parameters they will have, of which types and in which buckets. No memory."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.layout import UnitLayout
from hf_zero.runtime.device_types import refuse_missing_types
from hf_zero.runtime.grad_accumulator import GradSettings
from hf_zero.runtime.reduce_op import Reduction
from hf_zero.sharding.partition import UnitKind, UnitSpec, partition
from hf_zero.sharding.placement import FlatParamSpec, OffloadSettings
from hf_zero.sharding.stages import UnitPlan, plan_unit

# Units before memory exists, with the flat parameters that they will have.
Drafted = list[tuple[UnitSpec, list[FlatParamSpec]]]


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The type that a configuration names, such as "bfloat16"."""
    if name is None:
        return None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class BucketSizes:
    """The number of elements of a flat parameter that one collective may move.

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
    """The part of the configuration that decides the shape of units."""

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
            params_offloaded=not self.offload.param.medium.is_device,
            updates_offloaded=not self.offload.optimizer.medium.is_device,
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
        """Lay the parameters of `shapes` out in a flat parameter."""
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


def flat_param_specs(model: nn.Module, settings: BuildSettings, comm: Comm) -> Drafted:
    """Return what the units of `model` will be. No memory, no communication; the model may be on the meta device."""
    on_demand = settings.plan(UnitKind.LAYER, comm.world_size).on_demand
    threshold = settings.persistence_threshold if on_demand else 0
    specs = partition(
        model, persistence_threshold=threshold, model_persistence_threshold=settings.model_persistence_threshold
    )
    dtype_of = _dtype_rule(model, settings)
    return [(spec, _flat_specs(spec, settings, comm, dtype_of)) for spec in specs]


def refuse_types(drafted: Drafted, settings: BuildSettings, device: torch.device) -> None:
    """Raise ConfigError if the device lacks a type of parameters or gradients."""
    grads = settings.grads
    named = {"data_types.grad_accum_dtype": grads.accum_dtype, "communication_data_type": grads.wire_dtype}
    wanted = {dtype: key for key, dtype in named.items() if dtype is not None and settings.train}
    wanted |= {one.dtype: f"the type of {one.layout.slots[0].name}" for _, mine in drafted for one in mine}
    refuse_missing_types(wanted, device)


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
