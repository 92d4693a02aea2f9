"""The resolved configuration: what the engine reads. Plain frozen data without "auto"; every value has an origin."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar, cast

from hf_zero.config import batch as batch_sizes
from hf_zero.config.precision import Precision
from hf_zero.config.problems import show
from hf_zero.config.schema import AUTO

_Section = TypeVar("_Section")

# Origins of values. AUTO_* were "auto" in the file.
FILE = "file"
DEFAULT = "default"
ARGUMENTS = "TrainingArguments"
INFERRED = "inferred"  # from the other batch numbers
AUTO_FILLED = "auto"
AUTO_PARAMETERS = "auto (from parameters)"
AUTO_DEFAULT = "auto (default)"
AUTO_CLIPPING = "auto (accelerate's value: no max_grad_norm is given)"
BELOW_STAGE_3 = "no effect below stage 3"


@dataclass(frozen=True)
class OffloadParam:
    """zero_optimization.offload_param."""

    device: str = "none"  # none, cpu or nvme
    nvme_path: str | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_memory: bool = True


@dataclass(frozen=True)
class OffloadOptimizer:
    """zero_optimization.offload_optimizer."""

    device: str = "none"  # none, cpu or nvme
    nvme_path: str | None = None
    buffer_count: int = 4
    pin_memory: bool = True
    pipeline_read: bool = True
    pipeline_write: bool = True
    fast_init: bool = False
    ratio: float = 1.0
    delayed_update: bool = False
    delayed_update_start: int = 0


@dataclass(frozen=True)
class Aio:
    """aio: how the files of `nvme` are read and written."""

    block_size: int = 1 << 20  # bytes
    queue_depth: int = 8
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True


@dataclass(frozen=True)
class ZeroSection:
    """What the engine reads of zero_optimization, under DeepSpeed's names. Sizes are in elements."""

    stage: int
    reduce_scatter: bool
    reduce_bucket_size: int
    allgather_partitions: bool
    allgather_bucket_size: int
    overlap_comm: bool
    sub_group_size: int
    stage3_prefetch_bucket_size: int
    stage3_param_persistence_threshold: int
    stage3_model_persistence_threshold: int
    stage3_max_live_parameters: int
    stage3_max_reuse_distance: int
    stage3_gather_16bit_weights_on_model_save: bool | None  # None: not set, so weights are written
    ignore_unused_parameters: bool
    offload_param: OffloadParam
    offload_optimizer: OffloadOptimizer


@dataclass(frozen=True)
class ResolvedConfig(Mapping[str, Any]):
    """Everything the engine needs to know, decided. Equal on all ranks that were given the same inputs.

    As a mapping it is what the user gave, nested as in the file, with values in the place of "auto", and the batch
    numbers: what DeepSpeed's engines have under `engine.config`. Attributes and `settings` have the defaults too.
    """

    stage: int
    world_size: int
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_clipping: float  # 0.0: off
    precision: Precision
    grad_accum_dtype: str | None  # "float32", "bfloat16", "float16"; None: float32, or float64 for a float64 model
    communication_data_type: str | None  # same names; None: the dtype of what is reduced
    zero: ZeroSection
    keep_fp32: tuple[str, ...]  # patterns of parameter names
    desync_timeout: float  # seconds
    zero_allow_untested_optimizer: bool
    steps_per_print: int  # 0: never
    dataloader_drop_last: bool
    gather_for_generation: str
    aio: Aio
    force_native_adam: bool  # zero_force_ds_cpu_optimizer: an offloaded update is native, or the optimizer is refused
    moments_16bit: bool  # optimizer.params.fp32_optimizer_states is false
    optimizer: dict[str, Any] | None  # {"type": a class of torch.optim or hf_zero.optim, "params": ...}
    scheduler: dict[str, Any] | None
    # Dotted path -> value, for every key that has one: what the fields above say and the rest.
    settings: dict[str, Any] = field(repr=False)
    origins: dict[str, str] = field(repr=False)  # the same paths -> where the value comes from
    raw: dict[str, Any] = field(repr=False)  # as the user gave it
    source: str = "a dict"
    notices: tuple[str, ...] = ()  # lines to show once, on one rank, before training

    @property
    def dtype(self) -> str | None:
        """Of parameters: "bfloat16", "float16", or None: the model keeps its dtypes."""
        return self.precision.dtype

    @cached_property
    def _given(self) -> dict[str, Any]:
        batch = (batch_sizes.TRAIN, batch_sizes.MICRO, batch_sizes.ACCUMULATION)
        return _without_auto(self.raw, self.settings) | {name: getattr(self, name) for name in batch}

    def __getitem__(self, key: str) -> Any:
        return self._given[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def describe(self) -> str:
        """One line for each resolved key: its path, value and origin."""
        width = max((len(path) for path in self.settings), default=0) + 2
        return "\n".join(
            f"{path} {'.' * (width - len(path))} {show(value)} [{self.origins[path]}]"
            for path, value in self.settings.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved keys as a nested dict in DeepSpeed's schema; keys without a value are left out."""
        result: dict[str, Any] = {}
        for path, value in self.settings.items():
            if value is None:
                continue
            *blocks, name = path.split(".")
            node = result
            for block in blocks:
                node = node.setdefault(block, {})
            node[name] = list(value) if isinstance(value, tuple) else copy.deepcopy(value)
        return result


def _without_auto(given: Mapping[str, Any], settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy with the resolved values in the place of "auto"; what has none is left out."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            values[name] = _without_auto(value, settings, f"{path}.")
        elif value != AUTO:
            values[name] = copy.deepcopy(value)
        elif settings.get(path) is not None:
            values[name] = copy.deepcopy(settings[path])
    return values


def zero_section(block: Mapping[str, Any]) -> ZeroSection:
    """The section for a resolved zero_optimization block, nested as in the file."""
    sections = {
        "offload_param": section_of(OffloadParam, block["offload_param"]),
        "offload_optimizer": section_of(OffloadOptimizer, block["offload_optimizer"]),
    }
    return section_of(ZeroSection, {**block, **sections})


def section_of(kind: type[_Section], block: Mapping[str, Any]) -> _Section:
    """The keys of a resolved block that are fields of `kind`; the others are refused, or there is nothing to do."""
    return kind(**{one.name: block[one.name] for one in fields(cast(Any, kind)) if one.name in block})
