"""Configurations of DeepSpeed (JSON) and accelerate (yaml or JSON) as hf_zero's, with a line on each key.

DeepSpeed's JSON is hf_zero's own schema: keys get their canonical names, and those without effect here are left out.
Of an accelerate file a JSON is made as accelerate itself makes one, and the rest goes on as a launch file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_zero.config import ZeroConfig
from hf_zero.config.keys import REFUSED, root, status
from hf_zero.config.parse import COMMENTS
from hf_zero.config.problems import raise_all
from hf_zero.config.schema import Alias, Block, find, put
from hf_zero.errors import ConfigError

_OFFLOAD = "zero_optimization.offload"
# Key of accelerate's deepspeed_config -> (key of DeepSpeed, what it is without it). As DeepSpeedPlugin fills it in.
_PLUGIN = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "auto"),
    "gradient_clipping": ("gradient_clipping", "auto"),
    "zero_stage": ("zero_optimization.stage", 2),
    "offload_optimizer_device": (f"{_OFFLOAD}_optimizer.device", "none"),
    "offload_optimizer_nvme_path": (f"{_OFFLOAD}_optimizer.nvme_path", "none"),
    "offload_param_device": (f"{_OFFLOAD}_param.device", "none"),
    "offload_param_nvme_path": (f"{_OFFLOAD}_param.nvme_path", "none"),
    "zero3_save_16bit_model": ("zero_optimization.stage3_gather_16bit_weights_on_model_save", False),
}
_BY_LAUNCHER = "hf-zero launch takes hosts, and so does accelerate's launch file"
# Keys that need nothing here -> why.
_PLUGIN_IGNORED = {
    "zero3_init_flag": "from_pretrained shards while it loads, wherever a stage-3 configuration is active",
    "deepspeed_moe_layer_cls_names": "experts are no special case",
    "deepspeed_hostfile": _BY_LAUNCHER,
    "deepspeed_multinode_launcher": _BY_LAUNCHER,
    "deepspeed_inclusion_filter": _BY_LAUNCHER,
    "deepspeed_exclusion_filter": _BY_LAUNCHER,
}
_HYBRID = {"sharding_group": "host", "hybrid_shard": True}
# The keys of zero_optimization, by fsdp_sharding_strategy, its number, or fsdp_reshard_after_forward.
_STRATEGIES: dict[str, dict[str, Any]] = {
    name: keys
    for names, keys in (
        (("FULL_SHARD", "1", "TRUE"), {"stage": 3}),
        (("SHARD_GRAD_OP", "2", "FALSE"), {"stage": 2}),
        (("NO_SHARD", "3"), {"stage": 0}),
        (("HYBRID_SHARD", "4"), {"stage": 3, **_HYBRID}),
        (("HYBRID_SHARD_ZERO2", "5"), {"stage": 2, **_HYBRID}),
    )
    for name in names
}
_SEES_LAYERS = "hf_zero shards by layers that it finds itself"
_FSDP_IGNORED = {
    "fsdp_version": "hf_zero is neither",
    "fsdp_auto_wrap_policy": _SEES_LAYERS,
    "fsdp_transformer_layer_cls_to_wrap": _SEES_LAYERS,
    "fsdp_min_num_params": _SEES_LAYERS,
    "fsdp_backward_prefetch": "prefetching is zero_optimization.stage3_prefetch_bucket_size",
    "fsdp_backward_prefetch_policy": "prefetching is zero_optimization.stage3_prefetch_bucket_size",
    "fsdp_forward_prefetch": "prefetching is zero_optimization.stage3_prefetch_bucket_size",
    "fsdp_use_orig_params": "parameters are always the model's own",
    "fsdp_sync_module_states": "ranks start from the same weights",
    "fsdp_cpu_ram_efficient_loading": "from_pretrained shards while it loads",
    "fsdp_state_dict_type": "checkpoints are sharded, and model.safetensors is whole",
    "fsdp_activation_checkpointing": "it is --gradient_checkpointing, or the model's gradient_checkpointing_enable()",
}
_LAUNCH = frozenset(
    """compute_environment debug num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids
    main_training_function mixed_precision rdzv_backend same_network use_cpu enable_cpu_affinity dynamo_config
    downcast_bf16""".split()
)
_NO_USE = frozenset("tpu_use_cluster tpu_use_sudo tpu_env tpu_name tpu_zone tpu_vm command_file commands".split())
_OTHER_WAYS = ("fp8_config", "megatron_lm_config", "parallelism_config", "mpirun_config")


@dataclass
class Converted:
    """The result of converting a configuration."""

    values: dict[str, Any]  # hf_zero's JSON
    launch: dict[str, Any] | None = None  # accelerate's launch file, where the source was one
    lines: list[str] = field(default_factory=list)  # "taken: ...", "changed: ...", "ignored: ...", one for each key


def convert_config(source: Path) -> Converted:
    """Read a configuration of DeepSpeed or accelerate.

    Raises:
        ConfigError: It cannot be read, or asks for what hf_zero does not do: all such keys are listed.
    """
    if source.suffix.lower() not in (".yaml", ".yml"):
        config = ZeroConfig.load(source, defer=True)
        if "distributed_type" not in config.raw:
            return _of_deepspeed(config)
    try:
        content = yaml.safe_load(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
        raise ConfigError(f"cannot read {source}: {reason}. Name a yaml or JSON file.") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{source} holds no keys with values: expected a file of `accelerate config`.")
    return _of_accelerate(source, content)


def write_config(converted: Converted, target: Path) -> list[Path]:
    """Write the JSON to `target`, and a launch file beside it. Nothing is overwritten."""
    files = {target: json.dumps(converted.values, indent=2) + "\n"}
    if converted.launch is not None:
        files[target.with_suffix(".yaml")] = yaml.safe_dump(converted.launch)
    there = next((path for path in files if path.exists()), None)
    if there is not None or len(files) < 1 + (converted.launch is not None):
        raise ConfigError(
            f"{there or target} exists, or is a name for two files: name a new .json. Nothing is written."
        )
    for path, text in files.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return list(files)


# -------------------------------------------------------------------- DeepSpeed
def _of_deepspeed(config: ZeroConfig) -> Converted:
    problems = config.check()
    if problems:
        raise_all(config.source, problems)
    converted = Converted(config.values)
    for path, value in _leaves(config.raw):
        verdict, note = _status(config, path, value)
        converted.lines.append(f"{verdict}: {path} = {json.dumps(value)}{note}")
        if verdict == "ignored":
            _remove(converted.values, path.split("."))
    return converted


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with their values; a block stands for all that is inside where its status is that of all."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        row = find(root(), path)
        inside = isinstance(row, Block) and not row.refused and not row.no_effect and not row.free
        if inside and isinstance(value, Mapping) and value and not path.endswith(".params"):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _status(config: ZeroConfig, path: str, value: Any) -> tuple[str, str]:
    row = find(root(), path)
    if path.rpartition(".")[2].startswith(COMMENTS):
        return "ignored", ": a comment"
    if value is None:
        return "ignored", ": as if it were not there"
    if isinstance(row, Alias):
        return "changed", f", which is {row.target} = {json.dumps(config.get(row.target))}"
    if row is not None and row.no_effect:
        return "ignored", f": {row.no_effect}"
    if row is not None and status(row).verdict == REFUSED and not row.is_on(value):
        return "ignored", ": off"
    found = config.get(path)
    if isinstance(row, Block) or found == value:
        return "taken", ""
    return "changed", f", which is {json.dumps(found)}"


def _remove(values: dict[str, Any], path: list[str]) -> None:
    """Take a key out, with the blocks that are empty then."""
    if len(path) > 1 and isinstance(values.get(path[0]), dict):
        _remove(values[path[0]], path[1:])
        if values[path[0]]:
            return
    values.pop(path[0], None)


# -------------------------------------------------------------------- accelerate
def _of_accelerate(source: Path, content: Mapping[str, Any]) -> Converted:
    kind = content.get("distributed_type")
    block = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}.get(str(kind))
    given = content.get(block or "")
    given = {} if given is None and kind == "DEEPSPEED" else given
    if block is None or not isinstance(given, dict):
        raise ConfigError(
            f"{source}: distributed_type = {kind!r}: expected DEEPSPEED or FSDP, with a block of that name. "
            "A file without ZeRO needs no conversion."
        )
    problems = [f"{key} = {content[key]!r}: hf_zero does not do that" for key in _OTHER_WAYS if content.get(key)]
    problems += [f"{key} = {content[key]!r}: hf_zero does not run on TPUs" for key in _NO_USE if content.get(key)]
    if content.get("mixed_precision") == "fp8":
        problems.append('mixed_precision = \'fp8\': write fp16 or no, and "msamp": {"enabled": true} in the ZeRO file')
    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        problems.append(f"compute_environment = {content['compute_environment']!r}: only LOCAL_MACHINE is known")
    known = {*_LAUNCH, *_NO_USE, *_OTHER_WAYS, "distributed_type", "deepspeed_config", "fsdp_config", "fp16"}
    problems += [f"{key}: accelerate has no such key" for key in content if key not in known]
    lines: list[str] = []
    values = (_plugin if kind == "DEEPSPEED" else _fsdp)(source, given, lines, problems)
    if problems:
        raise ConfigError(f"{source} cannot be converted:\n" + "\n".join(f"  {one}" for one in problems))
    launch = {key: value for key, value in content.items() if key in _LAUNCH and value is not None}
    launch["distributed_type"] = "MULTI_CPU" if content.get("use_cpu") else "MULTI_GPU"
    lines.append(f"changed: distributed_type = {kind}, which is {launch['distributed_type']} in the launch file")
    lines += [f"taken: {key} = {launch[key]!r}, in the launch file" for key in launch if key != "distributed_type"]
    config = ZeroConfig.load(values, defer=True)
    if wrong := config.check():
        raise_all(str(source), wrong)
    return Converted(config.values, launch, lines)


def _plugin(source: Path, given: Mapping[str, Any], lines: list[str], problems: list[str]) -> dict[str, Any]:
    """The JSON that accelerate's DeepSpeedPlugin makes of its keys, or the file that they name."""
    file = given.get("deepspeed_config_file")
    named = file not in (None, "none")
    for key, value in given.items():
        if key in _PLUGIN_IGNORED:
            lines.append(f"ignored: deepspeed_config.{key} = {value!r}: {_PLUGIN_IGNORED[key]}")
        elif key in _PLUGIN and named:
            lines.append(f"ignored: deepspeed_config.{key} = {value!r}: deepspeed_config_file has it")
        elif key in _PLUGIN:
            lines.append(f"changed: deepspeed_config.{key} = {value!r}, which is {_PLUGIN[key][0]}")
        elif key != "deepspeed_config_file":
            problems.append(f"deepspeed_config.{key} = {value!r}: hf_zero knows no such key")
    if named:
        places = [Path(str(file)), source.parent / str(file)]
        found = next((one for one in places if one.is_file()), None)
        if found is None:
            problems.append(f"deepspeed_config.deepspeed_config_file = {file!r}: there is no such file")
            return {}
        converted = _of_deepspeed(ZeroConfig.load(found, defer=True))
        lines += [
            f"changed: deepspeed_config.deepspeed_config_file = {file!r}, which is in the JSON",
            *converted.lines,
        ]
        return converted.values
    values = _automatic()
    for key, (path, default) in _PLUGIN.items():
        value = given.get(key, default)
        if value not in (None, "none"):
            put(values, path, value)
    return values


def _fsdp(source: Path, given: Mapping[str, Any], lines: list[str], problems: list[str]) -> dict[str, Any]:
    """The stage and offloading that FSDP's sharding strategy amounts to."""
    values = _automatic()
    strategy = given.get("fsdp_sharding_strategy", given.get("fsdp_reshard_after_forward", "FULL_SHARD"))
    sharding = _STRATEGIES.get(str(strategy).upper())
    for key, value in given.items():
        if key in _FSDP_IGNORED:
            lines.append(f"ignored: fsdp_config.{key} = {value!r}: {_FSDP_IGNORED[key]}")
        elif key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            if sharding is None:
                names = ", ".join(name for name in _STRATEGIES if "_" in name)
                problems.append(f"fsdp_config.{key} = {value!r}: expected one of {names}")
            else:
                meant = ", ".join(f"zero_optimization.{name} = {mine!r}" for name, mine in sharding.items())
                lines.append(f"changed: fsdp_config.{key} = {value!r}, which is {meant}")
        elif key == "fsdp_offload_params":
            if value:
                put(values, f"{_OFFLOAD}_param.device", "cpu")
                put(values, f"{_OFFLOAD}_optimizer.device", "cpu")
            what = "offload_param and offload_optimizer to cpu" if value else "no offloading"
            lines.append(f"changed: fsdp_config.{key} = {value!r}, which is {what}")
        elif key == "fsdp_activation_checkpointing_offload":
            target = "activation_checkpointing.cpu_checkpointing"
            put(values, target, bool(value))
            lines.append(f"changed: fsdp_config.{key} = {value!r}, which is {target}")
        else:
            problems.append(f"fsdp_config.{key} = {value!r}: hf_zero knows no such key")
    for name, mine in (sharding or {}).items():
        put(values, f"zero_optimization.{name}", mine)
    return values


def _automatic() -> dict[str, Any]:
    """Return the keys that the script's arguments decide: batch, clipping, and the launch file's precision."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {**dict.fromkeys(keys, "auto"), "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
