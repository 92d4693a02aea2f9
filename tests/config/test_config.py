"""Reading a configuration: every key at every depth is checked, and all mistakes come in one message."""

from __future__ import annotations

import base64
import copy
import inspect
import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig, ZeroSection
from hf_zero.config.keys import NOTHING_TO_DO, OBEYED, root, status, statuses, typed_blocks
from hf_zero.config.schema import Alias, Block, Key, find, walk
from hf_zero.errors import ConfigError
from hf_zero.optim.optimizer_types import OPTIMIZERS

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 1e5,
        "offload_optimizer": {"device": "none"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "data_types": {"grad_accum_dtype": "fp32"},
    "steps_per_print": 100,
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one value set at a dotted path."""
    config = copy.deepcopy(GOOD)
    *blocks, name = path.split(".")
    node = config
    for block in blocks:
        node = node.setdefault(block, {})
    node[name] = value
    return config


def message(source: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        ZeroConfig.load(source).resolve(*args, **kwargs)
    return str(raised.value)


# (path of the misspelt or misplaced key, its value, what must be suggested)
MUTATIONS = [
    ("gradient_clipp1ng", 1, "gradient_clipping"),
    ("gradient_cliping", 1, "gradient_clipping"),
    ("grad_clip", 1.0, "gradient_clipping"),
    ("max_grad_norm", 1.0, "gradient_clipping"),
    ("gradient_accumulation_step", 1, "gradient_accumulation_steps"),
    ("train_micro_batch_size_per_gpuu", 1, "train_micro_batch_size_per_gpu"),
    ("micro_batch_size_per_gpu", 1, "train_micro_batch_size_per_gpu"),
    ("train_batchsize", 8, "train_batch_size"),
    ("batch_size", 8, "train_batch_size"),
    ("bf_16", {"enabled": True}, "bf16"),
    ("bf61", {"enabled": True}, "bf16"),
    ("BF16", {"enabled": True}, "bf16"),
    ("fp_16", {"enabled": False}, "fp16"),
    ("bf16.enable", True, "bf16.enabled"),
    ("bf16.Enabled", True, "bf16.enabled"),
    ("fp16.loss_scale_windows", 1000, "fp16.loss_scale_window"),
    ("fp16.initial_scale_pow", 16, "fp16.initial_scale_power"),
    ("fp16.min_scale", 1, "fp16.min_loss_scale"),
    ("zero_optimisation", {"stage": 3}, "zero_optimization"),
    ("zero_optimizations", {"stage": 3}, "zero_optimization"),
    ("zero", {"stage": 3}, "zero_optimization"),
    ("zero_optimization.stge", 2, "zero_optimization.stage"),
    ("zero_optimization.stagee", 3, "zero_optimization.stage"),
    ("zero_optimization.overlap_com", True, "zero_optimization.overlap_comm"),
    ("zero_optimization.reduce_bucket", 5e8, "zero_optimization.reduce_bucket_size"),
    ("zero_optimization.all_gather_bucket_size", 5e8, "zero_optimization.allgather_bucket_size"),
    ("zero_optimization.stage3_prefetch_size", 5e7, "zero_optimization.stage3_prefetch_bucket_size"),
    ("zero_optimization.persistence_threshold", 1, "zero_optimization.stage3_param_persistence_threshold"),
    (
        "zero_optimization.stage3_gather_16bit_weights_on_save",
        True,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    ("zero_optimization.offload_optimiser", {"device": "cpu"}, "zero_optimization.offload_optimizer"),
    ("zero_optimization.offload_params", {"device": "none"}, "zero_optimization.offload_param"),
    ("zero_optimization.offload_optimizer.pin_mem", True, "zero_optimization.offload_optimizer.pin_memory"),
    ("zero_optimization.offload_optimizer.devise", "cpu", "zero_optimization.offload_optimizer.device"),
    ("zero_optimization.offload_param.nvme_dir", "/x", "zero_optimization.offload_param.nvme_path"),
    ("zero_optimization.offload_param.ratio", 0.5, "zero_optimization.offload_optimizer.ratio"),
    ("zero_optimization.leaf_module.class", ["x"], "zero_optimization.leaf_module.classes"),
    ("zero_optimization.gradient_clipping", 1.0, "top of the configuration"),
    ("stage", 3, "zero_optimization.stage"),
    ("overlap_comm", True, "zero_optimization.overlap_comm"),
    ("offload_param", {"device": "none"}, "zero_optimization.offload_param"),
    ("lr", 1e-4, "optimizer.params.lr"),
    ("learning_rate", 1e-4, "optimizer.params.lr"),
    ("optimizer.lr", 1e-4, "optimizer.params.lr"),
    ("optimizer.parameters", {}, "optimizer.params"),
    ("optimizer.params.weigth_decay", 0.1, "optimizer.params.weight_decay"),
    ("optimizer.params.momentum", 0.9, "momentum"),  # a parameter of SGD beside the type AdamW
    ("optimizer.params.max_grad_norm", 1.0, "gradient_clipping"),
    ("data_types.grad_accum_dtyp", "fp32", "data_types.grad_accum_dtype"),
    ("communication_dtype", "fp32", "communication_data_type"),
    ("checkpoint.tag_validate", "Warn", "checkpoint.tag_validation"),
    ("checkpoint.parallel_write.pipeline", True, "checkpoint.parallel_write.pipeline_stage"),
    ("aio.blocksize", 1048576, "aio.block_size"),
    ("activation_checkpointing.cpu_checkpoint", True, "activation_checkpointing.cpu_checkpointing"),
    ("desync_timeouts", 60, "desync_timeout"),
    ("keep_in_fp32", ["norm"], "keep_fp32"),
    ("flops_profiler.enable", True, "flops_profiler.enabled"),
    ("comms_config", {}, "comms_logger"),
    ("compression_training.layer_reduction.enable", True, "compression_training.layer_reduction.enabled"),
]


@pytest.mark.parametrize(("path", "value", "suggestion"), MUTATIONS, ids=[row[0] for row in MUTATIONS])
def test_a_misspelt_key_is_named_with_the_nearest_known_one(path: str, value: Any, suggestion: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ZeroConfig.load(changed(path, value))
    text = str(raised.value)
    assert f"{path} = " in text and "unknown key" in text
    assert suggestion in text.split(" = ", 1)[1], text


def test_every_key_that_lost_a_letter_is_named() -> None:
    """The keys are those that are obeyed or have nothing to do: in their own block the nearest key is the one that was
    meant.
    """
    checked = 0
    for path, decided in statuses():
        block, _, name = path.rpartition(".")
        if decided.verdict not in (OBEYED, NOTHING_TO_DO) or len(name) < 5 or block.endswith("params"):
            continue
        misspelt = name[: len(name) // 2] + name[len(name) // 2 + 1 :]
        config: dict[str, Any] = {}
        node = config
        for part in block.split(".") if block else ():
            node = node.setdefault(part, {})
        node[misspelt] = 1
        with pytest.raises(ConfigError) as raised:
            ZeroConfig.load(config)
        text = str(raised.value)
        assert text.startswith("1 problem") and f"{misspelt} = 1: unknown key" in text, text
        assert f"Rename it to {path}, or remove it." in text, text
        checked += 1
    assert checked > 90


def test_the_mutations_are_many_and_the_unchanged_configuration_is_good() -> None:
    assert len(MUTATIONS) >= 40
    assert ZeroConfig.load(GOOD).resolve(world_size=3).train_batch_size == 24


# (path, wrong value, what was expected)
BAD_VALUES = [
    ("zero_optimization.stage", 4, "0, 1, 2 or 3"),
    ("zero_optimization.stage", -1, "0, 1, 2 or 3"),
    ("zero_optimization.stage", "three", "0, 1, 2 or 3"),
    ("zero_optimization.stage", "auto", "0, 1, 2 or 3"),
    ("zero_optimization.stage", True, "0, 1, 2 or 3"),
    ("zero_optimization", [3], "a block between braces"),
    ("zero_optimization.reduce_bucket_size", -5, "an integer of at least 1"),
    ("zero_optimization.reduce_bucket_size", 3774873.6, "an integer of at least 1"),
    ("zero_optimization.reduce_bucket_size", "big", "an integer of at least 1"),
    ("zero_optimization.reduce_bucket_size", float("inf"), "an integer of at least 1"),
    ("zero_optimization.overlap_comm", "yes", "true or false"),
    ("zero_optimization.overlap_comm", "true", "Write true without quotes"),
    ("zero_optimization.overlap_comm", 2, "true or false"),
    ("zero_optimization.offload_optimizer.device", "disk", '"none", "cpu" or "nvme"'),
    ("zero_optimization.offload_optimizer.device", "gpu", 'nearest known value is "cpu"'),
    ("zero_optimization.offload_optimizer.ratio", 1.5, "of at least 0 and at most 1"),
    ("train_batch_size", 0, "an integer of at least 1"),
    ("gradient_clipping", -1, "a number of at least 0"),
    ("gradient_clipping", "one", "a number"),
    ("steps_per_print", "auto", "an integer"),
    ("optimizer", "AdamW", "a block between braces"),
    ("optimizer.type", "AdamWW", 'nearest known value is "AdamW"'),
    ("optimizer.params.lr", "fast", "a number"),
    ("optimizer.params.betas", [0.9], "a list of 2 numbers"),
    ("optimizer.params.betas", [0.9, 1.0], "a list of 2 numbers of at least 0 and below 1"),
    ("optimizer.params.amsgrad", "auto", "true or false"),
    ("data_types.grad_accum_dtype", "fp8", '"fp32", "bf16" or "fp16"'),
    ("communication_data_type", 32, '"fp32", "bf16" or "fp16"'),
    ("desync_timeout", 0, "at least 1 and at most 31536000"),
    ("keep_fp32", [1], "a text or a list of texts"),
    ("gather_for_generation", "twice", '"auto", "once" or "stream"'),
    ("checkpoint.tag_validation", "Warm", 'nearest known value is "Warn"'),
    ("zero_optimization.reduce_bucket_size", "500MB", "Write the number without a unit"),
    ("zero_optimization.stage3_max_live_parameters", "1e9 elements", "Write the number without a unit"),
    ("zero_optimization.offload_param.buffer_size", "100 M", "Write the number without a unit"),
    ("zero_optimization.offload_optimizer.ratio", "80%", "Write the number without a unit"),
    ("aio.block_size", "1M", "Write the number without a unit"),
    ("desync_timeout", "10min", "Write the number without a unit"),
    ("optimizer.params.lr", "1e-4/step", "Correct the value"),
    ("zero_optimization.offload_optimizer", "cpu", "a block between braces"),
    ("bf16", True, "a block between braces"),
]


@pytest.mark.parametrize(("path", "value", "expected"), BAD_VALUES)
def test_a_wrong_value_is_named_with_what_was_expected(path: str, value: Any, expected: str) -> None:
    text = message(changed(path, value))
    assert f"{path} = " in text and expected in text, text


def test_all_problems_come_in_one_message_and_in_a_fixed_order() -> None:
    config = changed("zero_optimization.stge", 2)
    config["gradient_clipp1ng"] = 1
    config["zero_optimization"]["reduce_bucket_size"] = -5
    config["fp16"] = {"enabled": True, "fp16_master_weights_and_grads": True}
    config["train_batch_size"] = 7

    text = message(config)
    assert text == message(copy.deepcopy(config))
    with pytest.raises(ConfigError) as deferred:
        ZeroConfig.load(config, defer=True).resolve(world_size=1)
    text = str(deferred.value)
    assert text.startswith("6 problems in the ZeRO configuration (a dict):\n1. ")
    names = [
        "reduce_bucket_size = -5",
        "stge = 2",
        "gradient_clipp1ng = 1",
        "train_batch_size = 7",
        "fp16.fp16_master",
    ]
    places = [text.index(name) for name in names]
    assert places == sorted(places)
    assert "bf16.enabled is true as well" in text


def test_what_is_inside_a_misspelt_block_is_reported_too() -> None:
    text = message({"bf_16": {"enable": True}})
    assert 'bf_16 = {"enable": true}: unknown key; the nearest known key is "bf16"' in text
    assert "bf_16.enable = true" in text and "Rename it to bf16.enabled" in text


def test_numbers_may_be_texts_or_whole_floats() -> None:
    config = ZeroConfig.load(
        {
            "train_micro_batch_size_per_gpu": "8",
            "gradient_accumulation_steps": 2.0,
            "gradient_clipping": "1e-1",
            "zero_optimization": {"stage": "3", "reduce_bucket_size": "5e8", "allgather_bucket_size": 2e8},
        }
    ).resolve()
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, config.stage) == (8, 2, 3)
    assert config.gradient_clipping == 0.1
    for value, want in (
        (config.zero.reduce_bucket_size, 500_000_000),
        (config.zero.allgather_bucket_size, 200_000_000),
    ):
        assert type(value) is int and value == want


def test_names_of_old_and_short_keys_are_taken() -> None:
    config = ZeroConfig.load(
        {
            "bfloat16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "max_live_parameters": 7,
                "stage3_gather_fp16_weights_on_model_save": True,
                "cpu_offload": False,
                "aio": {"thread_count": 4},
            },
        }
    ).resolve()
    assert config.dtype == "bfloat16"
    assert config.zero.stage3_max_live_parameters == 7
    assert config.zero.stage3_gather_16bit_weights_on_model_save is True
    assert config.settings["aio.intra_op_parallelism"] == 4
    assert any("bfloat16 is another name of bf16" in line for line in config.notices)
    old = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"pin_memory": False}}
    assert ZeroConfig.load({"zero_optimization": old}).get("zero_optimization.offload_optimizer") == {
        "device": "cpu",
        "pin_memory": False,
    }
    assert ZeroConfig.load({"zero_optimization": True}).stage == 1
    text = message({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}})
    assert "the same key as bf16" in text


def test_names_with_dots_that_deepspeed_does_not_read() -> None:
    config = ZeroConfig.load({"zero_optimization": {"stage": 3}, "zero_optimization.reduce_bucket_size": 3686.4})
    assert config.get("zero_optimization.reduce_bucket_size") is None
    assert any('"zero_optimization.reduce_bucket_size" has no effect' in line for line in config.resolve().notices)
    assert "unknown key" in message({"zero_optimization.stage": 3})


def test_a_dict_is_copied_and_never_changed() -> None:
    given = copy.deepcopy(GOOD)
    config = ZeroConfig.load(given)
    resolved = config.resolve(world_size=2)
    resolved.settings["gradient_clipping"] = 5.0
    assert given == GOOD == config.raw == resolved.raw
    given["zero_optimization"]["stage"] = 1
    assert config.resolve(world_size=2).stage == 3
    assert ZeroConfig.load(config) is config
    assert pickle.loads(pickle.dumps(config)).resolve().stage == 3


def test_path_text_dict_and_base64_say_the_same(tmp_path: Path) -> None:
    text = json.dumps(GOOD)
    path = tmp_path / "zero3.json"
    path.write_text("\ufeff" + text, encoding="utf-8")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    want = ZeroConfig.load(GOOD).resolve().settings
    for source in (path, str(path), text, f"// a comment\n{text}", encoded):
        assert ZeroConfig.load(source).resolve().settings == want


def test_lines_of_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{\n  "bf16": {\n    "enable": true\n  }\n}')
    text = message(path)
    assert str(path) in text and "bf16.enable = true (line 3)" in text


def test_a_missing_file_is_named_with_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text("{}")
    text = message(str(tmp_path / "zero3.jsn"))
    assert "zero3.jsn" in text and "The folder has zero3.json" in text
    assert "Give the path of a JSON file" in text
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    assert "not text in UTF-8" in message(tmp_path / "latin.json")
    assert "cannot be read" in message(tmp_path)
    assert "type int" in message(3)


def test_keys_that_are_no_texts_are_refused() -> None:
    assert "expected keys that are texts" in message({3: 1})


def test_other_names_lead_to_keys() -> None:
    aliases = {path: row for path, row in walk(root()) if isinstance(row, Alias)}
    assert len(aliases) > 10
    for path, row in aliases.items():
        assert isinstance(find(root(), row.target), Key | Block), path


def test_defaults_fit_their_own_rows() -> None:
    rows = [(path, row) for path, row in walk(root()) if isinstance(row, Key) and row.default is not None]
    assert len(rows) > 120
    for path, row in rows:
        assert row.check(row.default) == row.default, path


def test_sections_have_a_field_for_each_key_that_is_obeyed() -> None:
    for path, section in (
        ("zero_optimization", ZeroSection),
        ("zero_optimization.offload_param", OffloadParam),
        ("zero_optimization.offload_optimizer", OffloadOptimizer),
    ):
        block = find(root(), path)
        assert isinstance(block, Block)
        names = {name for name, row in block.keys.items() if not isinstance(row, Alias)}
        # No key of the block leaf_module has anything to do.
        obeyed = {name for name in names - {"leaf_module"} if status(block.keys[name]).verdict == OBEYED}
        assert obeyed == {one.name for one in fields(section)}
        for one in fields(section):
            row = block.keys[one.name]
            if path != "zero_optimization":
                assert isinstance(row, Key) and one.default == row.default, (path, one.name)


def test_optimizer_tables_agree_with_torch() -> None:
    deepspeed = {"torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states"}
    checked = 0
    for path, known in OPTIMIZERS.items():
        module, _, name = path.rpartition(".")
        if module == "torch.optim" and known.params:
            params = set(known.params) - (deepspeed if name in ("Adam", "AdamW") else set())
            assert params == set(list(inspect.signature(getattr(torch.optim, name)).parameters)[1:]), name
            checked += 1
    assert checked == 12
    in_torch = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert in_torch <= set(dict(typed_blocks())["optimizer"].types)
