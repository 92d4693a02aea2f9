"""DeepSpeed's configuration keys, read from the installed DeepSpeed, against the keys that hf_zero knows.

    pip install -e .[peers]
    python -m tests.golden.deepspeed_keys                                      # prints what differs
    python -m tests.golden.deepspeed_keys --write tests/golden/deepspeed_keys.json

Keys are found in three ways: the fields of DeepSpeed's pydantic models; what its parser asks of a configuration that
takes notes while it is read; and names that stand as constants only, because a block is passed on unread.
Exit status 1 if DeepSpeed has a key that hf_zero does not know.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Blocks that are pydantic models: path -> module:class.
MODELS = {
    "zero_optimization": "runtime.zero.config:DeepSpeedZeroConfig",
    "zero_optimization.offload_param": "runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.offload_optimizer": "runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.leaf_module": "runtime.zero.leaf_module_config:DeepSpeedZeroLeafModuleConfig",
    "zero_optimization.zenflow": "runtime.zenflow.zenflow_config:ZenFlowConfig",
    "fp16": "runtime.precision_config:DeepSpeedFP16Config",
    "bf16": "runtime.precision_config:DeepSpeedBF16Config",
    "tensorboard": "monitor.config:TensorBoardConfig",
    "wandb": "monitor.config:WandbConfig",
    "csv_monitor": "monitor.config:CSVConfig",
    "comet": "monitor.config:CometConfig",
    "comms_logger": "comm.config:CommsLoggerConfig",
    "hybrid_engine": "runtime.config:HybridEngineConfig",
    "compile": "compile.config:CompileConfig",
    "timers.throughput": "utils.config:DeepSpeedThroughputTimerConfig",
    "tensor_parallel": "runtime.tensor_parallel.config:TPTrainingConfig",
    "tensor_parallel.tensor_parallel": "runtime.tensor_parallel.config:TPConfig",
    "weight_quantization": "inference.config:WeightQuantConfig",
}
# Blocks that are read key by key: the note-taking configuration has them, so that the parser looks inside.
READ = (
    "optimizer scheduler torch_autocast activation_checkpointing aio flops_profiler autotuning autotuning.model_info "
    "checkpoint checkpoint.writer checkpoint.parallel_write data_types pipeline expert_parallel data_efficiency "
    "data_efficiency.data_sampling data_efficiency.data_sampling.curriculum_learning "
    "data_efficiency.data_sampling.dynamic_batching data_efficiency.data_routing "
    "data_efficiency.data_routing.random_ltd"
).split()
LTD = "data_efficiency.data_routing.random_ltd"
# Blocks that are passed on: path -> prefix of constants in runtime.data_pipeline.constants, and their names.
CONSTANTS = {
    LTD: (
        "RANDOM_LTD",
        "MODEL_MASK_NAME MODEL_TYPE MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE HIDDEN_STATE_ORDER LAYER_NUM LAYER_ID "
        "TOTAL_LAYER_NUM SCHEDULER LAYER_TOKEN_LR_SCHEDULE",
    ),
    f"{LTD}.random_ltd_schedule": ("RANDOM_LTD", "MAX_VALUE MIN_VALUE SCHEDULE_CONFIG SCHEDULER_TYPE"),
    f"{LTD}.random_ltd_schedule.schedule_config": ("RANDOM_LTD", "INCREASE_STEP REQUIRE_STEP"),
    f"{LTD}.layer_token_lr_schedule": (
        "RANDOM_LTD",
        "LAYER_TOKEN_LR_ENABLED TOTAL_LAYER_TOKENS WARMUP_TYPE WARMUP_LAYER_TOKENS",
    ),
    "data_efficiency.data_sampling.curriculum_learning": ("CURRICULUM_LEARNING", "ENABLED METRICS CLUSTER_PATH"),
    "data_efficiency.data_sampling.dynamic_batching": ("DYNAMIC_BATCHING", "METRICS_PATH MAX_TOKENS VERBOSE"),
}
SCHEDULERS = "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR".split()
# Read where the parser does not look: the constants of the parser's own module.
ELSEWHERE = ("sequence_parallel_size", "vocabulary_size")


class Notes(dict):  # type: ignore[type-arg]
    """A configuration that has the blocks of READ, empty, and records what is asked of it."""

    def __init__(self, path: str, found: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self.path, self.found = path, found

    def _note(self, name: str, default: Any = None) -> str:
        path = f"{self.path}.{name}" if self.path else name
        row = self.found.setdefault(path, {"type": "", "default": None})
        if default is not None and not isinstance(default, dict):
            row["type"] = row["type"] or type(default).__name__
            row["default"] = plain(default)
        return path

    def __contains__(self, name: object) -> bool:
        return self._note(str(name)) in READ

    def __getitem__(self, name: str) -> Any:
        return Notes(self._note(name), self.found)

    def get(self, name: str, default: Any = None) -> Any:
        path = self._note(name, default)
        return Notes(path, self.found) if path in READ else default

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Notes:
        return self

    def pop(self, name: str, *default: Any) -> Any:
        return self._note(name)


def plain(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, tuple | set | frozenset):
        return [plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str | list | type(None)) else str(value)


def model_fields(path: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of one pydantic model under every name that it takes."""
    from pydantic_core import PydanticUndefined

    module, _, name = where.partition(":")
    model = getattr(importlib.import_module(f"deepspeed.{module}"), name)
    for field, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True)
        annotation = info.annotation
        kind = annotation.__name__ if inspect.isclass(annotation) else str(annotation).replace("typing.", "")
        is_block = default is not PydanticUndefined and isinstance(default, dict)
        row: dict[str, Any] = {"type": kind, "default": None if is_block else plain(default)}
        if hasattr(default, "model_fields"):
            row["default"] = None
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        if extra.get("deprecated"):
            row |= {"deprecated": True, "new_param": extra.get("new_param", "")}
        for known_as in {field, info.alias or field}:
            other = {"other_name": info.alias} if info.alias and known_as != info.alias else {}
            yield f"{path}.{known_as}", row | other


def noted() -> dict[str, dict[str, Any]]:
    """The keys that DeepSpeedConfig asks for, and those it refuses because the feature was removed."""
    from deepspeed.runtime import config as parser

    found: dict[str, dict[str, Any]] = {}
    notes = Notes("", found)
    made = parser.DeepSpeedConfig.__new__(parser.DeepSpeedConfig)
    made._initialize_params(notes)
    for name in ELSEWHERE:
        found.setdefault(name, {"type": "int", "default": None})
    for name in parser._REMOVED_TOP_LEVEL_CONFIG_KEYS:
        found[name] = {"type": "", "default": None, "removed": True}
    for name in parser._REMOVED_ZERO_CONFIG_KEYS:
        found[f"zero_optimization.{name}"] = {"type": "", "default": None, "removed": True}
    return found


def constants() -> Iterator[tuple[str, dict[str, Any]]]:
    module = importlib.import_module("deepspeed.runtime.data_pipeline.constants")
    for block, (prefix, names) in CONSTANTS.items():
        for name in names.split():
            default = plain(getattr(module, f"{prefix}_{name}_DEFAULT", None))
            kind = "" if default is None else type(default).__name__
            yield f"{block}.{getattr(module, f'{prefix}_{name}')}", {"type": kind, "default": default}


def schedulers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parameters of the schedulers, together: their own defaults stand in their constructors."""
    module = importlib.import_module("deepspeed.runtime.lr_schedules")
    for name in SCHEDULERS:
        for parameter in list(inspect.signature(getattr(module, name)).parameters.values())[1:]:
            if parameter.name != "last_batch_iteration":
                default = None if parameter.default is parameter.empty else parameter.default
                kind = "" if default is None else type(default).__name__
                yield f"scheduler.params.{parameter.name}", {"type": kind, "default": None}


def collect() -> dict[str, dict[str, Any]]:
    """Every key of the installed DeepSpeed with its type, its default, and whether it is deprecated or removed."""
    keys = noted()
    for path, where in MODELS.items():
        keys.update(model_fields(path, where))
    for path, row in (*constants(), *schedulers()):
        if path not in keys or keys[path]["default"] is None:
            keys[path] = row
    blocks = {path.rpartition(".")[0] for path in keys} - {""}
    return {path: row for path, row in sorted(keys.items()) if path not in blocks}


def differences(keys: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the keys that hf_zero does not know, and those whose default differs."""
    from hf_zero.config.keys import root
    from hf_zero.config.schema import Block, Key, find

    def is_known(path: str) -> bool:
        blocks = [path]
        while "." in blocks[-1]:
            blocks.append(blocks[-1].rpartition(".")[0])
        if keys[path]["type"] == "object":
            return True  # an object of the running program: no file can give it
        return find(root(), path) is not None or any(
            isinstance(row := find(root(), block), Block) and row.free for block in blocks[1:]
        )

    unknown = [
        f"{path} ({row['type']}, default {row['default']!r})" for path, row in keys.items() if not is_known(path)
    ]
    other = []
    for path, row in keys.items():
        ours = find(root(), path)
        if isinstance(ours, Key) and plain(ours.default) != row["default"] and not row.get("removed"):
            other.append(f"{path}: {row['default']!r} there, {ours.default!r} here")
    return unknown, other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write DeepSpeed's keys as JSON to this file")
    args = parser.parse_args()
    keys = collect()
    if args.write is not None:
        args.write.write_text(json.dumps({"deepspeed": version("deepspeed"), "keys": keys}, indent=1) + "\n")
    unknown, other = differences(keys)
    print(f"DeepSpeed {version('deepspeed')}: {len(keys)} keys")
    print(f"{len(unknown)} unknown here, {len(other)} defaults differ")
    for title, lines in (("unknown here", unknown), ("default differs", other)):
        for line in lines:
            print(f"{title}: {line}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
