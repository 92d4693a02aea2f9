"""DeepSpeed's features that hf_zero does not have, by their import paths, and what to use in their place.

Under the facade they may be imported, for programs import what they use with some options only. Their use is refused.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, NoReturn

_KERNELS = "torch's scaled_dot_product_attention, which models of transformers call"
_GENERATE = "init_inference without kernels, model.generate, or vLLM"
_CHECKPOINTING = "checkpointing.configure and checkpointing.checkpoint"
_ZERO = "zero.Init, zero.GatheredParameters and the block zero_optimization of the JSON"
_WITHOUT_TENSOR_PARALLELISM = "ZeRO stage 3"
# Path below deepspeed, of a module or of a name, or a pattern of such paths in any case -> what to use. The first that
# fits counts. "ROOM.*" is what else is inside of a room: names of names.py are found before.
_INSTEAD = {
    "*inference*": _GENERATE,
    "*zenflow*": "offload_optimizer.delayed_update of the JSON",
    "*muon*": 'an optimizer block of the type "Muon"',
    "*autotp*": _WITHOUT_TENSOR_PARALLELISM,
    "*tp_model_init*": _WITHOUT_TENSOR_PARALLELISM,
    "DeepSpeedHybridEngine": "GatheredParameters around model.generate, as TRL's trainers do",
    "DeepSpeedTransformer*": _KERNELS,
    "*DualPipeV*": 'the schedule "zero_bubble" of the block pipeline',
    "accelerator.*": "get_accelerator, which asks torch.accelerator",
    "autotuning": "hf-zero estimate and hf-zero bench",
    "checkpointing.*": _CHECKPOINTING,
    "checkpoint.*": "hf-zero convert from-deepspeed, and hf-zero convert from-universal",
    "comm.configure": "the block comms_logger of the JSON",
    "comm.initialize_mesh_device": "torch.distributed.device_mesh.init_device_mesh",
    # The other names of comm are torch.distributed's, where a name that is not there is a mistake.
    **dict.fromkeys(
        (
            "comm.*backend",
            "comm.enable_symm_mem_for_group",
            "comm.get_*",
            "comm.has_comm_data",
            "comm.in_*",
            "comm.mpi_discovery",
            "comm.patch_*",
            "comm.reset_log",
            "comm.timed_op",
        ),
        "torch.distributed, and init_distributed, which finds what srun or mpirun started",
    ),
    "compile": "torch.compile, or engine.compile",
    "compression.*": "torchao",
    "elasticity": "torchrun --nnodes MIN:MAX; every checkpoint loads at any number of ranks",
    "linear": "PEFT's LoRA",
    "load_ds_config": "DeepSpeedConfig",
    "model_implementations": _GENERATE,
    "module_inject": _GENERATE,
    "moe": "the MoE models of transformers, which stage 3 shards",
    "monitor.*": "the blocks of monitors in the JSON, such as tensorboard",
    "ops.deepspeed4science": _KERNELS,
    "ops.fp_quantizer": "torchao",
    "ops.op_builder.*Quantizer*": "torchao",
    "ops.op_builder.GDSBuilder": "AsyncIOBuilder",
    "ops.op_builder.Ragged*": _GENERATE,
    "ops.op_builder.RandomLTDBuilder": "a sampler or a dataset of your own",
    "ops.op_builder.Sparse*": "torch.nn.attention.flex_attention",
    "ops.op_builder.*Transformer*": _KERNELS,
    "ops.op_builder.*Attn*": _KERNELS,
    "ops.op_builder.*": "the native library, which is built with the package",
    "ops.quantizer": "torchao",
    "ops.sparse_attention": "torch.nn.attention.flex_attention",
    "ops.transformer": _KERNELS,
    "profiling": "the block flops_profiler of the JSON, and hf-zero profile",
    "pt": "the names of today, as deepspeed.runtime.utils",
    "re*_transformer_layer": _GENERATE,
    "runtime.activation_checkpointing.*": _CHECKPOINTING,
    "runtime.config.*": "DeepSpeedConfig(config), by attribute or by key",
    "runtime.data_pipeline": "a sampler or a dataset of your own",
    "runtime.domino": "ZeRO without tensor parallelism",
    "runtime.engine.*": "DeepSpeedEngine, and the block wall_clock_breakdown of the JSON",
    "runtime.fp16.onebit.*": "OnebitAdam, or AdamW with another gradient_accumulation_steps",
    "runtime.lr_schedules.*": "get_config_from_args, or the block scheduler of the JSON",
    "runtime.rollout": "GatheredParameters around model.generate, as TRL's trainers do",
    "runtime.sequence_parallel": "torch.distributed.tensor.experimental.context_parallel, without hf_zero",
    "runtime.tensor_parallel": _WITHOUT_TENSOR_PARALLELISM,
    "runtime.utils.*norm*": "gradient_clipping of the JSON, and engine.get_global_grad_norm",
    "runtime.utils.*": "torch's own functions",
    "runtime.zero.*": _ZERO,
    "sequence": "torch.distributed.tensor.experimental.context_parallel, without hf_zero",
    "set_optimizer_flags": 'an optimizer block of the type "Muon"',
    "utils.groups.*": f"{_WITHOUT_TENSOR_PARALLELISM}, whose groups are get_data_parallel_group",
    "utils.logging.*": "log_dist and logger",
    "utils.timer.*": "SynchronizedWallClockTimer and ThroughputTimer",
    "utils.zero_to_fp32.*": "convert_zero_checkpoint_to_fp32_state_dict, or hf-zero consolidate",
    "utils.*": "the safe_get and safe_set functions, and the leaf modules, of deepspeed.utils",
    "zero.DeepSpeed*": _ZERO,
    "zero.MiCS*": "mics_shard_size of the JSON",
    "zero.ZeroParamType": _ZERO,
    # The rest of the insides of DeepSpeed.
    "constants": "the variables MASTER_ADDR and MASTER_PORT, as torchrun sets them",
    "datastates": "checkpoint.async of the JSON",
    "env_report": "hf-zero report",
    "io": "engine.save_checkpoint, with checkpoint.async of the JSON",
    "launcher.*": "hf-zero launch",
    "nvme": "hf-zero bench",
    "ops.*": "torch's own functions",
    "runtime.*": "the engine that initialize returns, and the JSON",
}


class OutOfScopeError(NotImplementedError, AttributeError):
    """A name that is out of scope, asked of a module: `hasattr` answers that it is not there."""


def sentence_about(path: str) -> str | None:
    """Return what is to be said of `path`, as "moe.layer", if it is out of scope or inside of what is."""
    for feature, instead in _INSTEAD.items():
        if any(fnmatchcase(path.lower(), pattern.lower()) for pattern in (feature, f"{feature}.*")):
            named = path if "*" in feature else feature
            return f"hf_zero has no deepspeed.{named}: use {instead}."
    return None


def stand_in(path: str, sentence: str) -> Any:
    """Return a class or a module that stands for `path`: it is there, and any use raises NotImplementedError."""
    name = path.rpartition(".")[2]
    if name[:1].isupper():
        return _Class(name, (), {"_sentence": sentence})
    return _Module(f"deepspeed.{path}", sentence)


def refusal(value: object) -> str | None:
    """Return what the use of a stand-in says; None for all else."""
    return value._sentence if isinstance(value, _Class | _Module) else None


class _Class(type):
    """The class of classes that are out of scope: nothing is an instance of one."""

    _sentence: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(cls._sentence)

    def __getattr__(cls, name: str) -> NoReturn:
        raise OutOfScopeError(cls._sentence)


class _Module(ModuleType):
    """A module that is out of scope, with all that may be in it; or a function."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(name)
        self._sentence = sentence

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(self._sentence)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python asks every module for names of its own
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return stand_in(f"{self.__name__.partition('.')[2]}.{name}", self._sentence)
