"""Every key of the configuration at its place, with DeepSpeed's names and defaults: `root()`.

A key is obeyed unless it is declared with `refused` or `no_effect`. Keys whose value is a field of the resolved
configuration are declared there, in `resolved.py`; those of a class that a key chooses beside that class (DECLARED);
the others here. scripts/config_tables.py writes the table for readers, SUPPORTED.md, from `statuses`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from hf_zero.config.conditions import ANY_DISK, FORCE, IN_BF16, OPTIMIZER_ON_HOST, PRINTS, SCALED_LEVEL, ZERO
from hf_zero.config.resolved import (
    ActivationCheckpointing,
    Aio,
    CheckpointSection,
    FlopsProfilerSection,
    LossScaling,
    OffloadOptimizer,
    ResolvedConfig,
    ZeroSection,
)
from hf_zero.config.schema import (
    Alias,
    Block,
    Choice,
    Count,
    DType,
    Entry,
    Flag,
    Key,
    Real,
    Text,
    Texts,
    find,
    keys_of,
    refused_block,
)
from hf_zero.config.typed_block import TypedBlock

# Modules of rooms above that declare blocks of the configuration, as BLOCKS, beside the classes that obey them. They
# are loaded with the first configuration that is read, and import no torch.
DECLARED = (
    "hf_zero.optim.optimizer_types",
    "hf_zero.optim.schedule_types",
    "hf_zero.extras.pipeline.pipeline_section",
    "hf_zero.extras.monitors.trackers",
)

_FP32_MASTERS = "Remove it: masters are kept in fp32."
_NONTRAINABLE = "Remove it: zero_quantized_weights is about the messages of frozen parameters too."
_LOCO = "Remove it: what zero_quantized_gradients rounds off is not added to the next step's gradients."
_GROUPS = "with sharding_group a parameter is gathered across groups once a step, and then within them"
_COMPILE = "Remove it; torch.compile works on the layers of the model."
_DROP = "Remove it, or set it to its default."
_DROP_BLOCK = "Remove the block."
_OUT = "Remove the block: hf_zero shards training and leaves this to other tools."
_OWN_FILES = "Remove the block: checkpoints are written by the ranks."

_BY_LAYOUT = "the flat parameters give this by their layout"
_WHOLE_LAYERS = "units are whole layers"
_NO_COPY = "a gather needs no copy, so there is nothing to save"
_ANY_RANKS = "every checkpoint loads at any number of ranks"
_APEX = "amp levels are run by torch, with the bounds of its own gradient scaler"


# DeepSpeed takes these names with and without "stage3_".
_WITHOUT_PREFIX = """prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params
    allgather_sequential""".split()


def _offload(device: str) -> Alias:
    return Alias(target=f"{ZERO}.{device}.device", convert={True: "cpu", False: None})


# 16-bit training


FP16 = Block(
    always=True,
    keys={
        "enabled": Flag(False, auto=True, help="Train in fp16, with scaled losses and fp32 master weights."),
        "auto_cast": Flag(True, auto=True, no_effect="floating inputs are always cast to the type of the parameters"),
        **keys_of(LossScaling),
        "fp16_master_weights_and_grads": Flag(False, auto=True, refused=_FP32_MASTERS),
    },
)

BF16 = Block(
    always=True,
    keys={
        "enabled": Flag(False, auto=True, help="Train in bf16; master weights are fp32."),
        "immediate_grad_update": Flag(False, auto=True, no_effect="gradients are always taken as they are ready"),
        "check_grad_overflow": Flag(True, auto=True, help="Skip a step whose gradients are not finite, on all ranks."),
        "bf16_master_weights_and_grads": Flag(
            False, auto=True, when=(IN_BF16,), help="Update bf16 parameters themselves, from gradients in bf16."
        ),
        "bf16_optimizer_states": Flag(
            False, auto=True, when=(IN_BF16,), help="Keep the optimizer states of bf16 masters in bf16."
        ),
    },
)

AMP = Block(
    keys={
        "enabled": Flag(False, auto=True, help="Train in mixed precision by the levels of apex, at stage 0."),
        "opt_level": Choice(
            "O1",
            choices=("O0", "O1", "O2", "O3"),
            auto=True,
            help="The level of apex: O0 is fp32, O1 autocast, O2 and O3 are fp16.",
        ),
        "loss_scale": Key(when=(SCALED_LEVEL,), help='The fixed loss scale, or "dynamic".'),
        **dict.fromkeys(
            "cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights cast_model_outputs".split(),
            Key(no_effect=_APEX),
        ),
        "num_losses": Count(1, low=1, no_effect=_APEX),
        "verbosity": Count(1, no_effect=_APEX),
        **dict.fromkeys(("min_loss_scale", "max_loss_scale"), Real(no_effect=_APEX)),
    }
)

TORCH_AUTOCAST = Block(
    keys={
        "enabled": Flag(False, help="Run the forward under torch.autocast; parameters keep their types."),
        "dtype": DType(help="The type that autocast computes in; bf16 without it."),
        "lower_precision_safe_modules": Texts(no_effect="torch's autocast decides by operation"),
    },
)

DATA_TYPES = Block(
    always=True,
    keys={
        "grad_accum_dtype": DType(help="The type in which gradients accumulate; that of the masters without it."),
        "param_dtype": DType(refused='Remove it: "bf16": {"enabled": true} chooses the dtype of parameters.'),
        "buffer_dtype": DType(refused="Remove it: buffers keep their dtype."),
        "keep_in_fp32_modules": Texts(
            auto=True, no_effect="buffers always keep their dtype; keep_fp32 names parameters"
        ),
    },
)


# ZeRO


ZERO_KEYS: dict[str, Entry] = {
    **keys_of(ZeroSection),
    "offload_optimizer": Block(
        always=True,
        keys={
            **keys_of(OffloadOptimizer),
            "super_offload": Flag(False, auto=True, refused="Remove it: updates run beside the forward."),
            "cpuadam_cores_perc": Real(
                0.8,
                high=1.0,
                auto=True,
                no_effect="the update takes the cores of this process over its local ranks; HF_ZERO_CPU_THREADS sets "
                "another number",
            ),
        },
    ),
    "contiguous_gradients": Flag(True, auto=True, no_effect=_BY_LAYOUT),
    "use_multi_rank_bucket_allreduce": Flag(True, auto=True, no_effect=_BY_LAYOUT),
    "compute_grad_norm": Flag(True, auto=True, no_effect="the norm is computed when it is asked for"),
    "load_from_fp32_weights": Flag(
        True, auto=True, no_effect="masters always come from the fp32 values where a checkpoint has them"
    ),
    "elastic_checkpoint": Flag(False, auto=True, no_effect=_ANY_RANKS),
    "stage3_module_granularity_threshold": Count(0, auto=True, no_effect=_WHOLE_LAYERS),
    "stage3_use_all_reduce_for_fetch_params": Flag(False, auto=True, no_effect=_NO_COPY),
    "stage3_allgather_sequential": Flag(False, auto=True, no_effect=_NO_COPY),
    "legacy_stage1": Flag(False, auto=True, no_effect="there is one stage 1"),
    "grad_hooks": Flag(True, auto=True, no_effect="gradients are always taken by hooks"),
    "round_robin_gradients": Flag(False, auto=True, no_effect="every rank owns a part of every bucket"),
    "parameter_alignment": Flag(False, auto=True, no_effect="parameters always start at 16-byte addresses"),
    "memory_efficient_linear": Flag(True, auto=True, no_effect="torch's linear is left as it is"),
    "pipeline_loading_checkpoint": Flag(False, auto=True, no_effect="a checkpoint is always read tensor by tensor"),
    "override_module_apply": Flag(
        True, auto=True, no_effect="parameters keep their shape, so apply needs no override"
    ),
    "log_trace_cache_warnings": Flag(False, auto=True, no_effect="the order of gathers is fixed, there is no trace"),
    "enable_sanity_checks": Flag(False, auto=True, no_effect="they are always on"),
    "save_muon_momentum_buffer_in_memory": Flag(False, auto=True, no_effect="it matters under offload only"),
    "leaf_module": Block(
        always=True, keys={name: Texts(no_effect=_WHOLE_LAYERS) for name in ("classes", "names", "name_suffixes")}
    ),
    "zenflow": refused_block(_DROP_BLOCK),
    "zero_quantized_nontrainable_weights": Flag(False, auto=True, refused=_NONTRAINABLE),
    "zeropp_loco_param": refused_block(_LOCO),
    "mics_hierarchical_params_gather": Flag(False, auto=True, no_effect=_GROUPS),
    # Names without the prefix, deprecated names, and a block that old files keep here.
    **{name: Alias(target=f"{ZERO}.stage3_{name}") for name in _WITHOUT_PREFIX},
    "stage3_gather_fp16_weights_on_model_save": Alias(target=f"{ZERO}.stage3_gather_16bit_weights_on_model_save"),
    "mics_shard_size": Alias(target=f"{ZERO}.sharding_group", off=-1),
    "zero_hpz_partition_size": Alias(target=f"{ZERO}.sharding_group", off=1),
    "cpu_offload": _offload("offload_optimizer"),
    "cpu_offload_param": _offload("offload_param"),
    "cpu_offload_params": _offload("offload_param"),
    "cpu_offload_use_pin_memory": Alias(target=f"{ZERO}.offload_optimizer.pin_memory"),
    "aio": Alias(target="aio"),
}

AIO = Block(
    always=True,
    keys={
        **keys_of(Aio, ANY_DISK),
        "thread_count": Alias(target="aio.intra_op_parallelism"),
        "use_gds": Flag(False, refused=_DROP),
    },
)


# The optimizer, checkpoints, and what is around them


FLOPS_PROFILER = Block(
    always=True,
    keys={
        **keys_of(FlopsProfilerSection),
        "recompute_fwd_factor": Real(0.0, no_effect="operations of the backward are counted, recomputation included"),
    },
)

CHECKPOINT = Block(
    always=True,
    keys={
        **keys_of(CheckpointSection),
        "load_universal": Flag(False, no_effect=f"{_ANY_RANKS} and any stage"),
        "parallel_write": Block(always=True, keys={"pipeline_stage": Flag(False, refused=_DROP)}),
        "checkpoint_serialization": Flag(True, no_effect="files are safetensors"),
        "writer": refused_block(_DROP_BLOCK),
    },
)

_SWITCH = Block(free=True, keys={"enabled": Flag(False)})
_TECHNIQUES = "weight_quantization activation_quantization sparse_pruning row_pruning head_pruning channel_pruning"
_TP_SIZE = Block(free=True, keys={"tp_size": Count(1)})

REFUSED_BLOCKS: dict[str, Entry] = {
    "autotuning": refused_block(_DROP_BLOCK, enabled=Flag(False)),
    "elasticity": refused_block(
        "Remove the block: a checkpoint resumes at any number of ranks, and torchrun restarts.", enabled=Flag(False)
    ),
    **dict.fromkeys(("curriculum_learning", "data_efficiency"), refused_block(_OUT, enabled=Flag(False))),
    "compression_training": refused_block(
        _OUT,
        layer_reduction=_SWITCH,
        **{name: Block(free=True, keys={"shared_parameters": _SWITCH}) for name in _TECHNIQUES.split()},
    ),
    **dict.fromkeys(("quantize_training", "weight_quantization"), refused_block(_OUT)),
    "eigenvalue": refused_block(_OUT, enabled=Flag(False)),
    "progressive_layer_drop": refused_block(_OUT, enabled=Flag(False)),
    "sparse_attention": refused_block("Remove the block and choose the attention in the model's configuration."),
    "nebula": refused_block(_OWN_FILES, enabled=Flag(False)),
    "datastates_ckpt": refused_block(_OWN_FILES),
    "hybrid_engine": refused_block("Remove the block: generate works on the sharded model.", enabled=Flag(False)),
    "tensor_parallel": refused_block(
        "Remove the block, or set autotp_size to 1: ranks share data only.",
        autotp_size=Count(1),
        tp_size=Count(1),
        tp=_TP_SIZE,
        tensor_parallel=_TP_SIZE,
    ),
    "expert_parallel": refused_block(
        "Remove the block: experts are sharded like other parameters.", enabled=Flag(False)
    ),
}

_TOP: dict[str, Entry] = {
    **keys_of(ResolvedConfig),
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": Alias(target="bf16"),
    "amp": AMP,
    "torch_autocast": TORCH_AUTOCAST,
    "data_types": DATA_TYPES,
    ZERO: Block(always=True, keys=ZERO_KEYS),
    "aio": AIO,
    FORCE: Flag(
        True,
        when=(OPTIMIZER_ON_HOST,),
        help="Refuse an optimizer that the native Adam cannot replace on the CPU; false runs any of them in torch.",
    ),
    "sparse_gradients": Flag(False, refused=_DROP),
    "sequence_parallel_size": Count(1, low=1, refused=_DROP),
    "graph_harvesting": Flag(False, refused=_DROP),
    "seq_parallel_communication_data_type": DType(no_effect="there is no sequence parallelism"),
    "disable_allgather": Flag(False, no_effect="it is not read by DeepSpeed either"),
    "disable_python_gc": Flag(False, no_effect="Python's garbage collector is left alone"),
    "log_level": Key(no_effect="use the logging module"),
    "vocabulary_size": Count(low=1, no_effect="the model knows it"),
    "use_data_before_expert_parallelism": Flag(False, no_effect="there is no expert parallelism"),
    "activation_checkpointing": Block(
        always=True,
        keys={
            **keys_of(ActivationCheckpointing),
            "nvme_path": Text(
                refused='Remove it, and write "cpu_checkpointing": true to keep inputs in the host\'s memory.'
            ),
        },
    ),
    "checkpoint": CHECKPOINT,
    "flops_profiler": FLOPS_PROFILER,
    "timers": Block(
        keys={
            "throughput": Block(
                keys={
                    "enabled": Flag(  # None: on
                        None, when=(PRINTS,), help="Add the throughput and the memory to the lines of steps_per_print."
                    ),
                    "synchronized": Flag(True, no_effect="times are the device's own, taken without waiting for it"),
                }
            )
        }
    ),
    "compile": Block(
        free=True,
        keys={"deepcompile": Flag(False, refused=_COMPILE), "passes": Texts(refused=_COMPILE)},
        no_effect="torch.compile is applied by the script or Trainer",
    ),
    **REFUSED_BLOCKS,
}

# TRL puts these beside the blocks, for a reference model. DeepSpeed reads no such keys.
UNREAD = frozenset(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
)


@cache
def root() -> Block:
    """All keys, as one block."""
    declared = [import_module(module).BLOCKS for module in DECLARED]
    return Block(always=True, keys={**_TOP, **{name: block for blocks in declared for name, block in blocks.items()}})


def typed_blocks() -> list[tuple[str, TypedBlock]]:
    """The blocks whose `type` names a class, by name."""
    return [(name, block) for name, block in root().keys.items() if isinstance(block, TypedBlock)]


def help_of(path: str) -> str:
    """The sentence that says what the key at a dotted path does; "" where there is no such key, or nothing to say."""
    entry = find(root(), path)
    return entry.help if isinstance(entry, Key) else ""


# ---------------------------------------------------------------- what becomes of each key
OBEYED = "obeyed"
NOTHING_TO_DO = "taken, nothing to do"
REFUSED = "refused when on"
OTHER_NAME = "another name"


@dataclass(frozen=True)
class KeyStatus:
    """The answer to "is it obeyed, taken, or refused?": one of the four words above.

    `reason` says what an obeyed key does, why there is nothing to do for another, or what to do instead.
    """

    verdict: str
    reason: str


def status(entry: Entry) -> KeyStatus:
    """The status of a key, or of all of a block."""
    if isinstance(entry, Alias):
        return KeyStatus(OTHER_NAME, f"of {entry.target}")
    if entry.no_effect:
        return KeyStatus(NOTHING_TO_DO, entry.no_effect)
    if isinstance(entry, Choice) and entry.offered:
        refused = [name for name in entry.choices if name not in entry.offered]
        return KeyStatus(OBEYED, f"{entry.help} Refused are {', '.join(refused)}.")
    if entry.refused:
        return KeyStatus(REFUSED, entry.refused)
    return KeyStatus(OBEYED, "" if isinstance(entry, Block) else entry.help)


def statuses(block: Block | None = None, prefix: str = "") -> Iterator[tuple[str, KeyStatus]]:
    """Every key with its status. A block that is refused stands for all that is inside."""
    for name, entry in (block or root()).keys.items():
        if not isinstance(entry, Block) or entry.refused or entry.no_effect:
            yield f"{prefix}{name}", status(entry)
        if isinstance(entry, Block) and not entry.refused:
            yield from statuses(entry, f"{prefix}{name}.")
