"""Finds what cannot run under ZeRO: arguments, accelerators and models, with the reason and the remedy of each.

Everything here is found before any work is done, gathered with the problems of the configuration itself, and raised as
one ConfigError on every rank. What runs, but at a cost that need not be, is a warning.
"""

from __future__ import annotations

import logging
import math
import os
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_zero.config import Problem, ZeroConfig
from hf_zero.config.problems import raise_all
from hf_zero.distributed.processes import launched_processes, wants_cpu, wrong_on_all
from hf_zero.engine.replace import engines_inside
from hf_zero.errors import ConfigError
from hf_zero.runtime.captured_graphs import REMEDY, recording_problem

logger = logging.getLogger(__name__)

_OTHER_ENGINES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_NODE_LOCAL = "checkpoint.use_node_local_storage"
_WEIGHTS_FLAG = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


@wrong_on_all("run")
def check_run(config: ZeroConfig, args: Any, model: nn.Module | None = None) -> None:
    """Check `config`, TrainingArguments and model against each other and against what ZeRO can do.

    Raises:
        ConfigError: Lists every problem of the configuration, the arguments and the model. On every rank.
    """
    # Alone: what a wrong world size makes of batch sizes would only hide it.
    check_world_size(args.world_size, "TrainingArguments")
    problems = config.problems(args, model, args.world_size, client_scheduler=True)
    problems += argument_conflicts(config, args)
    if model is not None:
        problems += model_conflicts(model, shards_parameters=config.shards_parameters)
    raise_all(config.source, problems)


def check_world_size(seen: int, by: str) -> None:
    """Raise where `by`, which counts `seen` processes, has missed others that will train with this one.

    accelerate counts one process where it finds no accelerator and is not configured to use the CPU. hf_zero would
    join the processes all the same, and each of them would train on all the data and write rank 0's files.

    Raises:
        ConfigError: On every rank, for what is wrong is the same on all.
    """
    launched = launched_processes()
    if seen == launched:
        return
    if torch.accelerator.is_available() and not wants_cpu():
        remedy = (
            "Start them by torchrun, accelerate launch or hf-zero launch, which set LOCAL_RANK for each, or let them "
            "compute on the CPU with ACCELERATE_USE_CPU=true."
        )
    elif wants_cpu():
        remedy = (
            "A PartialState() was made before, and that does not look at ACCELERATE_USE_CPU: make it later, or as "
            "PartialState(cpu=True)."
        )
    else:
        remedy = (
            "There is no accelerator here: add --use_cpu (TrainingArguments(use_cpu=True), Accelerator(cpu=True)), or "
            "set ACCELERATE_USE_CPU=true before the processes start, as hf-zero launch does by itself."
        )
    raise ConfigError(
        f"{launched} processes were started to train together, but {by} sees {seen}: each would train on all the "
        f"data, and all would write the same files.\n{remedy}"
    )


def check_environment() -> None:
    """Raise where the accelerate configuration chose DeepSpeed: before accelerate looks for that package.

    Raises:
        ConfigError: On every rank.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() not in ("1", "true", "yes"):
        return
    raise ConfigError(
        "ACCELERATE_USE_DEEPSPEED is set: the accelerate configuration says distributed_type: DEEPSPEED, and only one "
        "engine can own the model.\nSay distributed_type: MULTI_GPU there, without deepspeed_config (or start by "
        "torchrun or hf-zero launch), and give its deepspeed_config_file to hf_zero: TrainingArguments(zero=FILE), "
        "ZeroPlugin(FILE), hf_zero.enable(FILE) or python -m hf_zero.run --zero FILE. To keep it, leave those out and "
        "start by python -m hf_zero.run --as-deepspeed -m accelerate.commands.launch."
    )


def check_rivals(config: ZeroConfig, args: Any) -> None:
    """Raise if DeepSpeed or FSDP is asked for too: to be called before transformers begins to set them up.

    Raises:
        ConfigError: Names the arguments.
    """
    rivals = SimpleNamespace(deepspeed=args.deepspeed, fsdp=args.fsdp)
    problems = [one for one in config.problems(rivals) if one.key.startswith("TrainingArguments.")]
    raise_all(config.source, problems)


def argument_conflicts(config: ZeroConfig, args: Any) -> list[Problem]:
    """Return the problems of TrainingArguments that cannot be right under the configuration."""
    problems = parallelism_conflicts(getattr(args, "parallelism_config", None))
    if config.shards_parameters and args.save_only_model and config.get(_WEIGHTS_FLAG) is False:
        text = f"save_only_model is set, but {_WEIGHTS_FLAG.rpartition('.')[2]} is false: nothing would be saved."
        problems.append(Problem("TrainingArguments.save_only_model", text, "Remove one of them."))
    if config.get(_NODE_LOCAL) is True and not args.save_on_each_node:
        text = f"{_NODE_LOCAL} is true, but save_on_each_node is not: a node would lack the files beside zero/."
        problems.append(Problem("TrainingArguments.save_on_each_node", text, "Set both, or neither."))
    for flag in ("bf16_full_eval", "fp16_full_eval"):
        block = flag[:4]
        if getattr(args, flag) and config.get(f"{block}.enabled") in (None, False):
            text = f"{flag} casts the live model for evaluation, which the engine that owns its memory does not allow."
            remedy = f'Add "{block}": {{"enabled": "auto"}} to the configuration, or remove {flag}.'
            problems.append(Problem(f"TrainingArguments.{flag}", text, remedy))
    if text := recording_problem(args.torch_compile_mode, shards_parameters=config.shards_parameters):
        problems.append(Problem("TrainingArguments.torch_compile_mode", text, REMEDY))
    return problems


def parallelism_conflicts(parallelism: Any) -> list[Problem]:
    """Return the problems of a ParallelismConfig (or None) in whose dimensions ranks would share a batch."""
    names = [name for name in ("tp", "cp", "sp") if getattr(parallelism, f"{name}_enabled", False)]
    if not names:
        return []
    text = f"parallelism_config enables {', '.join(names)}: with hf_zero each rank has a batch of its own."
    remedy = "Leave that out; dp_replicate_size and dp_shard_size say in which groups ranks shard."
    return [Problem("TrainingArguments.parallelism_config", text, remedy)]


def accelerator_conflicts(accelerator: Accelerator, config: ZeroConfig) -> list[Problem]:
    """Engines and modes of an Accelerator that cannot go with ZeRO."""
    problems = parallelism_conflicts(accelerator.parallelism_config)
    kind = str(accelerator.distributed_type.value)
    if kind in _OTHER_ENGINES:
        text = f"The Accelerator's distributed_type is {kind}: only one engine can own the model."
        remedy = "Remove that plugin, and what chooses it in the accelerate configuration or the environment."
        problems.append(Problem("Accelerator.distributed_type", text, remedy))
    compiler = accelerator.state.dynamo_plugin
    mode = compiler.mode if str(compiler.backend.value) != "NO" else None
    if text := recording_problem(mode, shards_parameters=config.shards_parameters):
        problems.append(Problem("Accelerator.dynamo_plugin", text, REMEDY))
    problems += scaler_conflicts(accelerator.scaler)
    if accelerator.fp8_enabled:
        problems.append(
            Problem(
                "Accelerator.mixed_precision",
                "mixed_precision is fp8, whose backends hf_zero does not run.",
                'Write "msamp": {"enabled": true} into the ZeRO configuration instead.',
            )
        )
    return problems


def scaler_conflicts(scaler: Any) -> list[Problem]:
    """Return the settings of a gradient scaler that the engine's own, which takes its place, does not have."""
    if scaler is None or not scaler.is_enabled():
        return []
    problems = []
    if (scaler.get_growth_factor(), scaler.get_backoff_factor()) != (2.0, 0.5):
        text = (
            f"The GradScaler grows by {scaler.get_growth_factor():g} and backs off by "
            f"{scaler.get_backoff_factor():g}: loss scales are doubled and halved here."
        )
        remedy = "Leave growth_factor at 2.0 and backoff_factor at 0.5."
        problems.append(Problem("Accelerator.kwargs_handlers", text, remedy))
    if not math.log2(scaler._init_scale).is_integer():
        text = f"The GradScaler starts at {scaler._init_scale:g}: loss scales are powers of 2 here."
        problems.append(Problem("Accelerator.kwargs_handlers", text, "Choose a power of 2 as init_scale."))
    return problems


def model_conflicts(model: nn.Module, *, shards_parameters: bool) -> list[Problem]:
    """Return the reasons why `model` cannot be taken over."""
    name = type(model).__name__
    problems = []
    if isinstance(model, _WRAPPERS):
        problems.append(Problem("model", f"The model is wrapped in {name} already.", "Hand over the model itself."))
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if devices and (shards_parameters or len(devices) > 1):
        text = f"{name} was loaded with a device_map ({', '.join(devices)}), but ranks place their shards themselves."
        problems.append(Problem("model", text, "Load it without device_map."))
    if shards_parameters and is_quantized(model):
        packed = f" (first: {', '.join(_packed_names(model)[:3])})" if _packed_names(model) else ""
        text = f"{name} is quantized{packed}, and stage 3 cannot shard packed parameters."
        problems.append(Problem("model", text, "Use stage 2, or load it unquantized."))
    return problems


def is_quantized(model: nn.Module) -> bool:
    """Whether parameters of `model` are packed by a quantization method of transformers or bitsandbytes."""
    flags = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")
    if any(getattr(model, flag, False) for flag in flags) or getattr(model, "hf_quantizer", None) is not None:
        return True
    return bool(_packed_names(model))


def _packed_names(model: nn.Module) -> list[str]:
    """Name parameters of one byte per element: packed integers, or floats that mean nothing without their scale."""
    types = {name: param.dtype for name, param in model.named_parameters()}
    return [name for name, dtype in types.items() if dtype.itemsize == 1 and dtype != torch.bool]


def warn_of_missed_sharding(model: nn.Module) -> None:
    """Warn where a model was loaded unsharded on every rank, because the configuration came too late."""
    loaded_from = getattr(getattr(model, "config", None), "name_or_path", "")
    if loaded_from and not engines_inside(model):
        logger.warning(
            "%s was loaded in full on every rank (%.2f GB each) before it was sharded. To load shards only, make "
            "TrainingArguments(zero=...), or call hf_zero.enable(...), before from_pretrained.",
            loaded_from,
            sum(param.numel() * param.element_size() for param in model.parameters()) / 1e9,
        )
