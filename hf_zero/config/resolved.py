"""The resolved configuration: what the engine reads. Plain frozen data without "auto"; every value has an origin.

A field made by `key` declares a key of the file: its type, range and default; a section as `default_factory`, a block.
`keys.py` takes them from here, and has the keys that no field holds.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hf_zero.config import batch
from hf_zero.config import conditions as c
from hf_zero.config.precision import Precision
from hf_zero.config.problems import show
from hf_zero.config.schema import (
    AUTO,
    Key,
    choice,
    count,
    dtype,
    flag,
    interval,
    key,
    put,
    real,
    rows_of,
    size,
    text,
    texts,
)
from hf_zero.errors import ConfigError

_MANY = 1 << 16  # of stages, threads or buffers: more is a mistake
_YEAR_S = 365 * 86400.0  # gloo counts nanoseconds in 63 bits

# Origins of values; resolve.py has the others.
FILE = "file"
DEFAULT = "default"


_PARAMS_ON_DISK = (c.PARAMS_AWAY, c.PARAMS_ON_DISK)


@dataclass(frozen=True)
class OffloadParam:
    """zero_optimization.offload_param."""

    device: str = key(choice("none", "none", "cpu", "nvme"), when=c.PARAMS_AWAY)
    nvme_path: str | None = key(text(), when=_PARAMS_ON_DISK)
    buffer_count: int = key(count(5, low=1, high=_MANY, auto=True), when=_PARAMS_ON_DISK)
    buffer_size: int = key(count(1e8, low=1, auto=True), when=_PARAMS_ON_DISK)
    max_in_cpu: int = key(count(1e9, auto=True), when=_PARAMS_ON_DISK)
    pin_memory: bool = key(flag(True, auto=True), when=(c.PARAMS_AWAY, c.PARAMS_OFFLOADED, c.ACCELERATOR))


@dataclass(frozen=True)
class OffloadOptimizer:
    """zero_optimization.offload_optimizer. `delayed_update` and `delayed_update_start` are hf_zero's own."""

    device: str = key(choice("none", "none", "cpu", "nvme"))
    nvme_path: str | None = key(text(), when=c.OPTIMIZER_ON_DISK)
    buffer_count: int = key(count(4, low=1, high=_MANY, auto=True), when=c.OPTIMIZER_ON_DISK)
    pin_memory: bool = key(flag(True, auto=True), when=(c.PINS, c.ACCELERATOR))
    # DeepSpeed: false; here the staging pool bounds the memory either way
    pipeline_read: bool = key(flag(True, auto=True), when=c.OPTIMIZER_ON_DISK)
    pipeline_write: bool = key(flag(True, auto=True), when=c.OPTIMIZER_ON_DISK)
    fast_init: bool = key(flag(False, auto=True), when=c.OPTIMIZER_ON_DISK)
    ratio: float = key(real(1.0, high=1.0, auto=True), when=c.OFFLOADED)
    delayed_update: bool = key(flag(False))
    delayed_update_start: int = key(count(0), when=c.DELAYED)


@dataclass(frozen=True)
class Aio:
    """aio: how the files of `nvme` are read and written.

    Raises:
        ConfigError: A value is out of range, also where it comes from Python; every one of them is named.
    """

    block_size: int = key(count(1 << 20, low=1, high=1 << 30))  # bytes of one operation
    queue_depth: int = key(count(8, low=1, high=4096))  # operations under way at once, per thread
    intra_op_parallelism: int = key(count(1, low=1, high=_MANY))  # threads that submit
    single_submit: bool = key(flag(False))  # one operation per system call, not as many as there are
    # A free place is filled at once; False: when all operations under way are through.
    overlap_events: bool = key(flag(True))

    def __post_init__(self) -> None:
        given = ((name, getattr(self, name), row) for name, row in rows_of(Aio).items() if isinstance(row, Key))
        wrong = [f"aio.{name}={value} must be {row.expected()}" for name, value, row in given if not row.holds(value)]
        if wrong:
            raise ConfigError("; ".join(wrong) + ".")


@dataclass(frozen=True)
class CheckpointSection:
    """checkpoint. `async` is hf_zero's own."""

    asynchronous: bool = key(flag(False), "async", when=c.NO_DISK)
    tag_validation: str = key(choice("Warn", "Ignore", "Warn", "Fail"))
    use_node_local_storage: bool = key(flag(False))


@dataclass(frozen=True)
class MonitorSection:
    """tensorboard and csv_monitor: files in `output_path`/`job_name`."""

    enabled: bool = key(flag(False))
    output_path: str = key(text(""))
    job_name: str = key(text("DeepSpeedJobName"))


@dataclass(frozen=True)
class FlopsProfilerSection:
    """flops_profiler: operations and times of a step, module by module."""

    enabled: bool = key(flag(False))
    profile_step: int = key(count(1))  # from 0
    module_depth: int = key(count(-1, low=-1))  # of the summary; -1: all
    top_modules: int = key(count(1, low=1))
    detailed: bool = key(flag(True))
    output_file: str | None = key(text())  # None: standard output


@dataclass(frozen=True)
class WandbSection:
    """wandb: a run of Weights & Biases. What is None is the library's own, as its environment sets it."""

    enabled: bool = key(flag(False))
    group: str | None = key(text())
    team: str | None = key(text())
    project: str = key(text("deepspeed"))


@dataclass(frozen=True)
class CometSection:
    """comet: an experiment of Comet. What is None is the library's own, as its configuration sets it."""

    enabled: bool = key(flag(False))
    samples_log_interval: int = key(count(100))  # a tag is written once in so many samples
    project: str | None = key(text())
    workspace: str | None = key(text())
    api_key: str | None = key(text())
    experiment_name: str | None = key(text())
    experiment_key: str | None = key(text())
    online: bool | None = key(flag(None))
    mode: str | None = key(choice(None, "get", "create", "get_or_create"))


@dataclass(frozen=True)
class CommsLoggerSection:
    """comms_logger: figures of the collectives, for log_summary."""

    enabled: bool = key(flag(False))
    verbose: bool = key(flag(False))  # a line for each
    prof_all: bool = key(flag(True))
    prof_ops: tuple[str, ...] = key(texts(), when=c.SOME_OPS)  # where not all: which
    debug: bool = key(flag(False))  # those of each tensor apart


@dataclass(frozen=True)
class ActivationCheckpointing:
    """activation_checkpointing: what becomes of the inputs that checkpointed regions save for their recomputation.

    Which regions are checkpointed is the model's (gradient_checkpointing_enable) or the script's matter.
    """

    partition_activations: bool = key(flag(False))
    cpu_checkpointing: bool = key(flag(False))
    contiguous_memory_optimization: bool = key(flag(False))
    # Regions whose inputs are saved at a time
    number_checkpoints: int | None = key(count(low=1, high=_MANY), when=c.CONTIGUOUS_INPUTS)
    synchronize_checkpoint_boundary: bool = key(flag(False), when=c.ACCELERATOR)
    profile: bool = key(flag(False))
    activation_memory: int | None = key(size())  # bytes that checkpointed regions may take; hf_zero's own
    nvme_path: str | None = key(text())  # a folder on disk for what they save; hf_zero's own

    @property
    def is_on(self) -> bool:
        """Whether anything is asked for."""
        return self != dataclasses.replace(ActivationCheckpointing(), number_checkpoints=self.number_checkpoints)


@dataclass(frozen=True)
class PipelineSection:
    """pipeline: how a PipelineModule is split and run. `schedule` and `virtual_stages` are hf_zero's own."""

    # None: the module's own, or one for each process
    stages: int | None = key(count(low=1, high=_MANY, auto=True))
    partition: str = key(text("best"))  # "best": the module's own partition_method
    seed_layers: bool = key(flag(False))  # True: also where the module was made without
    activation_checkpoint_interval: int = key(count(0))  # 0: the module's own
    schedule: str = key(choice("1f1b", "1f1b", "gpipe", "interleaved", "zero_bubble"))
    virtual_stages: int = key(count(1, low=1, high=_MANY))  # chunks of layers of each stage; 1: the module's own


@dataclass(frozen=True)
class ZeroSection:
    """zero_optimization. Sizes are in elements."""

    stage: int = key(count(0, high=3))
    reduce_scatter: bool = key(flag(True, auto=True), when=c.SHARDED)
    reduce_bucket_size: int = key(count(5e8, low=1, auto=True), when=(c.REDUCE_BUCKETS, c.REDUCE_COPIES))
    allgather_partitions: bool = key(flag(True, auto=True), when=c.STAGES_1_2)
    allgather_bucket_size: int = key(count(5e8, low=1, auto=True), when=(c.GATHER_BUCKETS, c.GATHERS_IN_PARTS))
    overlap_comm: bool = key(flag(True, auto=True))  # DeepSpeed: at stage 3 only; here it costs no buffers
    sub_group_size: int = key(count(1e9, auto=True), when=c.TILES)
    stage3_prefetch_bucket_size: int = key(count(5e7, auto=True), when=c.STAGE_3)
    stage3_param_persistence_threshold: int = key(count(1e5, auto=True), when=c.STAGE_3)
    stage3_model_persistence_threshold: int = key(count(sys.maxsize, auto=True), when=c.STAGE_3)
    stage3_max_live_parameters: int = key(count(1e9, auto=True), when=c.STAGE_3)
    # DeepSpeed: 1e9, which never reshards a model of that size between forward and backward
    stage3_max_reuse_distance: int = key(count(0, auto=True), when=c.STAGE_3)
    # None: not set, so weights are written
    stage3_gather_16bit_weights_on_model_save: bool | None = key(flag(None, auto=True), when=c.STAGE_3)
    ignore_unused_parameters: bool = key(flag(True, auto=True))
    offload_param: OffloadParam = field(default_factory=OffloadParam)
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Mapping[str, Any]):
    """Everything the engine needs to know, decided. Equal on all ranks that were given the same inputs.

    As a mapping it is what the user gave, nested as in the file, with values in the place of "auto", and the batch
    numbers: what DeepSpeed's engines have under `engine.config`. Attributes and `settings` have the defaults too.
    `desync_timeout`, `keep_fp32` and `gather_for_generation` are hf_zero's own keys.
    """

    train_batch_size: int = key(count(low=1, auto=True))
    train_micro_batch_size_per_gpu: int = key(count(low=1, auto=True))
    gradient_accumulation_steps: int = key(count(low=1, auto=True))
    gradient_clipping: float = key(real(0.0, auto=True))  # 0.0: off
    # "float32", "bfloat16", "float16"; None: the dtype of what is reduced
    communication_data_type: str | None = key(dtype())
    prescale_gradients: bool = key(flag(False))
    gradient_predivide_factor: float = key(real(1.0, low=1e-6, high=1e6))
    gradient_allreduce_op: str = key(choice("mean", "mean", "sum"))
    zero_allow_untested_optimizer: bool = key(flag(False), when=c.SHARDED)
    keep_fp32: tuple[str, ...] = key(texts(), when=c.CASTS)  # patterns of parameter names
    desync_timeout: float = key(real(600.0, low=1.0, high=_YEAR_S))  # seconds
    gather_for_generation: str = key(choice("auto", "auto", "once", "stream"), when=c.STAGE_3)
    dataloader_drop_last: bool = key(flag(False), when=c.OWN_LOADER)
    steps_per_print: int = key(interval())  # 0: never
    wall_clock_breakdown: bool = key(flag(False))
    memory_breakdown: bool = key(flag(False))
    dump_state: bool = key(flag(False))
    zero: ZeroSection = field(default_factory=ZeroSection, metadata={"name": "zero_optimization"})
    aio: Aio = field(default_factory=Aio)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    tensorboard: MonitorSection = field(default_factory=MonitorSection)
    csv_monitor: MonitorSection = field(default_factory=MonitorSection)
    flops_profiler: FlopsProfilerSection = field(default_factory=FlopsProfilerSection)
    wandb: WandbSection = field(default_factory=WandbSection)
    comet: CometSection = field(default_factory=CometSection)
    comms_logger: CommsLoggerSection = field(default_factory=CommsLoggerSection)
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    # Made of several keys.
    stage: int
    world_size: int
    precision: Precision
    grad_accum_dtype: str | None  # as communication_data_type; None: float32, or float64 for a float64 model
    force_native_adam: bool  # zero_force_ds_cpu_optimizer: an offloaded update is native, or the optimizer is refused
    moments_16bit: bool  # optimizer.params.fp32_optimizer_states is false
    optimizer: dict[str, Any] | None  # {"type": a class of torch.optim or hf_zero.optim, "params": ...}
    scheduler: dict[str, Any] | None
    # Dotted path -> value, for every key that has one: those of the fields above and the rest.
    settings: dict[str, Any] = field(repr=False)
    origins: dict[str, str] = field(repr=False)  # the same paths -> where the value comes from
    raw: dict[str, Any] = field(repr=False)  # as the user gave it
    source: str = "a dict"
    notices: tuple[str, ...] = ()  # lines to show once, on one rank, before training

    @property
    def dtype(self) -> str | None:
        """Of parameters: "bfloat16", "float16", or None: the model keeps its dtypes."""
        return self.precision.dtype

    def is_written(self, path: str) -> bool:
        """Whether the value of a key is the file's own, and neither "auto" nor a default."""
        return self.origins.get(path) == FILE

    @cached_property
    def _given(self) -> dict[str, Any]:
        return _without_auto(self.raw, self.settings) | {name: getattr(self, name) for name in batch.KEYS}

    def __getitem__(self, key: str) -> Any:
        return self._given[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    @property
    def public_settings(self) -> dict[str, Any]:
        """`settings` for logs and terminals: without what nobody else may read."""
        return {path: _hidden(path, value) for path, value in self.settings.items()}

    @property
    def public_raw(self) -> dict[str, Any]:
        """`raw`, likewise."""
        return {
            block: {name: _hidden(f"{block}.{name}", one) for name, one in value.items()}
            if isinstance(value, dict)
            else value
            for block, value in self.raw.items()
        }

    def describe(self) -> str:
        """One line for each resolved key: its path, value and origin."""
        width = max((len(path) for path in self.settings), default=0) + 2
        return "\n".join(
            f"{path} {'.' * (width - len(path))} {show(value)} [{self.origins[path]}]"
            for path, value in self.public_settings.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved keys as a nested dict in DeepSpeed's schema; keys without a value are left out."""
        result: dict[str, Any] = {}
        for path, value in self.settings.items():
            if value is not None:
                put(result, path, list(value) if isinstance(value, tuple) else copy.deepcopy(value))
        return result


# Keys that are passwords, more or less.
_SECRETS = frozenset(["comet.api_key"])


def _hidden(path: str, value: Any) -> Any:
    return "(not shown)" if path in _SECRETS and value is not None else value


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
