"""DeepSpeed's import paths with the first name changed: `from hf_zero.ops.adam import FusedAdam`, `hf_zero.comm`.

facade.py installs the same paths under `deepspeed` where a program asks for that. A path of `PATHS` is a module
without a file. Its names are looked up at their first use, so importing hf_zero loads neither torch nor what they
stand for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hf_zero.extras.deepspeed.out_of_scope import OutOfScopeError, sentence_about

_OURS = "hf_zero.extras.deepspeed"
_PIPELINE = "hf_zero.extras.pipeline"
_LAYERS = {f"{_PIPELINE}.layer_spec": "LayerSpec TiedLayerSpec", f"{_PIPELINE}.module": "PipelineModule"}
_CHECKPOINTING = {
    f"{_OURS}.checkpointing": """checkpoint configure get_cuda_rng_tracker is_configured
    model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed
    partition_activations_in_checkpoint reset set_num_layers""",
    "hf_zero.extras.activations.checkpoint": "non_reentrant_checkpoint",
    "hf_zero.extras.activations.rng_tracker": "CudaRNGStatesTracker=RNGStates",
}
_FORMULAS = "hf_zero.extras.estimate.deepspeed_formulas"
_TOPOLOGIES = f"{_PIPELINE}.topology"

_LEAVES = """get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
    set_z3_leaf_modules_by_suffix unset_z3_leaf_modules"""
_TILING = {f"{_OURS}.tiling": "TiledLinear TiledLinearReturnBias"}
_ZERO = {
    **_TILING,
    f"{_OURS}.zero": """GatheredParameters Init MiCS_Init=Init register_external_parameter
    unregister_external_parameter unwrap_model_for_generation ZeroParamStatus""",
}
_SCHEDULES = {
    "hf_zero.optim": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
    f"{_OURS}.tuning_arguments": """add_tuning_arguments get_config_from_args get_lr_from_config
    override_1cycle_params override_lr_range_test_params override_params override_warmupCosineLR_params
    override_warmupLR_params VALID_LR_SCHEDULES
    LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR WARMUP_LOG_RATE WARMUP_LINEAR_RATE
    LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE
    CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE
    CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR
    WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS""",
}
_LOADER = {f"{_OURS}.data_loader": "DeepSpeedDataLoader"}
_SEED = {"accelerate.utils": "set_random_seed=set_seed"}
_LOGGING = {f"{_OURS}.utils": "log_dist logger"}
_ACCESS = {
    "hf_zero.access.full": """safe_get_full_grad=full_grad safe_get_full_optimizer_state=full_optimizer_state
    safe_set_full_fp32_param=set_full_param safe_set_full_grad=set_full_grad
    safe_update_full_grad_vectorized=update_full_grads""",
    "hf_zero.access.local": "safe_set_local_fp32_param=set_local_param safe_set_local_grad=set_local_grad",
    f"{_OURS}.safe_access": """safe_get_full_fp32_param safe_get_local_fp32_param safe_get_local_grad
    safe_get_local_optimizer_state safe_set_full_optimizer_state safe_set_local_optimizer_state""",
}
_ADAGRAD = {"torch.optim": "DeepSpeedCPUAdagrad=Adagrad"}
_ADAM = {f"{_OURS}.adam": "DeepSpeedCPUAdam FusedAdam"}
_LAMB = {"hf_zero.optim": "FusedLamb=Lamb"}
_LION = {"hf_zero.optim": "DeepSpeedCPULion=Lion FusedLion=Lion"}
_ENGINE = {"hf_zero.engine.engine": "DeepSpeedEngine=ZeroEngine"}
_ERROR = {"hf_zero.errors": "DeepSpeedConfigError=ConfigError"}
_COMM = {
    "torch.distributed": """ReduceOp ProcessGroup all_gather all_gather_into_tensor all_gather_object all_reduce
    all_reduce_coalesced all_to_all all_to_all_single all_gather_coalesced barrier batch_isend_irecv broadcast
    broadcast_object_list destroy_process_group gather gather_object get_backend get_global_rank get_group_rank
    get_process_group_ranks get_rank get_world_size irecv isend is_available is_initialized monitored_barrier
    new_group P2POp recv reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list send
    allgather_fn=all_gather_into_tensor reduce_scatter_fn=reduce_scatter_tensor inference_all_reduce=all_reduce""",
    "hf_zero.distributed.processes": "init_distributed get_world_size_from_launcher=described_world_size",
    f"{_OURS}.comm": """get_all_ranks_from_group get_local_rank get_local_rank_from_launcher=get_local_rank
    get_world_group get_world_rank_from_launcher has_all_gather_into_tensor=available
    has_all_reduce_coalesced=available has_coalescing_manager=available has_reduce_scatter_tensor=available
    log_summary""",
}
# The names of `deepspeed` itself.
ROOT = {
    **_ERROR,
    "hf_zero.optim.sharded": "DeepSpeedOptimizer=ShardedOptimizer",
    **_ENGINE,
    **_LOADER,
    **_LOGGING,
    f"{_OURS}.config": "DeepSpeedConfig",
    f"{_OURS}.inference": "OnDevice init_inference",
    f"{_PIPELINE}.module": "PipelineModule",
    f"{_PIPELINE}.pipeline_engine": "PipelineEngine",
    "hf_zero.engine.initialize": "initialize",
    "hf_zero.engine.script_arguments": "add_config_arguments",
    "hf_zero.distributed.processes": "init_distributed",
    f"{_OURS}.accelerator": "get_accelerator",
    f"{_OURS}.facade": """__version__=VERSION version=VERSION __version_major__=MAJOR __version_minor__=MINOR
    __version_patch__=PATCH __git_branch__=NO_GIT __git_hash__=NO_GIT""",
}

# Path below hf_zero -> {module: its names}. "other=name" gives a name of the module under another one.
PATHS: dict[str, dict[str, str]] = {
    "accelerator": {
        f"{_OURS}.accelerator": "DeepSpeedAccelerator=Accelerator get_accelerator",
        f"{_OURS}.comm": "is_current_accelerator_supported=available",
    },
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "compression.helper": {
        "accelerate.utils": "recursive_getattr",
        f"{_OURS}.utils": "recursive_setattr",
    },
    "checkpoint.constants": {f"{_OURS}.universal": "UNIVERSAL_CHECKPOINT_INFO"},
    "checkpoint.ds_to_universal": {f"{_OURS}.universal": "main"},
    "checkpoint.utils": {f"{_OURS}.utils": "clone_tensors_for_torch_save"},
    "git_version_info": {
        f"{_OURS}.facade": "git_branch=NO_GIT git_hash=NO_GIT version=VERSION",
        f"{_OURS}.op_builder": "installed_ops=COMPATIBLE_OPS",
        f"{_OURS}.utils": "torch_info=TORCH_INFO",
    },
    "launcher.runner": {"hf_zero.extras.launcher.forwarding": "DEEPSPEED_ENVIRONMENT_NAME=DEEPSPEED_FILE"},
    "monitor.comet": {f"{_OURS}.monitor": "CometMonitor"},
    "monitor.config": {f"{_OURS}.monitor": "DeepSpeedMonitorConfig"},
    "monitor.csv_monitor": {f"{_OURS}.monitor": "csvMonitor"},
    "monitor.monitor": {f"{_OURS}.monitor": "CometMonitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor"},
    "monitor.tensorboard": {f"{_OURS}.monitor": "TensorBoardMonitor"},
    "monitor.wandb": {f"{_OURS}.monitor": "WandbMonitor"},
    "ops": {f"{_OURS}.op_builder": "__compatible_ops__=COMPATIBLE_OPS"},
    "ops.adagrad": _ADAGRAD,
    "ops.adagrad.cpu_adagrad": _ADAGRAD,
    "ops.adam": _ADAM,
    "ops.adam.cpu_adam": _ADAM,
    "ops.adam.fused_adam": _ADAM,
    "ops.aio": {f"{_OURS}.op_builder": "AsyncIOBuilder"},
    "ops.op_builder": {
        f"{_OURS}.op_builder": """AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder
        FusedLambBuilder FusedLionBuilder OpBuilder UtilsBuilder"""
    },
    "ops.lamb": _LAMB,
    "ops.lamb.fused_lamb": _LAMB,
    "ops.lion": _LION,
    "ops.lion.cpu_lion": _LION,
    "ops.lion.fused_lion": _LION,
    "pipe": {**_LAYERS, _TOPOLOGIES: "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology"},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.config": {
        **_ERROR,
        f"{_OURS}.config": """ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER DeepSpeedConfig LAMB_OPTIMIZER
        LION_OPTIMIZER MUON_OPTIMIZER ONEBIT_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER""",
    },
    "runtime.dataloader": {**_LOADER, f"{_PIPELINE}.micro_batches": "RepeatingLoader"},
    "runtime.base_optimizer": {"hf_zero.optim.sharded": "DeepSpeedOptimizer=ShardedOptimizer"},
    "runtime.engine": _ENGINE,
    "runtime.fp16.onebit": {"hf_zero.optim": "OnebitAdam=OneBitAdam"},
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.pipe": {**_LAYERS, _TOPOLOGIES: "ProcessTopology"},
    "runtime.pipe.engine": {f"{_PIPELINE}.pipeline_engine": "PipelineEngine"},
    "runtime.pipe.module": _LAYERS,
    "runtime.pipe.topology": {
        _TOPOLOGIES: "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology",
        f"{_OURS}.utils": "PipelineParallelGrid",
    },
    "runtime.swap_tensor": {f"{_OURS}.offload_config": "MIN_SWAPPABLE_BYTES"},
    "runtime.utils": {
        **_SEED,
        f"{_OURS}.utils": "call_to_str partition_balanced prefix_sum_inc see_memory_usage",
        f"{_PIPELINE}.layer_partition": "partition_uniform=split_uniform",
    },
    "runtime.zero": _ZERO,
    "runtime.zero.tiling": _TILING,
    "runtime.zero.partition_parameters": {
        **_ZERO,
        f"{_OURS}.accelerator": "get_accelerator",
        f"{_OURS}.parameters": "is_zero_param",
        f"{_OURS}.partitioning": "_orig_torch_arange zero_wrapper_for_fp_tensor_constructor",
    },
    "runtime.zero.config": {
        f"{_OURS}.zero_config": "DeepSpeedZeroConfig ZeroStageEnum",
        "hf_zero.config.resolved": """DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizer
        DeepSpeedZeroOffloadParamConfig=OffloadParam""",
    },
    "runtime.zero.offload_config": {f"{_OURS}.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum"},
    "runtime.zero.utils": {"hf_zero.errors": "ZeRORuntimeException=ZeroError"},
    "runtime.zero.stage3": {
        _FORMULAS: """estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold
        estimate_zero3_model_states_mem_needs_all_live"""
    },
    "runtime.zero.stage_1_and_2": {
        _FORMULAS: """estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold
        estimate_zero2_model_states_mem_needs_all_live"""
    },
    "utils": {
        **_ACCESS,
        f"{_OURS}.inference": "OnDevice",
        **_SEED,
        f"{_OURS}.utils": f"instrument_w_nvtx log_dist logger z3_leaf_module {_LEAVES}",
        f"{_PIPELINE}.micro_batches": "RepeatingLoader",
    },
    "utils.groups": {
        "torch.distributed": """_get_data_parallel_rank=get_rank _get_data_parallel_world_size=get_world_size
        get_data_parallel_rank=get_rank get_data_parallel_world_size=get_world_size""",
        f"{_OURS}.comm": "_get_data_parallel_group=get_world_group get_data_parallel_group=get_world_group",
    },
    "utils.logging": _LOGGING,
    "utils.tensor_fragment": _ACCESS,
    "utils.timer": {f"{_OURS}.timer": "SynchronizedWallClockTimer ThroughputTimer"},
    "utils.torch": {f"{_OURS}.utils": "required_torch_version"},
    "utils.z3_leaf_module": {f"{_OURS}.utils": f"{_LEAVES} z3_leaf_module"},
    "utils.zero_to_fp32": {
        f"{_OURS}.zero_to_fp32": """convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint
        load_state_dict_from_zero_checkpoint"""
    },
    "zero": _ZERO,
}


class _Names(ModuleType):
    """A module of `PATHS`."""

    def __init__(self, name: str, sources: Mapping[str, str]) -> None:
        super().__init__(name, "Names that scripts know from DeepSpeed: see hf_zero/extras/deepspeed/names.py.")
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self._targets = dict(_targets(sources))
        self.__all__ = sorted(self._targets)

    def __getattr__(self, name: str) -> Any:
        target = self.__dict__.get("_targets", {}).get(name)
        if target is None:
            root, _, path = f"{self.__name__}.{name}".partition(".")
            # Python asks every module for names of its own.
            if not name.startswith("_") and (sentence := sentence_about(path)) is not None:
                # Below hf_zero nothing finds a stand-in, and an import makes another sentence of an AttributeError.
                # All else gets one: pickle looks for a name in every module that there is.
                by_import = root == "hf_zero" and sys._getframe(1).f_code.co_name == "_handle_fromlist"
                raise (NotImplementedError if by_import else OutOfScopeError)(sentence)
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, own = target
        value = getattr(importlib.import_module(module), own)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return self.__all__


def _targets(sources: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (name, (module, the name there)) of every name."""
    for module, names in sources.items():
        for name in names.split():
            alias, _, own = name.rpartition("=")
            yield alias or own, (module, own)


def install(root: str = "hf_zero") -> None:
    """Make the paths importable below `root`, and attributes of the modules that they are below."""
    if root != "hf_zero":
        _put(root, ROOT).__file__ = __file__  # programs print where the package lies
        _put(f"{root}.checkpoint", PATHS["checkpoint.constants"])  # hf_zero.checkpoint is a package of files
    for path, sources in PATHS.items():
        _put(f"{root}.{path}", sources)


def _put(name: str, sources: Mapping[str, str]) -> ModuleType:
    """Make a module; what it is below is hf_zero's own, or one of PATHS, or is made without names."""
    module = sys.modules[name] = _Names(name, sources)
    parent, _, last = name.rpartition(".")
    if parent:
        ours = parent in sys.modules or (parent.startswith("hf_zero") and importlib.util.find_spec(parent) is not None)
        above = importlib.import_module(parent) if ours else _put(parent, {})
        if not (isinstance(above, _Names) and last in above.__all__):  # utils.z3_leaf_module is a function in utils
            setattr(above, last, module)
    return module
