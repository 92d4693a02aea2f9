"""What this release does with each key: which it refuses when on, and which have nothing to do.

A key in neither table is obeyed. To announce a new feature, remove its row from NOT_YET.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.optimizers import OTHER_OPTIMIZERS

Test = Callable[[Any], bool]


def _true(value: Any) -> bool:
    return value is True


def _false(value: Any) -> bool:
    return value is False


def _given(value: Any) -> bool:
    """Present; an empty block or list is not."""
    return value not in (None, {}, [], ())


def _enabled(value: Any) -> bool:
    """A block whose switch `enabled` is on."""
    return isinstance(value, Mapping) and value.get("enabled") is True


def _not_disabled(value: Any) -> bool:
    """A block that is on by being there, unless its `enabled` is false."""
    return isinstance(value, Mapping) and bool(value) and value.get("enabled") is not False


def _any_enabled(value: Any) -> bool:
    """A block in which any switch `enabled` is on, at any depth."""
    return isinstance(value, Mapping) and (value.get("enabled") is True or any(map(_any_enabled, value.values())))


def _above(limit: int) -> Test:
    return lambda value: isinstance(value, int) and value > limit


def _one_of(*names: str) -> Test:
    return lambda value: value in names


def _tensor_parallel(value: Any) -> bool:
    return isinstance(value, Mapping) and (
        _above(0)(value.get("autotp_size"))
        or _above(1)(value.get("tp_size"))
        or any(isinstance(inner, Mapping) and _above(1)(inner.get("tp_size")) for inner in value.values())
    )


@dataclass(frozen=True)
class NotYet:
    """A key or block that is refused when `on(value)`; `remedy` says what to do instead."""

    path: str
    on: Test
    remedy: str
    values: tuple[str, ...] = ()  # of a key that is obeyed but for these


_DROP = "Remove it, or set it to its default."
_ZEROPP = "Remove it: parameters and gradients are exchanged in their own precision."
_LOGGING = "Remove it; under Trainer, report_to does the logging."
_OUT = "Remove the block: hf_zero shards training and leaves this to other tools."

NOT_YET: tuple[NotYet, ...] = (
    NotYet("fp16.fp16_master_weights_and_grads", _true, "Remove it: masters are kept in fp32."),
    NotYet("bf16.bf16_master_weights_and_grads", _true, "Remove it: masters are kept in fp32."),
    NotYet("bf16.bf16_optimizer_states", _true, "Remove it: optimizer states are kept in fp32."),
    NotYet("msamp", _enabled, 'Use "bf16": {"enabled": true}.'),
    NotYet("zero_optimization.offload_optimizer.super_offload", _true, "Remove it: updates run beside the forward."),
    NotYet("zero_optimization.zenflow", _given, "Remove the block."),
    NotYet("zero_optimization.zero_hpz_partition_size", _above(1), _ZEROPP),
    NotYet("zero_optimization.zero_quantized_weights", _true, _ZEROPP),
    NotYet("zero_optimization.zero_quantized_nontrainable_weights", _true, _ZEROPP),
    NotYet("zero_optimization.zero_quantized_gradients", _true, _ZEROPP),
    NotYet("zero_optimization.zeropp_loco_param", _given, _ZEROPP),
    NotYet("zero_optimization.mics_shard_size", _above(0), "Remove it: shards span all ranks."),
    NotYet("zero_optimization.mics_hierarchical_params_gather", _true, "Remove it: shards span all ranks."),
    NotYet(
        "optimizer.type",
        _one_of(*OTHER_OPTIMIZERS),
        "Use AdamW, Adam, Lamb, Lion or SGD, which are right on shards.",
        OTHER_OPTIMIZERS,
    ),
    NotYet("optimizer.params.per_head_muon", _true, "Remove it: Muon takes whole matrices."),
    NotYet("sparse_gradients", _true, _DROP),
    NotYet("managed_gradient_accumulation", _false, "Remove it; engine.no_sync() skips the reduction where wanted."),
    NotYet("sequence_parallel_size", _above(1), _DROP),
    NotYet("graph_harvesting", _true, _DROP),
    NotYet("data_types.param_dtype", _given, 'Remove it: "bf16": {"enabled": true} chooses the dtype of parameters.'),
    NotYet("data_types.buffer_dtype", _given, "Remove it: buffers keep their dtype."),
    NotYet("aio.use_gds", _true, _DROP),
    NotYet(
        "checkpoint.use_node_local_storage", _true, "Save to a folder that all nodes share (save_on_each_node=False)."
    ),
    NotYet("checkpoint.parallel_write.pipeline_stage", _true, _DROP),
    NotYet("checkpoint.writer", _given, "Remove the block."),
    NotYet("activation_checkpointing.partition_activations", _true, "Use gradient_checkpointing, without this block."),
    NotYet("activation_checkpointing.cpu_checkpointing", _true, "Use gradient_checkpointing, without this block."),
    NotYet(
        "activation_checkpointing.contiguous_memory_optimization", _true, "Use gradient_checkpointing, without it."
    ),
    NotYet("flops_profiler", _enabled, "Use torch.profiler or torch.utils.flop_counter."),
    NotYet("comms_logger", _enabled, "Use torch.profiler: collectives stand in it under their unit's name."),
    NotYet("tensorboard", _enabled, _LOGGING),
    NotYet("wandb", _enabled, _LOGGING),
    NotYet("csv_monitor", _enabled, _LOGGING),
    NotYet("comet", _enabled, _LOGGING),
    NotYet("autotuning", _enabled, "Remove the block."),
    NotYet(
        "elasticity", _enabled, "Remove the block: a checkpoint resumes at any number of ranks, and torchrun restarts."
    ),
    NotYet("curriculum_learning", _enabled, _OUT),
    NotYet("data_efficiency", _enabled, _OUT),
    NotYet("compression_training", _any_enabled, _OUT),
    NotYet("quantize_training", _not_disabled, _OUT),
    NotYet("weight_quantization", _not_disabled, _OUT),
    NotYet("eigenvalue", _enabled, _OUT),
    NotYet("progressive_layer_drop", _enabled, _OUT),
    NotYet("sparse_attention", _given, "Remove the block and choose the attention in the model's configuration."),
    NotYet("nebula", _enabled, "Remove the block: checkpoints are written by the ranks."),
    NotYet("datastates_ckpt", _given, "Remove the block: checkpoints are written by the ranks."),
    NotYet("hybrid_engine", _enabled, "Remove the block: generate works on the sharded model."),
    NotYet("compile.deepcompile", _true, "Remove it; torch.compile works on the layers of the model."),
    NotYet("compile.passes", _given, "Remove it; torch.compile works on the layers of the model."),
    NotYet("tensor_parallel", _tensor_parallel, "Remove the block, or set autotp_size to 0: ranks share data only."),
    NotYet("expert_parallel", _enabled, "Remove the block: experts are sharded like other parameters."),
    NotYet("pipeline", _given, "Remove the block: ranks share data only."),
)

_BY_LAYOUT = "the flat parameters give this by their layout"
_NO_TRACE = "the order of gathers is fixed, there is no trace"
_OFFLOAD_ONLY = "it matters under offload only"

_APEX = (
    "cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights cast_model_outputs num_losses verbosity "
    "min_loss_scale max_loss_scale"
).split()

# Keys that are taken and have nothing to do here, with the reason. A value other than the default gives a notice.
NO_EFFECT: dict[str, str] = {
    "zero_optimization.contiguous_gradients": _BY_LAYOUT,
    "zero_optimization.use_multi_rank_bucket_allreduce": _BY_LAYOUT,
    "zero_optimization.round_robin_gradients": "every rank owns a part of every bucket",
    "zero_optimization.parameter_alignment": "parameters always start at 16-byte addresses",
    "zero_optimization.compute_grad_norm": "the norm is computed when it is asked for",
    "zero_optimization.load_from_fp32_weights": "masters always come from the fp32 values where a checkpoint has them",
    "zero_optimization.elastic_checkpoint": "every checkpoint loads at any number of ranks",
    "zero_optimization.stage3_module_granularity_threshold": "units are whole layers",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "a gather needs no copy, so there is nothing to save",
    "zero_optimization.stage3_allgather_sequential": "a gather needs no copy, so there is nothing to save",
    "zero_optimization.leaf_module.classes": "units are whole layers",
    "zero_optimization.leaf_module.names": "units are whole layers",
    "zero_optimization.leaf_module.name_suffixes": "units are whole layers",
    "zero_optimization.legacy_stage1": "there is one stage 1",
    "zero_optimization.grad_hooks": "gradients are always taken by hooks",
    "zero_optimization.memory_efficient_linear": "torch's linear is left as it is",
    "zero_optimization.pipeline_loading_checkpoint": "a checkpoint is always read tensor by tensor",
    "zero_optimization.override_module_apply": "parameters keep their shape, so apply needs no override",
    "zero_optimization.log_trace_cache_warnings": _NO_TRACE,
    "zero_optimization.enable_sanity_checks": "they are always on",
    "zero_optimization.save_muon_momentum_buffer_in_memory": _OFFLOAD_ONLY,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": (
        "the update takes the cores of this process over its local ranks; HF_ZERO_CPU_THREADS sets another number"
    ),
    "bf16.immediate_grad_update": "gradients are always taken as they are ready",
    "fp16.auto_cast": "floating inputs are always cast to the type of the parameters",
    "torch_autocast.lower_precision_safe_modules": "torch's autocast decides by operation",
    **{f"amp.{name}": "amp levels are run by torch, with the bounds of its own gradient scaler" for name in _APEX},
    "optimizer.legacy_fusion": "torch's optimizers are used",
    "optimizer.params.cuda_aware": "signs travel through the process group",
    "optimizer.params.comm_backend_name": "signs travel through the process group",
    "seq_parallel_communication_data_type": "there is no sequence parallelism",
    "data_types.keep_in_fp32_modules": "buffers always keep their dtype; keep_fp32 names parameters",
    "disable_allgather": "it is not read by DeepSpeed either",
    "disable_python_gc": "Python's garbage collector is left alone",
    "log_level": "use the logging module",
    "vocabulary_size": "the model knows it",
    "use_data_before_expert_parallelism": "there is no expert parallelism",
    "checkpoint.load_universal": "every checkpoint loads at any number of ranks and any stage",
    "checkpoint.tag_validation": "all ranks write one manifest",
    "checkpoint.checkpoint_serialization": "files are safetensors",
    "activation_checkpointing.number_checkpoints": "gradient_checkpointing of the model is used",
    "activation_checkpointing.synchronize_checkpoint_boundary": "gradient_checkpointing of the model is used",
    "activation_checkpointing.profile": "gradient_checkpointing of the model is used",
    "compile": "torch.compile is applied by the script or Trainer",
    "timers.throughput.synchronized": "times are the device's own, taken without waiting for it",
}
