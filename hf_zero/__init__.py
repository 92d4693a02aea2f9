"""ZeRO for Hugging Face training: replace `deepspeed=` by `zero=`, keep the JSON."""

from __future__ import annotations

from hf_zero import logs as logs
from hf_zero import pipeline as pipeline
from hf_zero.engine import parts
from hf_zero.extras.deepspeed import names
from hf_zero.lazy import lazy_names

__version__ = "0.1.0"
"""The version of hf_zero, as in its package's metadata."""

# Loaded at first use, so that the command line and the offline tools start without torch.
_EXPORTS = {
    "CheckpointError": "hf_zero.errors",
    "ConfigError": "hf_zero.errors",
    "DivergenceError": "hf_zero.errors",
    "NativeError": "hf_zero.errors",
    "OffloadError": "hf_zero.errors",
    "StateError": "hf_zero.errors",
    "ZeroConfig": "hf_zero.config",
    "ZeroEngine": "hf_zero.engine.engine",
    "PipelineModule": "hf_zero.extras.pipeline.module",
    "as_deepspeed": "hf_zero.extras.deepspeed.facade",
    "engine_of": "hf_zero.engine.engine",
    "get_accelerator": "hf_zero.extras.deepspeed.accelerator",
    "add_config_arguments": "hf_zero.engine.script_arguments",
    "init_distributed": "hf_zero.distributed.processes",
    "initialize": "hf_zero.engine.initialize",
    "shard": "hf_zero.engine.initialize",
    "set_verbosity": "hf_zero.logs",
    "set_verbosity_debug": "hf_zero.logs",
    "set_verbosity_error": "hf_zero.logs",
    "set_verbosity_info": "hf_zero.logs",
    "set_verbosity_warning": "hf_zero.logs",
    "full_grad": "hf_zero.access.full",
    "full_optimizer_state": "hf_zero.access.full",
    "full_param": "hf_zero.access.full",
    "gathered_params": "hf_zero.access.full",
    "LocalPiece": "hf_zero.access.local",
    "local_grad": "hf_zero.access.local",
    "local_optimizer_state": "hf_zero.access.local",
    "local_param": "hf_zero.access.local",
    "set_full_grad": "hf_zero.access.full",
    "set_full_optimizer_state": "hf_zero.access.full",
    "set_full_param": "hf_zero.access.full",
    "set_local_grad": "hf_zero.access.local",
    "set_local_optimizer_state": "hf_zero.access.local",
    "set_local_param": "hf_zero.access.local",
    "update_full_grads": "hf_zero.access.full",
    "ShardedEMA": "hf_zero.access.ema",
    "copy_weights": "hf_zero.access.copy_weights",
    "load_fp32_into": "hf_zero.access.load_fp32",
    "load_fp32_state_dict": "hf_zero.checkpoint.lazy_state_dict",
    "see_memory_usage": "hf_zero.extras.deepspeed.utils",
    "convert_zero_checkpoint_to_fp32_state_dict": "hf_zero.extras.deepspeed.zero_to_fp32",
    "get_fp32_state_dict_from_zero_checkpoint": "hf_zero.extras.deepspeed.zero_to_fp32",
    "load_state_dict_from_zero_checkpoint": "hf_zero.extras.deepspeed.zero_to_fp32",
    "sharded_init": "hf_zero.hf.models.patches",
    "Seq2SeqTrainer": "hf_zero.hf.trainer.trainer",
    "Seq2SeqTrainingArguments": "hf_zero.hf.trainer.arguments",
    "Trainer": "hf_zero.hf.trainer.trainer",
    "TrainingArguments": "hf_zero.hf.trainer.arguments",
    "ZeroPlugin": "hf_zero.hf.accelerator.plugin",
    "ZeroTrainerMixin": "hf_zero.hf.trainer.trainer",
    "HfZeroConfig": "hf_zero.hf.enable",
    "disable": "hf_zero.hf.enable",
    "enable": "hf_zero.hf.enable",
    "zero_arguments": "hf_zero.hf.trainer.arguments",
}
__all__ = sorted([*_EXPORTS, "__version__"])


# The parts of every engine that annexes and the rooms above the engine bring, in the order in which they are called.
parts.register("hf_zero.extras.monitors.step_lines:LinesPart")
parts.register("hf_zero.extras.monitors.monitors:MonitorsPart")
parts.register("hf_zero.extras.monitors.flops_profiler:FlopsPart")
parts.register("hf_zero.extras.monitors.comms_summary:CommsPart")
parts.register("hf_zero.extras.activations.engine_part:CheckpointingPart")
parts.register("hf_zero.hf.models.install:ModelPart", needs="transformers")
parts.register("hf_zero.extras.estimate.account:AccountPart")
names.install()


__getattr__ = lazy_names(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return __all__
