"""The rows of the blocks around training: profilers, monitors, tuning, other kinds of parallelism.

They are checked as strictly as the rest, so that a misspelt key in them is found too, whether or not this release
obeys the block (`refusals.py` says which it does not).
"""

from __future__ import annotations

from hf_zero.config.keys_data import DATA
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
    free,
    integer,
    real,
    text,
    texts,
)


def _list() -> Key:
    return Key(kind="list")


AMP = Block(
    keys={
        "enabled": flag(False, auto=True),
        "opt_level": choice("O1", "O0", "O1", "O2", "O3", auto=True),
        "loss_scale": anything(),
        "cast_model_type": anything(),
        "patch_torch_functions": anything(),
        "keep_batchnorm_fp32": anything(),
        "master_weights": anything(),
        "cast_model_outputs": anything(),
        "num_losses": count(1, low=1),
        "verbosity": count(1),
        "min_loss_scale": real(),
        "max_loss_scale": real(),
    }
)

MSAMP = Block(
    keys={"enabled": flag(False), "opt_level": choice("O1", "O1", "O2", "O3"), "use_te": flag(False)},
)

TORCH_AUTOCAST = Block(
    keys={"enabled": flag(False), "dtype": dtype(), "lower_precision_safe_modules": texts()},
)

FLOPS_PROFILER = Block(
    keys={
        "enabled": flag(False),
        "recompute_fwd_factor": real(0.0),
        "profile_step": count(1),
        "module_depth": integer(-1),
        "top_modules": count(1),
        "detailed": flag(True),
        "output_file": text(),
    }
)

_FILES = {"enabled": flag(False), "output_path": text(""), "job_name": text("DeepSpeedJobName")}
WANDB = {"enabled": flag(False), "group": text(), "team": text(), "project": text("deepspeed")}
COMET = {
    "enabled": flag(False),
    "samples_log_interval": count(100, low=1),
    "project": text(),
    "workspace": text(),
    "api_key": text(),
    "experiment_name": text(),
    "experiment_key": text(),
    "online": flag(None),
    "mode": text(),
}
COMMS_LOGGER = {
    "enabled": flag(False),
    "verbose": flag(False),
    "prof_all": flag(True),
    "prof_ops": texts(),
    "debug": flag(False),
}

AUTOTUNING = Block(
    keys={
        "enabled": flag(False),
        "fast": flag(True),
        "results_dir": text("autotuning_results"),
        "exps_dir": text("autotuning_exps"),
        "overwrite": flag(True),
        "start_profile_step": count(3),
        "end_profile_step": count(5),
        "metric": text("throughput"),
        "metric_path": text(),
        "tuner_type": choice("gridsearch", "gridsearch", "random", "model_based"),
        "tuner_early_stopping": count(5),
        "tuner_num_trials": count(50),
        "arg_mappings": free(),
        "max_train_batch_size": count(),
        "min_train_batch_size": count(1),
        "max_train_micro_batch_size_per_gpu": count(1024),
        "min_train_micro_batch_size_per_gpu": count(1),
        "num_tuning_micro_batch_sizes": count(3),
        "mp_size": count(1),
        "model_info_path": text(),
        "model_info": Block(
            keys={"profile": flag(False), "num_params": count(), "hidden_size": count(), "num_layers": count()}
        ),
    }
)

ELASTICITY = Block(
    keys={
        "enabled": flag(False),
        "max_train_batch_size": count(2000, low=1),
        "micro_batch_sizes": _list(),
        "min_gpus": count(1),
        "max_gpus": count(10000),
        "min_time": count(0),
        "version": real(0.2),
        "prefer_larger_batch": flag(True),
        "ignore_non_elastic_batch_info": flag(False),
        "model_parallel_size": count(1),
        "num_gpus_per_node": count(1),
    }
)

EIGENVALUE = Block(
    keys={
        "enabled": flag(False),
        "verbose": flag(False),
        "max_iter": count(100),
        "tol": real(0.01),
        "stability": real(1e-6),
        "gas_boundary_resolution": count(1),
        "layer_name": text(),
        "layer_num": count(),
        "model_name": text(),
    }
)

NEBULA = Block(
    keys={
        "enabled": flag(False),
        "persistent_storage_path": text(),
        "persistent_time_interval": count(),
        "num_of_version_in_retention": count(),
        "enable_nebula_load": flag(True),
        "load_path": text(),
    }
)

HYBRID_ENGINE = Block(
    keys={
        "enabled": flag(False),
        "max_out_tokens": count(512, low=1),
        "inference_tp_size": count(1),
        "release_inference_cache": flag(False),
        "pin_parameters": flag(True),
        "tp_gather_partition_size": count(8),
        "enable_cuda_graph": flag(False),
    }
)

_COMPILE_FLAGS = (
    "autoep_non_moe free_activation offload_activation offload_opt_states symmetric_memory debug_log disable "
    "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
    "keep_all_input_tensors"
)
COMPILE = Block(
    keys={
        "deepcompile": flag(False),
        "enabled": flag(False),
        "backend": text(),
        "kwargs": free(),
        "passes": texts(),
        "free_activation_threshold": count(10 * 1024 * 1024),
        "offload_activation_pin_memory": flag(True),
        "double_buffer": flag(True),
        "keep_int_input_tensors": flag(True),
        **{name: flag(False) for name in _COMPILE_FLAGS.split()},
    }
)

TENSOR_PARALLEL = Block(
    keys={
        "autotp_size": count(0),
        "tp_size": count(1),
        "tp_overlap_comm": flag(False),
        "dtype": dtype(),
        "vocab_parallel_lm_head": flag(None),
        "vocab_parallel_ce_backend": choice("torch", "torch", "liger"),
        "tp": Block(keys={"tp_size": count(1), "tp_grain_size": count(1)}),
        "tensor_parallel": Block(keys={"tp_size": count(1), "tp_grain_size": count(1)}),
        "partition_config": free(),
        "preset_model": text(),
        "injection_policy_tuple": _list(),
        "keep_module_on_host": flag(False),
        "replace_with_kernel_inject": flag(False),
        "kernel_inject": Alias(target="tensor_parallel.replace_with_kernel_inject"),
    }
)

PIPELINE = Block(
    keys={
        "stages": count(low=1, auto=True),
        "partition": text("best"),
        "seed_layers": flag(False),
        "activation_checkpoint_interval": count(0),
        "pipe_partitioned": flag(True),
        "grad_partitioned": flag(True),
    }
)

SPARSE_ATTENTION = Block(
    keys={
        name: anything()
        for name in (
            "mode block different_layout_per_head num_local_blocks num_global_blocks attention num_random_blocks "
            "horizontal_global_attention num_different_global_patterns local_window_blocks global_block_indices "
            "global_block_end_indices num_sliding_window_blocks"
        ).split()
    }
)

EXPERT_PARALLEL = Block(
    keys={
        "enabled": flag(False),
        **{
            name: anything()
            for name in (
                "autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model "
                "moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm "
                "route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm "
                "comm_qp_margin comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k "
                "load_balance_coeff expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr "
                "has_shared_experts shared_experts_pattern shared_experts_gate_pattern routed_scaling_factor "
                "expert_activation"
            ).split()
        },
    }
)

MORE: dict[str, Entry] = {
    **DATA,
    "amp": AMP,
    "msamp": MSAMP,
    "torch_autocast": TORCH_AUTOCAST,
    "flops_profiler": FLOPS_PROFILER,
    "tensorboard": Block(keys=_FILES),
    "csv_monitor": Block(keys=_FILES),
    "wandb": Block(keys=WANDB),
    "comet": Block(keys=COMET),
    "comms_logger": Block(keys=COMMS_LOGGER),
    "timers": Block(keys={"throughput": Block(keys={"enabled": flag(True), "synchronized": flag(True)})}),
    "autotuning": AUTOTUNING,
    "elasticity": ELASTICITY,
    "eigenvalue": EIGENVALUE,
    "progressive_layer_drop": Block(keys={"enabled": flag(False), "theta": real(1.0), "gamma": real(0.001)}),
    "sparse_attention": SPARSE_ATTENTION,
    "nebula": NEBULA,
    "datastates_ckpt": free(),
    "hybrid_engine": HYBRID_ENGINE,
    "compile": COMPILE,
    "tensor_parallel": TENSOR_PARALLEL,
    "expert_parallel": EXPERT_PARALLEL,
    "pipeline": PIPELINE,
}
