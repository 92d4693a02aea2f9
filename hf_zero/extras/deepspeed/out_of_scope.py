"""DeepSpeed's features that hf_zero does not have, by their import paths, and what to use in their place."""

from __future__ import annotations

_KERNELS = "torch's scaled_dot_product_attention, which models of transformers call"
_GENERATE = "init_inference without kernels, model.generate, or vLLM"
# Path below deepspeed, of a module or of a name -> what to use.
_INSTEAD = {
    "DeepSpeedTransformerConfig": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "autotuning": "hf-zero estimate and hf-zero bench",
    "checkpoint.DeepSpeedCheckpoint": "hf-zero convert from-deepspeed",
    "checkpoint.ZeROCheckpoint": "hf-zero convert from-deepspeed",
    "compression": "torchao",
    "elasticity": "torchrun --nnodes MIN:MAX; every checkpoint loads at any number of ranks",
    "inference": _GENERATE,
    "linear": "PEFT's LoRA",
    "model_implementations": _GENERATE,
    "module_inject": _GENERATE,
    "moe": "the MoE models of transformers, which stage 3 shards",
    "monitor": "the blocks tensorboard, wandb, comet and csv_monitor of the JSON",
    "ops.adam.ZenFlowCPUAdam": "offload_optimizer.delayed_update of the JSON",
    "ops.adam.ZenFlowSelectiveAdamW": "offload_optimizer.delayed_update of the JSON",
    "ops.deepspeed4science": _KERNELS,
    "ops.fp_quantizer": "torchao",
    "ops.op_builder.EvoformerAttnBuilder": _KERNELS,
    "ops.op_builder.FPQuantizerBuilder": "torchao",
    "ops.op_builder.FlashAttentionBuilder": _KERNELS,
    "ops.op_builder.GDSBuilder": "AsyncIOBuilder",
    "ops.op_builder.InferenceBuilder": _GENERATE,
    "ops.op_builder.InferenceCoreBuilder": _GENERATE,
    "ops.op_builder.InferenceCutlassBuilder": _GENERATE,
    "ops.op_builder.QuantizerBuilder": "torchao",
    "ops.op_builder.RaggedOpsBuilder": _GENERATE,
    "ops.op_builder.RaggedUtilsBuilder": _GENERATE,
    "ops.op_builder.RandomLTDBuilder": "a sampler or a dataset of your own",
    "ops.op_builder.SparseAttnBuilder": "torch.nn.attention.flex_attention",
    "ops.op_builder.SpatialInferenceBuilder": _GENERATE,
    "ops.op_builder.StochasticTransformerBuilder": _KERNELS,
    "ops.op_builder.TransformerBuilder": _KERNELS,
    "ops.quantizer": "torchao",
    "ops.sparse_attention": "torch.nn.attention.flex_attention",
    "ops.transformer": _KERNELS,
    "profiling": "the block flops_profiler of the JSON, and hf-zero profile",
    "replace_transformer_layer": _GENERATE,
    "revert_transformer_layer": _GENERATE,
    "runtime.data_pipeline": "a sampler or a dataset of your own",
    "runtime.domino": "ZeRO without tensor parallelism",
    "runtime.sequence_parallel": "torch.distributed.tensor.experimental.context_parallel, without hf_zero",
    "runtime.tensor_parallel": "ZeRO stage 3",
    "sequence": "torch.distributed.tensor.experimental.context_parallel, without hf_zero",
    "tp_model_init": "ZeRO stage 3",
}


def refuse(path: str) -> None:
    """Raise NotImplementedError if `path`, as "moe.layer", is out of scope or inside of what is."""
    for feature, instead in _INSTEAD.items():
        if path == feature or path.startswith(f"{feature}."):
            raise NotImplementedError(f"hf_zero has no deepspeed.{feature}: use {instead}.")
