"""Public DeepSpeed configurations: each one resolves, or is refused by naming keys that stand in it.

They lie in tests/data with a README on where they come from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.config.problems import FOREIGN
from hf_zero.config.schema import look_up
from hf_zero.errors import ConfigError

DATA = Path(__file__).resolve().parents[1] / "data"
CORPUS = DATA / "ds_configs"
FILES = sorted(CORPUS.glob("*.json"))
DOCUMENTS = sorted((DATA / "document_configs").glob("*.txt"))

# text, the keys that it is refused for
INLINE: dict[str, tuple[str, set[str]]] = {
    "trainer": (
        """{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": true, "wall_clock_breakdown": false,
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "overlap_comm": false, "contiguous_gradients": true, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true}}""",
        set(),
    ),
    "plain loop": (
        """ {"train_batch_size" : 64, "optimizer": {"type": "Adam", "params": {"lr": 0.0002, "betas": [0.5, 0.999],
        "eps": 1e-8}}, "steps_per_print" : 10}""",
        set(),
    ),
    "nvme": (
        """{"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme",
        "nvme_path": "/local_nvme", "pin_memory": true, "buffer_size": "auto", "buffer_count": 5}},
        "aio": {"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 8, "use_gds": true}}""",
        {"aio.use_gds"},
    ),
    "fp16, deprecated offload, scheduler": (
        """{"train_batch_size": 4, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2, "cpu_offload": true},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}}}""",
        set(),
    ),
    "tensor parallel": (
        """{"_comment": "models", "train_batch_size": "auto", "tensor_parallel": {"autotp_size": 2}}""",
        {"tensor_parallel"},
    ),
}


def arguments_for(raw: dict[str, Any]) -> Any:
    """Make TrainingArguments that agree with what the file says, where it says "auto" at all."""
    if '"auto"' not in json.dumps(raw):
        return None

    def given(path: str, default: Any) -> Any:
        value = look_up(raw, path)
        return default if value in (None, "auto") else value

    micro = given("train_micro_batch_size_per_gpu", given("train_batch_size", 4))
    return SimpleNamespace(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=given("gradient_accumulation_steps", 1),
        max_grad_norm=given("gradient_clipping", 1.0),
        learning_rate=given("optimizer.params.lr", 1e-5),
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=given("optimizer.params.weight_decay", 0.01),
        fp16=given("fp16.enabled", False),
        fp16_full_eval=False,
        bf16=given("bf16.enabled", False),
        bf16_full_eval=False,
        max_steps=100,
        warmup_steps=10,
    )


@pytest.mark.parametrize("name", INLINE)
def test_inline_configurations(name: str) -> None:
    text, refused = INLINE[name]
    config = ZeroConfig.load(text)
    found = config.problems(arguments_for(config.raw))
    assert {problem.key for problem in found} == refused
    for problem in found:
        assert problem.remedy and " = " in problem.text


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_public_configuration_resolves_or_is_refused_by_its_keys(path: Path) -> None:
    text = path.read_text()
    try:
        config = ZeroConfig.load(path, defer=True)
    except ConfigError as error:  # templates, with names in capitals where values belong
        assert "is not JSON: line " in str(error) and "at the key " in str(error)
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
        return
    assert config.raw == json.loads(text)
    for problem in config.problems(arguments_for(config.raw)):
        shown = problem.text.partition(" = ")[0]
        name = shown.rpartition(".")[2]
        assert f'"{name}"' in text or (name == "device" and '"cpu_offload"' in text), problem.text
        if "unknown key" in problem.text:
            assert name in FOREIGN, problem.text
        elif "it needs number_checkpoints" in problem.text:  # which its script gives to DeepSpeed in a call
            assert "number_checkpoints" not in text
        else:
            assert "not supported yet" in problem.text, problem.text


def test_many_public_configurations_resolve() -> None:
    resolved = []
    for path in FILES:
        try:
            config = ZeroConfig.load(path)
            resolved.append(config.resolve(arguments_for(config.raw)))
        except ConfigError:
            continue
    # These are taken today; a key that is refused again shows here.
    assert len(FILES) == 83 and len(resolved) >= 45
    assert {one.stage for one in resolved} == {0, 1, 2, 3}
    assert {one.dtype for one in resolved} == {None, "bfloat16", "float16"}


def test_configurations_in_documents_load_or_say_where_they_are_no_json() -> None:
    loaded, broken, foreign = 0, [], []
    for path in DOCUMENTS:
        block = path.read_text(encoding="utf-8")
        try:
            config = ZeroConfig.load(block, defer=True)
        except ConfigError as error:
            assert re.search(r"is not JSON: line \d+, column \d+", str(error)), block
            broken.append(str(error))
            continue
        loaded += 1
        for problem in config.problems(arguments_for(config.raw)):
            if "not supported yet" not in problem.text:
                foreign.append(problem.text)
    # Python dicts and a template; one JSON lacks a comma, and one has a comma too many, which is read over.
    assert loaded >= 25 and len(broken) >= 5
    assert sum("JSON writes" in text for text in broken) >= 4
    assert sum("expected ',' or '}'" in text for text in broken) == 1
    assert not foreign, foreign
