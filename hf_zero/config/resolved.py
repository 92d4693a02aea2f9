"""The resolved configuration: what the engine reads. Plain frozen data without "auto"; every value has an origin.

A field made by `key` declares a key of the file: its type, range, default and help; a section as `default_factory`, a
block. `keys.py` takes them from here, and has the keys that no field holds.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from hf_zero.config import conditions as c
from hf_zero.config.media import MEDIA, Medium
from hf_zero.config.schema import (
    AUTO,
    Choice,
    Count,
    DType,
    Flag,
    Interval,
    RankGroup,
    Real,
    Size,
    Text,
    Texts,
    key,
    keys_of,
    put,
    section_of,
    show,
)
from hf_zero.errors import ConfigError

_MANY = 1 << 16  # of stages, threads or buffers: more is a mistake
_YEAR_S = 365 * 86400.0  # gloo counts nanoseconds in 63 bits
# A loss in fp32 times more than this is infinite.
MAX_POWER = 127
MAX_SCALE = 2.0**MAX_POWER
MIN_SCALE = 2.0**-24  # less loses the gradients that it should keep

# Origins of values; resolve.py has the others.
FILE = "file"
DEFAULT = "default"

_PARAMS_ON_DISK = (c.PARAMS_AWAY, c.PARAMS_ON_DISK)
_Section = TypeVar("_Section")


@dataclass(frozen=True)
class LossScaling:
    """The `fp16` block: how losses are scaled. Names and rules are DeepSpeed's; see optim/loss_scaler.py."""

    static: float = key(
        "The fixed loss scale; 0 is a dynamic one, which follows overflows.",
        Real(0.0, high=MAX_SCALE, auto=True),
        "loss_scale",
    )
    initial_power: int = key(
        "The power of 2 that the dynamic loss scale starts from.",
        Count(16, high=MAX_POWER, auto=True, when=(c.DYNAMIC_SCALE,)),
        "initial_scale_power",
    )
    window: int = key(
        "The number of steps without an overflow after which the loss scale doubles.",
        Count(1000, auto=True, when=(c.DYNAMIC_SCALE,)),
        "loss_scale_window",
    )
    hysteresis: int = key(
        "The number of overflows after which the loss scale is halved.",
        Count(2, low=1, auto=True, when=(c.DYNAMIC_SCALE, c.HYSTERESIS)),
    )
    consecutive_hysteresis: bool = key(
        "Count the overflows of hysteresis anew after each step without one.",
        Flag(False, auto=True, when=(c.DYNAMIC_SCALE, c.HYSTERESIS, c.HAS_HYSTERESIS)),
    )
    min_scale: float = key(
        "The smallest dynamic loss scale; an overflow there is an error.",
        Count(1, high=MAX_SCALE, auto=True, when=(c.DYNAMIC_SCALE,)),
        "min_loss_scale",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_scale", float(self.min_scale))  # the key is a whole number

    @classmethod
    def of_torch(cls, initial_power: int = 16, window: int = 2000) -> LossScaling:
        """The scaling of torch.amp.GradScaler, with no hysteresis and no lower bound to speak of."""
        return cls(initial_power=initial_power, window=window, hysteresis=1, min_scale=MIN_SCALE)


@dataclass(frozen=True)
class Precision:
    """The one decision that is made of fp16, bf16, amp and torch_autocast."""

    dtype: str | None = None  # of parameters: "bfloat16", "float16", or None: the model keeps its dtypes
    autocast: str | None = None  # the forward runs under torch.autocast with this dtype
    scaling: LossScaling | None = None  # None: losses are not scaled
    skip_nonfinite: bool = False  # a step whose gradient is not finite is left out on all ranks


class _Offload:
    """The sections that name a medium."""

    device: str

    @property
    def medium(self) -> Medium:
        """The medium that `device` names."""
        return MEDIA[self.device]


@dataclass(frozen=True)
class OffloadParam(_Offload):
    """The block zero_optimization.offload_param."""

    device: str = key(
        "The place where parameter shards are kept between uses: the device, host memory or a disk.",
        Choice("none", choices=tuple(MEDIA), when=(c.PARAMS_AWAY,)),
    )
    nvme_path: str | None = key("The folder on a fast disk for parameter shards.", Text(when=_PARAMS_ON_DISK))
    buffer_count: int = key(
        "The number of host buffers that parameters from the disk pass through.",
        Count(5, low=1, high=_MANY, auto=True, when=_PARAMS_ON_DISK),
    )
    buffer_size: int = key(
        "The number of elements of one of the buffers for parameters from the disk.",
        Count(100_000_000, low=1, auto=True, when=_PARAMS_ON_DISK),
    )
    max_in_cpu: int = key(
        "The number of elements per rank that stay in host memory before the disk is used.",
        Count(10**9, auto=True, when=_PARAMS_ON_DISK),
    )
    pin_memory: bool = key(
        "Pin the host memory of parameters, for faster copies to the device.",
        Flag(True, auto=True, when=(c.PARAMS_AWAY, c.PARAMS_OFFLOADED, c.ACCELERATOR)),
    )


@dataclass(frozen=True)
class OffloadOptimizer(_Offload):
    """The block zero_optimization.offload_optimizer. `delayed_update` and `delayed_update_start` are hf_zero's own."""

    device: str = key(
        "The place of master weights and optimizer states: the device, host memory or a disk.",
        Choice("none", choices=tuple(MEDIA)),
    )
    nvme_path: str | None = key(
        "The folder on a fast disk for master weights and optimizer states.", Text(when=(c.OPTIMIZER_ON_DISK,))
    )
    buffer_count: int = key(
        "The number of tiles of states from the disk that are in host memory at a time.",
        Count(4, low=1, high=_MANY, auto=True, when=(c.OPTIMIZER_ON_DISK,)),
    )
    pin_memory: bool = key(
        "Pin the host memory of gradients and updated parameters, for faster copies.",
        Flag(True, auto=True, when=(c.PINS, c.ACCELERATOR)),
    )
    # DeepSpeed: false; here the staging pool bounds the memory either way
    pipeline_read: bool = key(
        "Read the next tile from the disk while one is updated.", Flag(True, auto=True, when=(c.OPTIMIZER_ON_DISK,))
    )
    pipeline_write: bool = key(
        "Write the last tile to the disk while one is updated.", Flag(True, auto=True, when=(c.OPTIMIZER_ON_DISK,))
    )
    fast_init: bool = key(
        "Let the optimizer's file grow as it is written, and reserve no disk space.",
        Flag(False, auto=True, when=(c.OPTIMIZER_ON_DISK,)),
    )
    ratio: float = key(
        "The share of elements whose optimizer states leave the device, at stage 3; 1 is all.",
        Real(1.0, high=1.0, auto=True, when=(c.OFFLOADED,)),
    )
    delayed_update: bool = key(
        "Run the update beside the next step, so that it takes effect one step late.", Flag(False)
    )
    delayed_update_start: int = key(
        "The first optimizer step whose update may be delayed.", Count(0, when=(c.DELAYED,))
    )


@dataclass(frozen=True)
class Aio:
    """The `aio` block: how the files of `nvme` are read and written.

    Raises:
        ConfigError: A value is out of range, also where it comes from Python; every one of them is named.
    """

    block_size: int = key("The number of bytes of one read or write.", Count(1 << 20, low=1, high=1 << 30))
    queue_depth: int = key(
        "The number of operations that each thread has under way at once.", Count(8, low=1, high=4096)
    )
    intra_op_parallelism: int = key("The number of threads that submit operations.", Count(1, low=1, high=_MANY))
    single_submit: bool = key("Submit one operation per system call, not as many as there are.", Flag(False))
    overlap_events: bool = key(
        "Submit the next operation as soon as one ends; false waits for all that are under way.", Flag(True)
    )

    def __post_init__(self) -> None:
        given = ((name, getattr(self, name), entry) for name, entry in keys_of(Aio).items())
        wrong = [
            f"aio.{name}={value} must be {entry.expected()}"
            for name, value, entry in given
            if isinstance(entry, Count) and not entry.holds(value)
        ]
        if wrong:
            raise ConfigError("; ".join(wrong) + ".")


@dataclass(frozen=True)
class CheckpointSection:
    """The `checkpoint` block. `async` is hf_zero's own."""

    asynchronous: bool = key(
        "Write checkpoints in the background while training goes on.", Flag(False, when=(c.NO_DISK,)), "async"
    )
    tag_validation: str = key(
        "The reaction to ranks that give different tags: none, a warning or an error.",
        Choice("Warn", choices=("Ignore", "Warn", "Fail")),
    )
    use_node_local_storage: bool = key(
        "Write the files of a host's ranks to a disk of that host, not to a shared folder.", Flag(False)
    )


@dataclass(frozen=True)
class FlopsProfilerSection:
    """The `flops_profiler` block: operations and times of a step, module by module."""

    enabled: bool = key("Count the operations of one step by module, and measure its times.", Flag(False))
    profile_step: int = key("The step that is profiled, counted from 0.", Count(1))
    module_depth: int = key(
        "The depth to which the summary goes into the modules; -1 is the deepest.", Count(-1, low=-1)
    )
    top_modules: int = key("The number of modules that the summary names at each depth.", Count(1, low=1))
    detailed: bool = key("Print the operations of every module after the summary.", Flag(True))
    output_file: str | None = key("The file that the profile is written to, instead of standard output.", Text())


@dataclass(frozen=True)
class CommsLoggerSection:
    """The `comms_logger` block: figures of the collectives, for log_summary."""

    enabled: bool = key("Count the collectives of every step, with their sizes and times.", Flag(False))
    verbose: bool = key("Print a line for each collective.", Flag(False))
    prof_all: bool = key("Count all kinds of collectives; false counts those of prof_ops.", Flag(True))
    prof_ops: tuple[str, ...] = key(
        "The kinds of collectives that are counted, such as all_reduce.", Texts(when=(c.SOME_OPS,))
    )
    debug: bool = key("Count the collectives of each tensor apart.", Flag(False))


@dataclass(frozen=True)
class ActivationCheckpointing:
    """activation_checkpointing: what becomes of the inputs that checkpointed regions save for their recomputation.

    Which regions are checkpointed is the model's (activation_checkpointing_enable) or the script's matter.
    """

    partition_activations: bool = key(
        "Keep a part of the inputs on each rank of a group that shares them, and gather them for backward.",
        Flag(False),
    )
    cpu_checkpointing: bool = key(
        "Keep the inputs of checkpointed regions in host memory until backward.", Flag(False)
    )
    contiguous_memory_optimization: bool = key(
        "Keep the inputs of all checkpointed regions in one arena, which is allocated once.", Flag(False)
    )
    number_checkpoints: int | None = key(
        "The number of checkpointed regions (layers) that the arena has room for.",
        Count(low=1, high=_MANY, when=(c.CONTIGUOUS_INPUTS,)),
    )
    synchronize_checkpoint_boundary: bool = key(
        "Wait for the device at every border of a checkpointed region.", Flag(False, when=(c.ACCELERATOR,))
    )
    profile: bool = key("Log the time of every region's forward and recomputation.", Flag(False))
    activation_memory: int | None = key(
        "The bytes of the device for checkpointed regions; those that fit keep activations and are not recomputed.",
        Size(low=1),
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is asked for."""
        return self != dataclasses.replace(ActivationCheckpointing(), number_checkpoints=self.number_checkpoints)


@dataclass(frozen=True)
class Fp8Section:
    """The `msamp` block: training with 8-bit numbers by the levels of MS-AMP (Peng et al. 2023, FP8-LM)."""

    enabled: bool = key("Train linear layers in FP8, by the levels of MS-AMP.", Flag(False))
    opt_level: str = key(
        "The level: O1 has FP8 products and gradients, O2 small Adam states too, O3 is O2 at stages 1 and 2.",
        Choice("O1", choices=("O1", "O2", "O3"), when=(c.FP8,)),
    )
    use_te: bool = key(
        "Leave the products to TransformerEngine's modules, of which the model is made.", Flag(False, when=(c.FP8,))
    )

    @property
    def has_scaled_states(self) -> bool:
        """Whether master weights and moments are values of 8 and 16 bits with a scale for each parameter."""
        return self.enabled and self.opt_level != "O1"


@dataclass(frozen=True)
class ZeroSection:
    """The `zero_optimization` block. Sizes are in elements."""

    stage: int = key(
        "The ZeRO stage: ranks shard optimizer states from 1, gradients from 2, parameters at 3.", Count(0, high=3)
    )
    reduce_scatter: bool = key(
        "Reduce-scatter gradients; false all-reduces them, and each rank keeps its shard.",
        Flag(True, auto=True, when=(c.SHARDED,)),
    )
    reduce_bucket_size: int = key(
        "The most elements that one reduction of gradients moves at a time.",
        Count(500_000_000, low=1, auto=True, when=(c.REDUCE_BUCKETS, c.REDUCE_COPIES)),
    )
    allgather_partitions: bool = key(
        "All-gather updated parameters; false broadcasts them from their owners.",
        Flag(True, auto=True, when=(c.STAGES_1_2,)),
    )
    allgather_bucket_size: int = key(
        "The most elements that one all-gather of parameters moves at a time.",
        Count(500_000_000, low=1, auto=True, when=(c.GATHER_BUCKETS, c.GATHERS_IN_PARTS)),
    )
    # DeepSpeed: at stage 3 only; here it costs no buffers
    overlap_comm: bool = key("Reduce gradients and prefetch parameters while layers compute.", Flag(True, auto=True))
    sub_group_size: int = key(
        "The most elements that the optimizer updates in one call.", Count(10**9, auto=True, when=(c.TILES,))
    )
    stage3_prefetch_bucket_size: int = key(
        "The number of elements of the next layers that are all-gathered ahead; 0 turns prefetch off.",
        Count(50_000_000, auto=True, when=(c.STAGE_3,)),
    )
    stage3_param_persistence_threshold: int = key(
        "The number of elements below which a parameter is never resharded.",
        Count(100_000, auto=True, when=(c.STAGE_3,)),
    )
    stage3_model_persistence_threshold: int = key(
        "The most elements of the whole model that are never resharded.",
        Count(sys.maxsize, auto=True, when=(c.STAGE_3,)),
    )
    stage3_max_live_parameters: int = key(
        "The most elements that are unsharded beyond the layers in use.", Count(10**9, auto=True, when=(c.STAGE_3,))
    )
    # DeepSpeed: 1e9, which never reshards a model of that size between forward and backward
    stage3_max_reuse_distance: int = key(
        "The most elements that may be used before a layer's next use if it is to stay unsharded until then.",
        Count(0, auto=True, when=(c.STAGE_3,)),
    )
    # None: not set, so weights are written
    stage3_gather_16bit_weights_on_model_save: bool | None = key(
        "Write the full weights (model.safetensors) whenever a model is saved.", Flag(auto=True, when=(c.STAGE_3,))
    )
    # DeepSpeed: zero_hpz_partition_size; mics_shard_size, which shards optimizer states within a group as well
    sharding_group: str | int = key(
        "The ranks that form a group, in which parameters are sharded at stage 3 and exchanges mostly stay.",
        RankGroup("all", low=None),
    )
    # FSDP's HYBRID_SHARD
    hybrid_shard: bool = key(
        "Shard masters and optimizer states within a sharding_group too, the same in each group.",
        Flag(False, auto=True),
    )
    zero_quantized_weights: bool = key(
        "Gather parameters for forward and backward across groups, or hosts, as 8-bit blocks.", Flag(False, auto=True)
    )
    zero_quantized_gradients: bool = key(
        "Sum gradients across groups, or hosts, from 8-bit blocks.", Flag(False, auto=True)
    )
    ignore_unused_parameters: bool = key(
        "Let parameters have no gradient in a step; false makes that an error.", Flag(True, auto=True)
    )
    offload_param: OffloadParam = field(default_factory=OffloadParam)
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)

    @property
    def offloaded(self) -> dict[str, _Offload]:
        """The blocks whose medium is not the device, by what they are about."""
        blocks: dict[str, _Offload] = {"optimizer": self.offload_optimizer, "parameters": self.offload_param}
        return {what: block for what, block in blocks.items() if not block.medium.is_device}


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Mapping[str, Any]):
    """Everything the engine needs to know, decided. Equal on all ranks that were given the same inputs.

    As a mapping it is what the user gave, nested as in the file, with values instead of "auto", and the batch
    numbers: what DeepSpeed's engines have under `engine.config`. Attributes and `settings` have the defaults too.
    `desync_timeout`, `keep_fp32`, `gather_for_generation` and `uneven_data` are hf_zero's own keys.
    """

    train_batch_size: int = key(
        "The number of samples of one optimizer step, over all ranks and micro-batches.", Count(low=1, auto=True)
    )
    train_micro_batch_size_per_gpu: int = key(
        "The number of samples that one rank processes in one forward.", Count(low=1, auto=True)
    )
    gradient_accumulation_steps: int = key(
        "The number of micro-batches of one optimizer step.", Count(low=1, auto=True)
    )
    managed_gradient_accumulation: bool = key(
        "Update at every gradient_accumulation_steps-th `engine.step()`; false: at every one.", Flag(True)
    )
    gradient_clipping: float = key(
        "The norm that the gradients of all parameters are clipped to; 0 turns clipping off.", Real(0.0, auto=True)
    )
    # "float32", "bfloat16", "float16"; None: the dtype of what is reduced
    communication_data_type: str | None = key("The type in which gradients are reduced between ranks.", DType())
    prescale_gradients: bool = key(
        "Divide gradients by the number of ranks before they are summed, not after.", Flag(False)
    )
    gradient_predivide_factor: float = key(
        "The number that gradients are divided by before they are summed; the rest of the mean comes after.",
        Real(1.0, low=1e-6, high=1e6),
    )
    gradient_allreduce_op: str = key(
        'The reduction of gradients over ranks: "mean" or "sum".', Choice("mean", choices=("mean", "sum"))
    )
    zero_allow_untested_optimizer: bool = key(
        "Take an optimizer that hf_zero does not know as one that treats every element by itself.",
        Flag(False, when=(c.SHARDED,)),
    )
    keep_fp32: tuple[str, ...] = key(
        "The patterns of names of parameters that stay in fp32 where others are cast to 16 bits.",
        Texts(when=(c.CASTS,)),
    )
    desync_timeout: float = key(
        "The seconds until ranks that wait for a living rank give up and report.", Real(600.0, low=1.0, high=_YEAR_S)
    )
    gather_for_generation: str = key(
        "The way in which generate gets the weights at stage 3: all at once, or layer by layer for every token.",
        Choice("auto", choices=("auto", "once", "stream"), when=(c.STAGE_3,)),
    )
    uneven_data: str = key(
        "The end of an epoch of Trainer where ranks have unequal data: an error, the shortest data, or the longest.",
        Choice("error", choices=("error", "stop", "join"), when=(c.TRAINER,)),
    )
    dataloader_drop_last: bool = key(
        "Drop the last samples of training_data if they do not fill a batch.",
        Flag(False, when=(c.OWN_LOADER,)),
    )
    steps_per_print: int = key(
        "The number of steps between printed lines with the rate and the throughput; 0 prints none.", Interval(0)
    )
    wall_clock_breakdown: bool = key("Print the time of every phase of a step.", Flag(False))
    memory_breakdown: bool = key("Print the memory in use before and after every phase of a step.", Flag(False))
    dump_state: bool = key("Print the resolved configuration when the engine is made.", Flag(False))
    zero: ZeroSection = field(default_factory=ZeroSection, metadata={"name": "zero_optimization"})
    aio: Aio = field(default_factory=Aio)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    flops_profiler: FlopsProfilerSection = field(default_factory=FlopsProfilerSection)
    comms_logger: CommsLoggerSection = field(default_factory=CommsLoggerSection)
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    fp8: Fp8Section = field(default_factory=Fp8Section, metadata={"name": "msamp"})
    # The values below are made of several keys.
    stage: int
    world_size: int
    precision: Precision
    grad_accum_dtype: str | None  # as communication_data_type; None: float32, or float64 for a float64 model
    force_native_adam: bool  # zero_force_ds_cpu_optimizer: an offloaded update is native, or the optimizer is refused
    bf16_masters: bool  # bf16.bf16_master_weights_and_grads, where bf16 is enabled
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
        """The type of parameters: "bfloat16", "float16", or None, with which the model keeps its own."""
        return self.precision.dtype

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded between their uses: stage 3."""
        return self.stage == 3

    @property
    def writes_full_weights(self) -> bool:
        """Whether full weights are written beside an engine's own files: always, unless the file turns them off."""
        return not self.shards_parameters or self.zero.stage3_gather_16bit_weights_on_model_save is not False

    def is_written(self, path: str) -> bool:
        """Whether the value of a key is the file's own, and neither "auto" nor a default."""
        return self.origins.get(path) == FILE

    def is_changed(self, path: str) -> bool:
        """Whether the value of a key is no default: the file, the arguments or the model decided it."""
        return self.origins[path] != DEFAULT

    def section(self, block: str, kind: type[_Section]) -> _Section:
        """The values of a block that is declared beside the class that obeys it (`keys.DECLARED`)."""
        return section_of(kind, block, self.settings.get)

    @cached_property
    def _given(self) -> dict[str, Any]:
        return _without_auto(self.raw, self.settings) | {name: getattr(self, name) for name in c.BATCH_KEYS}

    def __getitem__(self, key: str) -> Any:
        return self._given[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    @property
    def public_settings(self) -> dict[str, Any]:
        """The `settings` for logs and terminals, without secrets."""
        return {path: _hidden(path, value) for path, value in self.settings.items()}

    @property
    def public_raw(self) -> dict[str, Any]:
        """The file as the user gave it, without secrets."""
        return {
            block: {name: _hidden(f"{block}.{name}", one) for name, one in value.items()}
            if isinstance(value, dict)
            else value
            for block, value in self.raw.items()
        }

    def describe(self, *, changed: bool = False) -> str:
        """One line for each resolved key: its path, value and origin. With `changed`, defaults are left out."""
        shown = {path: value for path, value in self.public_settings.items() if not changed or self.is_changed(path)}
        width = max((len(path) for path in shown), default=0) + 2
        return "\n".join(
            f"{path} {'.' * (width - len(path))} {show(value)} [{self.origins[path]}]" for path, value in shown.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved keys as a nested dict in DeepSpeed's schema; keys without a value are left out."""
        result: dict[str, Any] = {}
        for path, value in self.settings.items():
            if value is not None:
                put(result, path, list(value) if isinstance(value, tuple) else copy.deepcopy(value))
        return result


def _hidden(path: str, value: Any) -> Any:
    return "(not shown)" if path.endswith("api_key") and value is not None else value


def _without_auto(given: Mapping[str, Any], settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy with the resolved values instead of "auto"; what has none is left out."""
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
