"""The rows of DeepSpeed's configuration that belong to training under ZeRO, with DeepSpeed's names and defaults.

hf_zero's own keys stand among them: desync_timeout, keep_fp32, gather_for_generation, and delayed_update and
delayed_update_start in offload_optimizer. Blocks of tools around training are in `keys_more.py`.
"""

from __future__ import annotations

import sys

from hf_zero.config.keys_more import MORE
from hf_zero.config.optimizers import (
    OPTIMIZER_PARAMS,
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    SCHEDULER_PARAMS,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
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
    interval,
    real,
    text,
    texts,
)

ZERO = "zero_optimization"
OFFLOAD_DEVICES = ("none", "cpu", "nvme")


def _stage3(name: str) -> Alias:
    """DeepSpeed takes these names with and without the prefix."""
    return Alias(target=f"{ZERO}.stage3_{name}")


FP16 = Block(
    always=True,
    keys={
        "enabled": flag(False, auto=True),
        "auto_cast": flag(False, auto=True),
        "loss_scale": real(0.0, auto=True),
        "initial_scale_power": count(16, auto=True),
        "loss_scale_window": count(1000, low=1, auto=True),
        "hysteresis": count(2, low=1, auto=True),
        "consecutive_hysteresis": flag(False, auto=True),
        "min_loss_scale": count(1, auto=True),
        "fp16_master_weights_and_grads": flag(False, auto=True),
    },
)

BF16 = Block(
    always=True,
    keys={
        "enabled": flag(False, auto=True),
        "immediate_grad_update": flag(False, auto=True),
        "check_grad_overflow": flag(True, auto=True),
        "bf16_master_weights_and_grads": flag(False, auto=True),
        "bf16_optimizer_states": flag(False, auto=True),
    },
)

OFFLOAD_PARAM = Block(
    always=True,
    keys={
        "device": choice("none", *OFFLOAD_DEVICES),
        "nvme_path": text(),
        "buffer_count": count(5, low=1, auto=True),
        "buffer_size": count(1e8, low=1, auto=True),
        "max_in_cpu": count(1e9, auto=True),
        "pin_memory": flag(True, auto=True),
    },
)

OFFLOAD_OPTIMIZER = Block(
    always=True,
    keys={
        "device": choice("none", *OFFLOAD_DEVICES),
        "nvme_path": text(),
        "buffer_count": count(4, low=1, auto=True),
        "pin_memory": flag(True, auto=True),
        "pipeline_read": flag(True, auto=True),  # DeepSpeed: false; here the staging pool bounds the memory either way
        "pipeline_write": flag(True, auto=True),
        "fast_init": flag(False, auto=True),
        "ratio": real(1.0, high=1.0, auto=True),
        "super_offload": flag(False, auto=True),
        "cpuadam_cores_perc": real(0.8, high=1.0, auto=True),
        "delayed_update": flag(False),
        "delayed_update_start": count(0),
    },
)

LEAF_MODULE = Block(always=True, keys={"classes": texts(), "names": texts(), "name_suffixes": texts()})

ZENFLOW = Block(
    keys={
        "topk_ratio": real(0.1, above=0.0, below=1.0),
        "select_strategy": choice("auto", "auto", "step", "epoch"),
        "select_interval": count(low=1, auto=True),
        "update_interval": count(low=1, auto=True),
        "overlap_step": flag(False),
        "offload": flag(False),
        "auto_ratio": real(0.99, high=1.0),
        "full_warm_up_rounds": count(0),
        "pt_reserved_cores_perc": real(0.5, high=1.0),
        "steps_per_epoch": count(),
    },
)

ZERO_KEYS: dict[str, Entry] = {
    "stage": count(0, high=3),
    "contiguous_gradients": flag(True, auto=True),
    "reduce_scatter": flag(True, auto=True),
    "reduce_bucket_size": count(5e8, low=1, auto=True),
    "use_multi_rank_bucket_allreduce": flag(True, auto=True),
    "allgather_partitions": flag(True, auto=True),
    "allgather_bucket_size": count(5e8, low=1, auto=True),
    "overlap_comm": flag(True, auto=True),  # DeepSpeed: at stage 3 only; here it costs no buffers
    "compute_grad_norm": flag(True, auto=True),
    "load_from_fp32_weights": flag(True, auto=True),
    "elastic_checkpoint": flag(False, auto=True),
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "zenflow": ZENFLOW,
    "sub_group_size": count(1e9, auto=True),
    "stage3_prefetch_bucket_size": count(5e7, auto=True),
    "stage3_param_persistence_threshold": count(1e5, auto=True),
    "stage3_model_persistence_threshold": count(sys.maxsize, auto=True),
    "stage3_max_live_parameters": count(1e9, auto=True),
    "stage3_max_reuse_distance": count(0, auto=True),  # DeepSpeed: 1e9, which keeps a model of that size whole
    "stage3_gather_16bit_weights_on_model_save": flag(None, auto=True),
    "stage3_module_granularity_threshold": count(0, auto=True),
    "stage3_use_all_reduce_for_fetch_params": flag(False, auto=True),
    "stage3_allgather_sequential": flag(False, auto=True),
    "ignore_unused_parameters": flag(True, auto=True),
    "legacy_stage1": flag(False, auto=True),
    "grad_hooks": flag(True, auto=True),
    "round_robin_gradients": flag(False, auto=True),
    "parameter_alignment": flag(False, auto=True),
    "zero_hpz_partition_size": count(1, auto=True),
    "zero_quantized_weights": flag(False, auto=True),
    "zero_quantized_nontrainable_weights": flag(False, auto=True),
    "zero_quantized_gradients": flag(False, auto=True),
    "zeropp_loco_param": Block(keys={"err_beta": real(0.8), "reset_T": count(1024)}),
    "mics_shard_size": count(-1, low=-1, auto=True),
    "mics_hierarchical_params_gather": flag(False, auto=True),
    "memory_efficient_linear": flag(True, auto=True),
    "pipeline_loading_checkpoint": flag(False, auto=True),
    "override_module_apply": flag(True, auto=True),
    "log_trace_cache_warnings": flag(False, auto=True),
    "enable_sanity_checks": flag(False, auto=True),
    "save_muon_momentum_buffer_in_memory": flag(False, auto=True),
    "leaf_module": LEAF_MODULE,
    # Names without the prefix, deprecated names, and a block that old files keep here.
    "prefetch_bucket_size": _stage3("prefetch_bucket_size"),
    "param_persistence_threshold": _stage3("param_persistence_threshold"),
    "model_persistence_threshold": _stage3("model_persistence_threshold"),
    "max_live_parameters": _stage3("max_live_parameters"),
    "max_reuse_distance": _stage3("max_reuse_distance"),
    "gather_16bit_weights_on_model_save": _stage3("gather_16bit_weights_on_model_save"),
    "stage3_gather_fp16_weights_on_model_save": _stage3("gather_16bit_weights_on_model_save"),
    "module_granularity_threshold": _stage3("module_granularity_threshold"),
    "use_all_reduce_for_fetch_params": _stage3("use_all_reduce_for_fetch_params"),
    "allgather_sequential": _stage3("allgather_sequential"),
    "cpu_offload": Alias(target=f"{ZERO}.offload_optimizer.device", kind="bool", convert={True: "cpu", False: None}),
    "cpu_offload_param": Alias(target=f"{ZERO}.offload_param.device", kind="bool", convert={True: "cpu", False: None}),
    "cpu_offload_params": Alias(
        target=f"{ZERO}.offload_param.device", kind="bool", convert={True: "cpu", False: None}
    ),
    "cpu_offload_use_pin_memory": Alias(target=f"{ZERO}.offload_optimizer.pin_memory"),
    "aio": Alias(target="aio"),
}

AIO = Block(
    always=True,
    keys={
        "block_size": count(1048576, low=1),
        "queue_depth": count(8, low=1),
        "intra_op_parallelism": count(1, low=1),
        "thread_count": Alias(target="aio.intra_op_parallelism"),
        "single_submit": flag(False),
        "overlap_events": flag(True),
        "use_gds": flag(False),
    },
)

OPTIMIZER = Block(
    keys={
        "type": Key(kind="choice", choices=OPTIMIZERS, offered=(*TORCH_OPTIMIZERS, *OWN_OPTIMIZERS)),
        "params": Block(keys=OPTIMIZER_PARAMS),
        "legacy_fusion": flag(False),
    }
)

SCHEDULER = Block(
    keys={"type": Key(kind="choice", choices=SCHEDULERS), "params": Block(keys=SCHEDULER_PARAMS)},
)

WRITER: dict[str, Entry] = {
    "type": choice("FAST", "MOCK", "PYTHON", "FAST"),
    "decoupled": flag(False),
    "io_buffer_size": count(64 * 1024 * 1024, low=1),
    "io_buffer_double": flag(True),
    "show_statistics": flag(False),
    "data_parallel": choice(None, "REPLICA", "SOCKET", "MACHINE"),
    "io_multiplier": count(1, low=1),
}

CHECKPOINT = Block(
    always=True,
    keys={
        "tag_validation": choice("Warn", "Ignore", "Warn", "Fail"),
        "load_universal": flag(False),
        "use_node_local_storage": flag(False),
        "parallel_write": Block(always=True, keys={"pipeline_stage": flag(False)}),
        "checkpoint_serialization": flag(True),
        "writer": Block(keys=WRITER),
    },
)

DATA_TYPES = Block(
    always=True,
    keys={
        "grad_accum_dtype": dtype(),
        "param_dtype": dtype(),
        "buffer_dtype": dtype(),
        "keep_in_fp32_modules": texts(auto=True),
    },
)

ACTIVATION_CHECKPOINTING = Block(
    always=True,
    keys={
        "partition_activations": flag(False),
        "number_checkpoints": count(low=1),
        "contiguous_memory_optimization": flag(False),
        "synchronize_checkpoint_boundary": flag(False),
        "profile": flag(False),
        "cpu_checkpointing": flag(False),
    },
)

ROOT = Block(
    always=True,
    keys={
        "train_batch_size": count(low=1, auto=True),
        "train_micro_batch_size_per_gpu": count(low=1, auto=True),
        "gradient_accumulation_steps": count(low=1, auto=True),
        "managed_gradient_accumulation": flag(True),
        "gradient_clipping": real(0.0, auto=True),
        "fp16": FP16,
        "bf16": BF16,
        "bfloat16": Alias(target="bf16"),
        ZERO: Block(always=True, keys=ZERO_KEYS),
        "zero_allow_untested_optimizer": flag(False),
        "zero_force_ds_cpu_optimizer": flag(True),
        "optimizer": OPTIMIZER,
        "scheduler": SCHEDULER,
        "communication_data_type": dtype(),
        "seq_parallel_communication_data_type": dtype(),
        "prescale_gradients": flag(False),
        "gradient_predivide_factor": real(1.0, low=None, above=0.0),
        "gradient_allreduce_op": choice("mean", "mean", "sum"),
        "data_types": DATA_TYPES,
        "sparse_gradients": flag(False),
        "steps_per_print": interval(),
        "wall_clock_breakdown": flag(False),
        "memory_breakdown": flag(False),
        "dump_state": flag(False),
        "disable_allgather": flag(False),
        "disable_python_gc": flag(False),
        "dataloader_drop_last": flag(False),
        "log_level": anything(),
        "vocabulary_size": count(low=1),
        "sequence_parallel_size": count(1, low=1),
        "use_data_before_expert_parallelism": flag(False),
        "graph_harvesting": flag(False),
        "aio": AIO,
        "checkpoint": CHECKPOINT,
        "activation_checkpointing": ACTIVATION_CHECKPOINTING,
        "desync_timeout": real(600.0, low=None, above=0.0),
        "keep_fp32": texts(),
        "gather_for_generation": choice("auto", "auto", "once", "stream"),
        **MORE,
    },
)
