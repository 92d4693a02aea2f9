"""Tests of what a resolved configuration holds, what is refused when on, and which combinations contradict
each other.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_zero.config
from hf_zero.config import ZeroConfig
from hf_zero.config.keys import root
from hf_zero.config.schema import Alias, Block, Count, DType, Flag, Key, Real, Text, Texts, walk
from hf_zero.errors import ConfigError

ZERO = "zero_optimization"
ENABLED = {"enabled": True}
REPOSITORY = Path(__file__).resolve().parents[2]


def nested(path: str, value: Any) -> dict[str, Any]:
    block, _, name = path.rpartition(".")
    made: dict[str, Any] = {name: value}
    return nested(block, made) if block else made


def message(config: dict[str, Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        ZeroConfig.load(config).resolve(*args, **kwargs)
    return str(raised.value)


REFUSED = {path: row for path, row in walk(root()) if not isinstance(row, Alias) and row.refused}
NO_EFFECT = {path: row for path, row in walk(root()) if not isinstance(row, Alias) and row.no_effect}

# Path -> a value that turns it on and one that leaves it off.
SWITCHES: dict[str, tuple[Any, Any]] = {
    "fp16.fp16_master_weights_and_grads": (True, False),
    f"{ZERO}.offload_optimizer.super_offload": (True, False),
    f"{ZERO}.zenflow": ({"topk_ratio": 0.1}, {}),
    f"{ZERO}.zeropp_loco_param": ({"err_beta": 0.8}, {}),
    "optimizer.type": ("ZeroOneAdam", "SGD"),
    "sequence_parallel_size": (2, 1),
    "data_types.param_dtype": ("bf16", None),
    "data_types.buffer_dtype": ("bf16", None),
    "checkpoint.writer": ({"type": "FAST"}, {}),
    "compression_training": (nested("sparse_pruning.shared_parameters.enabled", True), {"layer_reduction": {}}),
    "quantize_training": ({"quantize_groups": 16}, {"enabled": False}),
    "weight_quantization": ({"post_init_quant": {"x": 1}}, {"enabled": False}),
    "sparse_attention": ({"mode": "fixed"}, {}),
    "datastates_ckpt": ({"host_cache_size": 16}, {}),
    "activation_checkpointing.nvme_path": ("/local_nvme", None),
    "compile.passes": (["autosp"], []),
    "tensor_parallel": ({"autotp_size": 2}, {"autotp_size": 1, "tp": {"tp_size": 0}}),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_supported_is_refused_when_on_and_taken_when_off(path: str) -> None:
    row = REFUSED[path]
    on, off = SWITCHES.get(path, (ENABLED, {"enabled": False}) if isinstance(row, Block) else (True, False))
    kind = "Muon" if path.endswith("per_head_muon") else "AdamW"
    beside = {"optimizer": {"type": kind}} if path.startswith("optimizer.params") else {}

    def config(value: Any) -> dict[str, Any]:
        made = nested(path, value)
        made.setdefault("optimizer", {}).update(beside.get("optimizer", {})) if beside else None
        made.setdefault(ZERO, {}).setdefault("stage", 3)
        return made

    ZeroConfig.load(config(on))  # reading it is no mistake
    text = message(config(on))
    assert text.startswith("1 problem") and f"{path}" in text and "not supported yet" in text, text
    assert row.refused in text
    args = SimpleNamespace(fp16=False)
    assert ZeroConfig.load(config(off)).resolve(args).stage == 3
    assert [problem.key for problem in ZeroConfig.load(config(on)).check()] == [path]


def test_the_switches_of_the_table_above_are_the_table_of_refusals() -> None:
    assert set(SWITCHES) <= set(REFUSED)
    assert len(REFUSED) > 30 and len(NO_EFFECT) > 40


def test_keys_without_effect_are_taken_with_a_notice() -> None:
    others = {Texts: ["x"], Text: "x", Count: 12345, Real: 0.5, Key: "info", DType: "bf16"}
    for path, row in NO_EFFECT.items():
        if not isinstance(row, Key):
            continue
        value = (not row.default) if isinstance(row, Flag) else others[type(row)]
        given = nested(path, value)
        given.setdefault("optimizer", {})["type"] = "OneBitAdam" if ".params." in path else "SGD"
        resolved = ZeroConfig.load(given).resolve()
        assert [line for line in resolved.notices if line.startswith(f"{path} = ")], path
        assert row.no_effect in resolved.notices[0]
    quiet = ZeroConfig.load(
        {ZERO: {"stage": 2, "contiguous_gradients": True, "round_robin_gradients": "auto"}}
    ).resolve()
    assert quiet.notices == ()


def test_weights_that_will_not_be_written_are_announced() -> None:
    block: dict[str, Any] = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    assert "no model.safetensors" in "".join(ZeroConfig.load({ZERO: block}).resolve().notices)
    for setting, want in ((True, True), ("auto", None)):
        block["stage3_gather_16bit_weights_on_model_save"] = setting
        resolved = ZeroConfig.load({ZERO: block}).resolve()
        assert resolved.zero.stage3_gather_16bit_weights_on_model_save is want and not resolved.notices


# Contradictions


def test_keys_of_an_offloaded_update_need_one() -> None:
    text = message({"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}, ZERO: {"stage": 2}})
    assert "optimizer.params.fp32_optimizer_states = false: moments in 16 bits" in text
    text = message({ZERO: {"stage": 2, "offload_optimizer": {"device": "none", "delayed_update": True}}})
    assert "delayed_update = true: there is nothing to delay" in text
    block = {"stage": 2, "offload_optimizer": {"device": "cpu", "delayed_update": True}}
    text = message({"zero_force_ds_cpu_optimizer": False, ZERO: block})
    assert "delayed_update = true: it belongs to the native Adam" in text


def test_offload_against_the_stage() -> None:
    text = message({ZERO: {"offload_optimizer": {"device": "cpu"}}})
    assert "it needs stage 1, 2 or 3, but the stage is 0" in text
    text = message({ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}})
    assert "ratio = 0.3: a part of the optimizer can be offloaded at stage 3 only" in text


@pytest.mark.parametrize("stage", [None, 0, 1, 2])
@pytest.mark.parametrize("block", [{"device": "cpu"}, {"device": "nvme"}, {"device": "nvme", "nvme_path": "/x"}])
def test_offloaded_parameters_below_stage_3_have_no_effect(stage: int | None, block: dict[str, Any]) -> None:
    """DeepSpeed takes it, and its documents' own advice for stage 2 has it."""
    zero = {"offload_param": block} if stage is None else {"stage": stage, "offload_param": block}
    resolved = ZeroConfig.load({ZERO: zero}).resolve()
    assert resolved.zero.offload_param.device == "none"
    assert resolved.origins[f"{ZERO}.offload_param.device"] == "no effect below stage 3"
    (notice,) = resolved.notices
    assert (
        f'offload_param.device = "{block["device"]}"' in notice and f"no effect: the stage is {stage or 0}" in notice
    )
    assert ("nvme_path" in block) is ('offload_param.nvme_path = "/x"' in notice)
    assert "offload_optimizer works at stages 1 to 3" in notice
    kept = ZeroConfig.load({ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}}).resolve()
    assert kept.zero.offload_param.device == "cpu" and kept.notices == ()


def test_the_older_name_of_offloaded_parameters_below_stage_3() -> None:
    resolved = ZeroConfig.load({ZERO: {"stage": 2, "cpu_offload_params": True}}).resolve()
    assert resolved.zero.offload_param.device == "none"
    assert any("has no effect: the stage is 2" in notice for notice in resolved.notices)


def test_nvme_needs_a_path() -> None:
    block: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
    text = message({ZERO: block})
    for name in ("offload_optimizer", "offload_param"):
        assert f"{ZERO}.{name}.nvme_path = null: {ZERO}.{name}.device is" in text
    block["offload_param"]["nvme_path"] = "/local_nvme"
    assert "offload_param.nvme_path" not in message({ZERO: block})


def test_two_16_bit_types() -> None:
    text = message({"fp16": ENABLED, "bf16": ENABLED})
    assert "bf16.enabled is true as well" in text
    auto = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    assert "bf16.enabled is true as well" in message(
        auto, SimpleNamespace(fp16=True, fp16_full_eval=False, bf16=True, bf16_full_eval=False)
    )


def test_other_sharding_in_the_arguments() -> None:
    text = message({}, SimpleNamespace(fsdp=True, deepspeed="ds.json"))
    assert "zero and TrainingArguments fsdp=true are both given" in text
    assert 'zero and TrainingArguments deepspeed="ds.json" are both given' in text and "Remove deepspeed=" in text
    for unset in (None, "", (), False):
        assert ZeroConfig.load({}).resolve(SimpleNamespace(fsdp=unset, deepspeed=unset)).stage == 0


def test_saving_on_each_node_turns_the_key_on() -> None:
    for asked in (True, False):
        resolved = ZeroConfig.load({}).resolve(SimpleNamespace(save_on_each_node=asked))
        assert resolved.checkpoint.use_node_local_storage is asked


def test_a_refused_block_is_not_told_its_faults() -> None:
    config = {"sparse_attention": {"mode": 3, "nonsense": -1}}
    with pytest.raises(ConfigError) as raised:
        ZeroConfig.load(config, defer=True).resolve()
    assert str(raised.value).startswith("1 problem") and "sparse_attention = " in str(raised.value)


# The optimizer block


@pytest.mark.parametrize(
    ("block", "want"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-3}}, {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}),
        ({"type": "adam", "params": {"lr": 1e-3}}, {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}),
        (
            {
                "type": "Adam",
                "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1, "bias_correction": True},
            },
            {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        ),
        ({"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, {"type": "AdamW", "params": {"lr": 1e-3}}),
        (
            {"type": "SGD", "params": {"lr": "0.1", "momentum": 0.9, "nesterov": True}},
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        ),
        ({"type": "RMSprop"}, {"type": "RMSprop", "params": {}}),
    ],
)
def test_an_optimizer_block_becomes_one_of_torch(block: dict[str, Any], want: dict[str, Any]) -> None:
    optimizer = ZeroConfig.load({"optimizer": block}).resolve().optimizer
    assert optimizer == want
    made = getattr(torch.optim, optimizer["type"])([torch.nn.Parameter(torch.zeros(2))], **optimizer["params"])
    assert made.param_groups


def test_an_optimizer_block_needs_its_type_and_its_learning_rate() -> None:
    assert 'optimizer = {"params": {}}: the type is missing' in message({"optimizer": {"params": {}}})
    auto = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}}
    text = message(auto)
    assert text.startswith("1 problem")
    assert 'optimizer.params.lr = "auto": it takes its value from TrainingArguments' in text
    resolved = ZeroConfig.load(auto).resolve(client_optimizer=True)
    assert resolved.optimizer == {"type": "AdamW", "params": {"weight_decay": 0.0}}
    assert ZeroConfig.load(auto).check() == []


# The result


def test_the_resolved_configuration_is_complete_and_frozen() -> None:
    given = {
        "bf16": ENABLED,
        "data_types": {"grad_accum_dtype": "bf16"},
        "communication_data_type": "torch.float32",
        "keep_fp32": "router",
        "desync_timeout": "90",
        ZERO: {"stage": 2, "zero_quantized_weights": 0},
        "autotuning": {"enabled": False, "metric": "p"},
    }
    resolved = ZeroConfig.load(given).resolve(world_size=2)
    assert (resolved.stage, resolved.zero.stage, resolved.world_size) == (2, 2, 2)
    assert (resolved.dtype, resolved.grad_accum_dtype, resolved.communication_data_type) == (
        "bfloat16",
        "bfloat16",
        "float32",
    )
    assert resolved.keep_fp32 == ("router",) and resolved.desync_timeout == 90.0
    assert resolved.optimizer is None and resolved.scheduler is None
    assert set(resolved.settings) == set(resolved.origins) and len(resolved.settings) > 100
    assert resolved.settings["autotuning.metric"] == "p" and "nebula.enabled" not in resolved.settings
    assert not [
        value
        for value in resolved.settings.values()
        if value == "auto" and value is not resolved.gather_for_generation
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.stage = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.zero.stage = 3  # type: ignore[misc]
    plain = ZeroConfig.load({}).resolve()
    assert plain.dtype is None and plain.grad_accum_dtype is None and plain.desync_timeout == 600.0


def test_overlap_is_on_unless_switched_off() -> None:
    for stage, setting, want in (
        (3, None, True),
        (2, None, True),
        (3, "auto", True),
        (1, True, True),
        (3, False, False),
    ):
        block = {"stage": stage} if setting is None else {"stage": stage, "overlap_comm": setting}
        assert ZeroConfig.load({ZERO: block}).resolve().zero.overlap_comm is want


ODD_VALUES: tuple[Any, ...] = (
    None,
    "",
    "x",
    -1,
    10**400,
    float("nan"),
    True,
    [],
    [[]],
    [None],
    {},
    {"x": 1},
    "auto",
    b"x",
    object(),
)


def test_odd_values_anywhere_are_problems_and_never_other_errors() -> None:
    args = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=1, max_grad_norm=1.0, fp16=None)
    refused = 0
    for place, (path, _) in enumerate(walk(root())):
        for value in ODD_VALUES[place % 4 :: 4]:  # a quarter for each key keeps it short; every value meets every kind
            given = args if place % 2 else None
            config = ZeroConfig.load(nested(path, value), defer=True)
            found = config.problems(given, world_size=2)
            refused += bool(found)
            if not found:
                config.resolve(given, world_size=2).describe()
    assert refused > 1000


def test_describe_has_a_line_for_each_key_with_its_origin() -> None:
    resolved = ZeroConfig.load({ZERO: {"stage": 3, "reduce_bucket_size": "auto"}}).resolve(world_size=2)
    lines = resolved.describe().splitlines()
    assert len(lines) == len(resolved.settings)
    assert any(line.startswith("zero_optimization.stage .") and line.endswith(". 3 [file]") for line in lines)
    assert any(line.endswith("500000000 [auto (default)]") for line in lines)
    assert any(line.startswith("desync_timeout ") and line.endswith(" 600.0 [default]") for line in lines)


def test_to_dict_is_json_and_resolves_to_the_same() -> None:
    given = {
        "bf16": ENABLED,
        ZERO: {"stage": 3, "reduce_bucket_size": "auto"},
        "train_batch_size": 8,
        "keep_fp32": ["n"],
    }
    first = ZeroConfig.load(given).resolve(world_size=2)
    again = ZeroConfig.load(json.loads(json.dumps(first.to_dict()))).resolve(world_size=2)
    assert again.settings == first.settings and again.zero == first.zero
    assert set(again.origins.values()) <= {"file", "default"}


def test_resolving_says_the_same_in_every_process() -> None:
    code = (
        "from hf_zero.config import ZeroConfig; from hf_zero.errors import ConfigError\n"
        "try: ZeroConfig.load({'zero_optimisation': {'stage': 9}, 'fp_16': {}, 'zzz': 1, 'bf16': {'on': 1}})\n"
        "except ConfigError as error: print(error)"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1 and b"problems" in texts.pop()


def test_the_package_imports_the_standard_library_and_its_own_files_only() -> None:
    files = sorted(Path(hf_zero.config.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.startswith(("hf_zero.config", "hf_zero.errors"))
                assert own or name.partition(".")[0] in sys.stdlib_module_names, (path.name, name)


def test_another_name_with_a_wrong_value_is_an_error() -> None:
    for value in ("None", 2):
        (problem,) = ZeroConfig.load({ZERO: {"stage": 3, "cpu_offload_use_pin_memory": value}}, defer=True).check()
        assert "cpu_offload_use_pin_memory" in str(problem)
