"""Plans the units of a model: which parameters form one, what the stage makes of it, its flat parameters. No memory.

A unit is a module whose forward runs: its parameters are unsharded before and resharded after. Decoder layers, by the
model's own `_no_split_modules`; for any other module, a size rule. What is in no layer forms the root unit.

[Note: Stages]
ZeRO (Rajbhandari et al., 2020) is three independent choices, and a stage is one row of them:

| stage | parameters | gradients | after the step |
|---|---|---|---|
| 0 | resident, replicated | all-reduce at the boundary | nothing |
| 1 | resident | unsharded across micro-steps, reduce-scatter at the boundary | all-gather |
| 2 | resident | reduce-scatter in every backward, accumulate in the shard | all-gather |
| 3 | on demand | as stage 2 | nothing: the shard is the parameter |

An optimizer that exchanges something smaller than gradients (OneBitAdam, stage 0) may turn the all-reduce of stage 0
off while it trains: GradAccumulator.stay_local.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.config.resolved import Fp8Section
from hf_zero.distributed.comm import Comm, Quantized
from hf_zero.fp8.linears import fp8_weights
from hf_zero.layout import UnitLayout
from hf_zero.runtime.device_types import refuse_missing_types
from hf_zero.runtime.grad_accumulator import GradSettings
from hf_zero.runtime.reduce_op import Reduction
from hf_zero.sharding.model_params import clean_name, named_parameters
from hf_zero.sharding.placement import FlatParamSpec, OffloadSettings
from hf_zero.sharding.unit import UnitKind

# The size rule: a module whose own parameters (units below it not counted) reach this share of the model is a unit.
# The layers of a deeper stack are smaller than that, so it is lowered while some unit would take together more than
# _MAX_TOGETHER of the model from modules below it: a unit is gathered as a whole.
_MIN_UNIT_SHARE = 1 / 32
_MAX_TOGETHER = 1 / 4
_LOWER = 0.9  # at least so much at a time
_MIN_UNIT_NUMEL = 1 << 14
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class UnitSpec:
    """A unit before memory exists: its name, the module around whose forward it is unsharded, and its parameters."""

    name: str
    kind: UnitKind
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]


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
class UnitPlan:
    """The policy of one unit."""

    on_demand: bool  # parameters are unsharded around their use only
    sharded: bool  # each rank owns a shard of parameters' masters, gradients and optimizer states
    eager: bool  # gradients are reduced in every backward, not only at the boundary


_STAGES = {  # [Note: Stages]
    0: UnitPlan(on_demand=False, sharded=False, eager=False),
    1: UnitPlan(on_demand=False, sharded=True, eager=False),
    2: UnitPlan(on_demand=False, sharded=True, eager=True),
    3: UnitPlan(on_demand=True, sharded=True, eager=True),
}


@dataclass(frozen=True)
class BuildSettings:
    """The part of the configuration that decides the shape of units."""

    stage: int
    sharding_group: str | int
    hybrid_shard: bool
    quantized: tuple[Quantized, ...]
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
    fp8: Fp8Section

    @classmethod
    def of(cls, config: ResolvedConfig, *, train: bool = True) -> BuildSettings:
        zero = config.zero
        return cls(
            stage=config.stage,
            sharding_group=zero.sharding_group,
            hybrid_shard=zero.hybrid_shard,
            quantized=(
                *(("weights",) if zero.zero_quantized_weights else ()),
                *(("gradients",) if zero.zero_quantized_gradients else ()),
            ),
            buckets=BucketSizes.of(config),
            persistence_threshold=zero.stage3_param_persistence_threshold,
            model_persistence_threshold=zero.stage3_model_persistence_threshold,
            cast_to=torch_dtype(config.dtype),
            keep_fp32=config.keep_fp32,
            train=train,
            grads=GradSettings(
                torch_dtype(config.grad_accum_dtype), torch_dtype(config.communication_data_type), config.bf16_masters
            ),
            reduction=Reduction.of(config),
            allow_unused=zero.ignore_unused_parameters,
            offload=OffloadSettings.of(config),
            fp8=config.fp8,
        )

    def plan(self, kind: UnitKind, world_size: int) -> UnitPlan:
        """Return the row of the stage. Persistent units stay unsharded as at stage 2.

        In a world of one there is nothing to gather and nothing to reduce: parameters stay unsharded, and gradients
        accumulate where the update reads them, as at stage 1. Not where they go to another medium than device memory.
        """
        stage, alone = self.stage, world_size == 1
        if stage == 3 and (kind is UnitKind.PERSISTENT or (alone and self.offload.param.medium.is_device)):
            stage = 2
        if stage == 2 and alone and self.offload.optimizer.medium.is_device:
            stage = 1
        return _STAGES[stage]

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
    scaled = fp8_weights(model, settings.fp8) if settings.train else frozenset()
    return [(spec, _flat_specs(spec, settings, comm, dtype_of, scaled)) for spec in specs]


def refuse_types(drafted: Drafted, settings: BuildSettings, device: torch.device) -> None:
    """Raise ConfigError if the device lacks a type of parameters or gradients."""
    grads = settings.grads
    named = {"data_types.grad_accum_dtype": grads.accum_dtype, "communication_data_type": grads.wire_dtype}
    wanted = {dtype: key for key, dtype in named.items() if dtype is not None and settings.train}
    wanted |= {one.dtype: f"the type of {one.layout.slots[0].name}" for _, mine in drafted for one in mine}
    refuse_missing_types(wanted, device)


def _flat_specs(
    spec: UnitSpec,
    settings: BuildSettings,
    comm: Comm,
    dtype_of: Callable[[str, nn.Parameter], torch.dtype],
    scaled_weights: Collection[torch.Tensor],
) -> list[FlatParamSpec]:
    """One flat parameter per type and trainability, and of `scaled_weights`, which have 8-bit gradients, another."""
    plan = settings.plan(spec.kind, comm.world_size)
    groups: dict[tuple[torch.dtype, bool, bool], dict[str, tuple[int, ...]]] = {}
    for name, param in spec.params:
        trainable = param.requires_grad and settings.train
        key = dtype_of(name, param), trainable, trainable and param in scaled_weights
        groups.setdefault(key, {})[name] = tuple(param.shape)
    world_size = comm.num_shards if plan.sharded else 1
    flat_specs = []
    for (dtype, trainable, scaled), shapes in groups.items():
        name = f"{spec.name}/{str(dtype).removeprefix('torch.')}{'' if trainable else '/frozen'}"
        name += "/scaled" if scaled else ""
        layout = settings.layout(name, shapes, dtype, comm, trainable=trainable, world_size=world_size)
        flat_specs.append(FlatParamSpec(layout, dtype, plan.on_demand, scaled))
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


# ---------------------------------------------------------------- which parameters form a unit
def partition(
    model: nn.Module, *, persistence_threshold: int = 0, model_persistence_threshold: int | None = None
) -> list[UnitSpec]:
    """The units of `model`: layers in registration order, the root unit (perhaps empty), the persistent one if any.

    Args:
        persistence_threshold: Parameters of at most this many elements stay unsharded
            (`stage3_param_persistence_threshold`).
        model_persistence_threshold: Most elements that stay unsharded in all (`stage3_model_persistence_threshold`).
    """
    unit_paths = _unit_paths(model)
    owners = _owners(model, unit_paths)
    kept_whole = persistent_parameters(model, persistence_threshold, model_persistence_threshold)
    persistent = {id(param) for param in kept_whole.values()}
    grouped: dict[str, list[tuple[str, nn.Parameter]]] = {path: [] for path in unit_paths}
    root: list[tuple[str, nn.Parameter]] = []
    kept: list[tuple[str, nn.Parameter]] = []
    for name, param in named_parameters(model):
        if id(param) in persistent:
            kept.append((name, param))
        else:
            grouped.get(owners[id(param)], root).append((name, param))
    modules = dict(model.named_modules(remove_duplicate=False))
    specs = [
        UnitSpec(clean_name(path), UnitKind.LAYER, modules[path], tuple(params))
        for path, params in grouped.items()
        if params
    ]
    specs.append(UnitSpec("root", UnitKind.ROOT, model, tuple(root)))
    if kept:
        specs.append(UnitSpec("persistent", UnitKind.PERSISTENT, model, tuple(kept)))
    return specs


def persistent_parameters(model: nn.Module, threshold: int, total: int | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters of at most `threshold` elements, while their sum is within `total`. Works on meta too."""
    chosen: dict[str, nn.Parameter] = {}
    used = 0
    for name, param in named_parameters(model):
        if param.numel() <= threshold and (total is None or used + param.numel() <= total):
            chosen[name] = param
            used += param.numel()
    return chosen


def _unit_paths(model: nn.Module) -> list[str]:
    """Return the paths of the modules that become layer units, in registration order."""
    names = no_split_classes(model)
    paths: list[str] = []
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        inside = any(path.startswith(outer + ".") for outer in paths)
        if path and not inside and id(module) not in seen and _class_name(module) in names:
            paths.append(path)
            seen.add(id(module))
    return paths or _by_size(model)


def no_split_classes(model: nn.Module) -> set[str]:
    """Class names in the `_no_split_modules` of the model or of anything inside it (transformers' convention)."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def _class_name(module: nn.Module) -> str:
    return type(getattr(module, "_orig_mod", module)).__name__


def _by_size(model: nn.Module) -> list[str]:
    """Return the paths of the units by the size rule, in registration order."""
    total = sum(param.numel() for param in model.parameters())
    enough = max(int(total * _MIN_UNIT_SHARE), _MIN_UNIT_NUMEL)
    found = _at_least(model, enough)
    while found.together > total * _MAX_TOGETHER and found.next_size >= _MIN_UNIT_NUMEL:
        # Not size by size where all of many modules have their own.
        enough = max(min(found.next_size, int(enough * _LOWER)), _MIN_UNIT_NUMEL)
        found = _at_least(model, enough)
    return [path for path, _ in model.named_modules() if path in found.paths]


@dataclass
class _BySize:
    """The units of at least a size."""

    paths: set[str]
    together: int = 0  # the most elements that one of them, or the root unit, has of modules below it
    next_size: int = 0  # of the largest modules that are too small


def _at_least(model: nn.Module, enough: int) -> _BySize:
    """Post-order: a module becomes a unit once the parameters under it, without those of units below, are enough."""
    found = _BySize(set())
    seen: set[int] = set()

    def visit(path: str, module: nn.Module, parent: nn.Module | None) -> int:
        if id(module) in seen:
            return 0
        seen.add(id(module))
        below = 0
        for name, child in module.named_children():
            below += visit(f"{path}.{name}" if path else name, child, module)
        left = below + sum(param.numel() for param in module.parameters(recurse=False))
        runs = _forward_runs(path, module, parent)
        if runs and (not path or left >= enough):
            found.paths.add(path)
            found.together = max(found.together, below)
            return 0
        if runs:
            found.next_size = max(found.next_size, left)
        return left

    visit("", model, None)
    found.paths.discard("")  # the root unit
    return found


def _forward_runs(path: str, module: nn.Module, parent: nn.Module | None) -> bool:
    """Whether calling the model calls this module: not containers, nor the inside of MultiheadAttention."""
    if isinstance(parent, nn.MultiheadAttention) or ".parametrizations" in f".{path}":
        return False
    return parent is None or not isinstance(module, _CONTAINERS)


def _owners(model: nn.Module, unit_paths: list[str]) -> dict[int, str]:
    """id(parameter) -> path of its unit, "" for the root.

    A parameter that several units reach belongs to the innermost unit that holds all its places, else to the root.
    """
    owners: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for param in module.parameters(recurse=False):
            here = _innermost(path, unit_paths)
            known = owners.setdefault(id(param), here)
            while known and here != known and not here.startswith(known + "."):
                known = _innermost(known.rpartition(".")[0], unit_paths)
            owners[id(param)] = known
    return owners


def _innermost(path: str, unit_paths: list[str]) -> str:
    best = ""
    for unit in unit_paths:
        if (path == unit or path.startswith(unit + ".")) and len(unit) > len(best):
            best = unit
    return best
