"""Every key of the configuration at its place, with DeepSpeed's names and defaults: ROOT.

A key is obeyed unless its row is marked `refused` or `no_effect`. Keys that are obeyed and whose
value is a field of the resolved configuration are declared there, in `resolved.py`; the others here.
"""

from __future__ import annotations

from hf_zero.config.conditions import (
    ANY_DISK,
    FORCE,
    IN_PIPELINE,
    OPTIMIZER_ON_HOST,
    PRINTS,
    SCALED_LEVEL,
    ZERO,
)
from hf_zero.config.optimizers import (
    OPTIMIZER_PARAMS,
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    SCHEDULER_PARAMS,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
)
from hf_zero.config.precision import LossScaling
from hf_zero.config.resolved import (
    Aio,
    CheckpointSection,
    FlopsProfilerSection,
    OffloadOptimizer,
    PipelineSection,
    ResolvedConfig,
    ZeroSection,
)
from hf_zero.config.schema import (
    Alias,
    Block,
    Entry,
    Key,
    anything,
    choice,
    count,
    dtype,
    flag,
    no_effect,
    only,
    real,
    refused,
    refused_block,
    rows_of,
    texts,
)

_FP32_MASTERS = "Remove it: masters are kept in fp32."
_ZEROPP = "Remove it: parameters and gradients are exchanged in their own precision."
_ALL_RANKS = "Remove it: shards span all ranks."
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
    return Alias(target=f"{ZERO}.{device}.device", kind="bool", convert={True: "cpu", False: None})


# 16-bit training


FP16 = Block(
    always=True,
    keys={
        "enabled": flag(False, auto=True),
        "auto_cast": no_effect(flag(True, auto=True), "floating inputs are always cast to the type of the parameters"),
        **rows_of(LossScaling),
        "fp16_master_weights_and_grads": refused(flag(False, auto=True), _FP32_MASTERS),
    },
)

BF16 = Block(
    always=True,
    keys={
        "enabled": flag(False, auto=True),
        "immediate_grad_update": no_effect(flag(False, auto=True), "gradients are always taken as they are ready"),
        "check_grad_overflow": flag(True, auto=True),
        "bf16_master_weights_and_grads": refused(flag(False, auto=True), _FP32_MASTERS),
        "bf16_optimizer_states": refused(flag(False, auto=True), "Remove it: optimizer states are kept in fp32."),
    },
)

AMP = Block(
    keys={
        "enabled": flag(False, auto=True),
        "opt_level": choice("O1", "O0", "O1", "O2", "O3", auto=True),
        "loss_scale": only(anything(), SCALED_LEVEL),
        **dict.fromkeys(
            "cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights cast_model_outputs".split(),
            no_effect(anything(), _APEX),
        ),
        "num_losses": no_effect(count(1, low=1), _APEX),
        "verbosity": no_effect(count(1), _APEX),
        **dict.fromkeys(("min_loss_scale", "max_loss_scale"), no_effect(real(), _APEX)),
    }
)

TORCH_AUTOCAST = Block(
    keys={
        "enabled": flag(False),
        "dtype": dtype(),
        "lower_precision_safe_modules": no_effect(texts(), "torch's autocast decides by operation"),
    },
)

DATA_TYPES = Block(
    always=True,
    keys={
        "grad_accum_dtype": dtype(),
        "param_dtype": refused(dtype(), 'Remove it: "bf16": {"enabled": true} chooses the dtype of parameters.'),
        "buffer_dtype": refused(dtype(), "Remove it: buffers keep their dtype."),
        "keep_in_fp32_modules": no_effect(
            texts(auto=True), "buffers always keep their dtype; keep_fp32 names parameters"
        ),
    },
)


# ZeRO


ZERO_KEYS: dict[str, Entry] = {
    **rows_of(ZeroSection),
    "offload_optimizer": Block(
        always=True,
        keys={
            **rows_of(OffloadOptimizer),
            "super_offload": refused(flag(False, auto=True), "Remove it: updates run beside the forward."),
            "cpuadam_cores_perc": no_effect(
                real(0.8, high=1.0, auto=True),
                "the update takes the cores of this process over its local ranks; HF_ZERO_CPU_THREADS sets another "
                "number",
            ),
        },
    ),
    "contiguous_gradients": no_effect(flag(True, auto=True), _BY_LAYOUT),
    "use_multi_rank_bucket_allreduce": no_effect(flag(True, auto=True), _BY_LAYOUT),
    "compute_grad_norm": no_effect(flag(True, auto=True), "the norm is computed when it is asked for"),
    "load_from_fp32_weights": no_effect(
        flag(True, auto=True), "masters always come from the fp32 values where a checkpoint has them"
    ),
    "elastic_checkpoint": no_effect(flag(False, auto=True), _ANY_RANKS),
    "stage3_module_granularity_threshold": no_effect(count(0, auto=True), _WHOLE_LAYERS),
    "stage3_use_all_reduce_for_fetch_params": no_effect(flag(False, auto=True), _NO_COPY),
    "stage3_allgather_sequential": no_effect(flag(False, auto=True), _NO_COPY),
    "legacy_stage1": no_effect(flag(False, auto=True), "there is one stage 1"),
    "grad_hooks": no_effect(flag(True, auto=True), "gradients are always taken by hooks"),
    "round_robin_gradients": no_effect(flag(False, auto=True), "every rank owns a part of every bucket"),
    "parameter_alignment": no_effect(flag(False, auto=True), "parameters always start at 16-byte addresses"),
    "memory_efficient_linear": no_effect(flag(True, auto=True), "torch's linear is left as it is"),
    "pipeline_loading_checkpoint": no_effect(flag(False, auto=True), "a checkpoint is always read tensor by tensor"),
    "override_module_apply": no_effect(
        flag(True, auto=True), "parameters keep their shape, so apply needs no override"
    ),
    "log_trace_cache_warnings": no_effect(flag(False, auto=True), "the order of gathers is fixed, there is no trace"),
    "enable_sanity_checks": no_effect(flag(False, auto=True), "they are always on"),
    "save_muon_momentum_buffer_in_memory": no_effect(flag(False, auto=True), "it matters under offload only"),
    "leaf_module": Block(
        always=True, keys={name: no_effect(texts(), _WHOLE_LAYERS) for name in ("classes", "names", "name_suffixes")}
    ),
    "zenflow": refused_block(_DROP_BLOCK),
    "zero_hpz_partition_size": refused(count(1, auto=True), _ZEROPP),
    **{
        f"zero_quantized_{kind}": refused(flag(False, auto=True), _ZEROPP)
        for kind in ("weights", "nontrainable_weights", "gradients")
    },
    "zeropp_loco_param": refused_block(_ZEROPP),
    "mics_shard_size": refused(count(-1, low=-1, auto=True), _ALL_RANKS),
    "mics_hierarchical_params_gather": refused(flag(False, auto=True), _ALL_RANKS),
    # Names without the prefix, deprecated names, and a block that old files keep here.
    **{name: Alias(target=f"{ZERO}.stage3_{name}") for name in _WITHOUT_PREFIX},
    "stage3_gather_fp16_weights_on_model_save": Alias(target=f"{ZERO}.stage3_gather_16bit_weights_on_model_save"),
    "cpu_offload": _offload("offload_optimizer"),
    "cpu_offload_param": _offload("offload_param"),
    "cpu_offload_params": _offload("offload_param"),
    "cpu_offload_use_pin_memory": Alias(target=f"{ZERO}.offload_optimizer.pin_memory"),
    "aio": Alias(target="aio"),
}

AIO = Block(
    always=True,
    keys={
        **rows_of(Aio, ANY_DISK),
        "thread_count": Alias(target="aio.intra_op_parallelism"),
        "use_gds": refused(flag(False), _DROP),
    },
)


# The optimizer, checkpoints, and what is around them


OPTIMIZER = Block(
    keys={
        "type": Key(
            kind="choice",
            choices=OPTIMIZERS,
            offered=(*TORCH_OPTIMIZERS, *OWN_OPTIMIZERS),
            refused="Use AdamW, Adam, Lamb, Lion or SGD, which are right on shards.",
        ),
        "params": Block(keys=OPTIMIZER_PARAMS),
        "legacy_fusion": no_effect(flag(False), "torch's optimizers are used"),
    }
)

SCHEDULER = Block(
    keys={"type": Key(kind="choice", choices=SCHEDULERS), "params": Block(keys=SCHEDULER_PARAMS)},
)

FLOPS_PROFILER = Block(
    always=True,
    keys={
        **rows_of(FlopsProfilerSection),
        "recompute_fwd_factor": no_effect(real(0.0), "operations of the backward are counted, recomputation included"),
    },
)

CHECKPOINT = Block(
    always=True,
    keys={
        **rows_of(CheckpointSection),
        "load_universal": no_effect(flag(False), f"{_ANY_RANKS} and any stage"),
        "parallel_write": Block(always=True, keys={"pipeline_stage": refused(flag(False), _DROP)}),
        "checkpoint_serialization": no_effect(flag(True), "files are safetensors"),
        "writer": refused_block(_DROP_BLOCK),
    },
)

PIPELINE = Block(
    always=True,
    keys={
        **rows_of(PipelineSection, IN_PIPELINE),
        **dict.fromkeys(
            ("pipe_partitioned", "grad_partitioned"),
            no_effect(flag(True), "it is about layers that are split between ranks (tensor parallelism)"),
        ),
        "use_reentrant": no_effect(flag(True), "layers are recomputed with and without inputs that need gradients"),
    },
)

_SWITCH = Block(free=True, keys={"enabled": flag()})
_TECHNIQUES = "weight_quantization activation_quantization sparse_pruning row_pruning head_pruning channel_pruning"
_TP_SIZE = Block(free=True, keys={"tp_size": count(1)})

REFUSED_BLOCKS: dict[str, Entry] = {
    "msamp": refused_block('Use "bf16": {"enabled": true}.', enabled=flag()),
    "autotuning": refused_block(_DROP_BLOCK, enabled=flag()),
    "elasticity": refused_block(
        "Remove the block: a checkpoint resumes at any number of ranks, and torchrun restarts.", enabled=flag()
    ),
    **dict.fromkeys(("curriculum_learning", "data_efficiency"), refused_block(_OUT, enabled=flag())),
    "compression_training": refused_block(
        _OUT,
        layer_reduction=_SWITCH,
        **{name: Block(free=True, keys={"shared_parameters": _SWITCH}) for name in _TECHNIQUES.split()},
    ),
    **dict.fromkeys(("quantize_training", "weight_quantization"), refused_block(_OUT)),
    "eigenvalue": refused_block(_OUT, enabled=flag()),
    "progressive_layer_drop": refused_block(_OUT, enabled=flag()),
    "sparse_attention": refused_block("Remove the block and choose the attention in the model's configuration."),
    "nebula": refused_block(_OWN_FILES, enabled=flag()),
    "datastates_ckpt": refused_block(_OWN_FILES),
    "hybrid_engine": refused_block("Remove the block: generate works on the sharded model.", enabled=flag()),
    "tensor_parallel": refused_block(
        "Remove the block, or set autotp_size to 0: ranks share data only.",
        autotp_size=count(0),
        tp_size=count(1),
        tp=_TP_SIZE,
        tensor_parallel=_TP_SIZE,
    ),
    "expert_parallel": refused_block("Remove the block: experts are sharded like other parameters.", enabled=flag()),
}

ROOT = Block(
    always=True,
    keys={
        **rows_of(ResolvedConfig),
        "fp16": FP16,
        "bf16": BF16,
        "bfloat16": Alias(target="bf16"),
        "amp": AMP,
        "torch_autocast": TORCH_AUTOCAST,
        "data_types": DATA_TYPES,
        ZERO: Block(always=True, keys=ZERO_KEYS),
        "aio": AIO,
        "optimizer": OPTIMIZER,
        "scheduler": SCHEDULER,
        FORCE: only(flag(True), OPTIMIZER_ON_HOST),
        "managed_gradient_accumulation": refused(
            flag(True), "Remove it; engine.no_sync() skips the reduction where wanted."
        ),
        "sparse_gradients": refused(flag(False), _DROP),
        "sequence_parallel_size": refused(count(1, low=1), _DROP),
        "graph_harvesting": refused(flag(False), _DROP),
        "seq_parallel_communication_data_type": no_effect(dtype(), "there is no sequence parallelism"),
        "disable_allgather": no_effect(flag(False), "it is not read by DeepSpeed either"),
        "disable_python_gc": no_effect(flag(False), "Python's garbage collector is left alone"),
        "log_level": no_effect(anything(), "use the logging module"),
        "vocabulary_size": no_effect(count(low=1), "the model knows it"),
        "use_data_before_expert_parallelism": no_effect(flag(False), "there is no expert parallelism"),
        "checkpoint": CHECKPOINT,
        "flops_profiler": FLOPS_PROFILER,
        "pipeline": PIPELINE,
        "timers": Block(
            keys={
                "throughput": Block(
                    keys={
                        "enabled": only(flag(None), PRINTS),  # None: on
                        "synchronized": no_effect(
                            flag(True), "times are the device's own, taken without waiting for it"
                        ),
                    }
                )
            }
        ),
        "compile": Block(
            free=True,
            keys={"deepcompile": refused(flag(False), _COMPILE), "passes": refused(texts(), _COMPILE)},
            no_effect="torch.compile is applied by the script or Trainer",
        ),
        **REFUSED_BLOCKS,
    },
)
