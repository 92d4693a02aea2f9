"""Types in which `from_pretrained` and `from_config` make parameters where the configuration names a 16-bit one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from tests.harness.ranks import run_ranks

SIZES = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "train_batch_size": 2}


def load(path: Path, given: dict[str, Any], how: str, **arguments: Any) -> dict[str, Any]:
    plain = transformers.GPT2LMHeadModel.from_pretrained(path, dtype=torch.float32)
    hf_zero.HfZeroConfig({**ZERO3, **given})
    try:
        if how == "file":
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, **arguments)
        else:
            torch.manual_seed(7)
            config = transformers.GPT2Config(**SIZES)
            model = transformers.AutoModelForCausalLM.from_config(config, **arguments)
    finally:
        hf_zero.disable()
    engine = hf_zero.engine_of(model)
    assert engine is not None and engine.is_sharded
    kinds = {name: param.dtype for name, param in model.named_parameters()}
    report = engine.memory_report()
    with hf_zero.gathered_params(model):
        same = all(
            torch.equal(mine, want.to(mine.dtype))
            for mine, want in zip(model.parameters(), plain.parameters(), strict=True)
        )
    numel = sum(param.numel() for param in model.parameters())
    trained: Any = hf_zero.initialize(
        model=model, config={**ZERO3, **given, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    )[0]
    ids = torch.arange(8).reshape(1, 8)
    losses = []
    for _ in range(3):
        loss = trained(input_ids=ids, labels=ids).loss
        trained.backward(loss)
        trained.step()
        losses.append(float(loss.detach()))
    return {"kinds": kinds, "same": same, "bytes": report["parameters"] / numel, "losses": losses}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(2)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).save_pretrained(folder)
    return folder


BF16 = {"bf16": {"enabled": True}}
CASES: list[tuple[dict[str, Any], dict[str, Any], torch.dtype]] = [
    (BF16, {}, torch.bfloat16),
    (BF16, {"dtype": "auto"}, torch.bfloat16),
    (BF16, {"dtype": torch.float32}, torch.float32),
    ({"fp16": {"enabled": True, "loss_scale": 8}}, {}, torch.float16),
    ({"bf16": {"enabled": "auto"}}, {}, torch.float32),
    ({**BF16, "keep_fp32": ["*ln_1*"]}, {}, torch.bfloat16),
]


@pytest.mark.parametrize(("given", "arguments", "want"), CASES)
def test_a_file_in_fp32_is_loaded_in_the_configured_type(
    given: dict[str, Any], arguments: dict[str, Any], want: torch.dtype, saved: Path
) -> None:
    for found in run_ranks(load, 2, saved, given, "file", **arguments):
        kinds = found["kinds"]
        assert kinds["transformer.wte.weight"] == kinds["transformer.h.0.ln_2.weight"] == want
        assert kinds["transformer.h.0.ln_1.weight"] == (torch.float32 if "keep_fp32" in given else want)
        assert found["same"] and found["losses"][2] < found["losses"][0]
        if "keep_fp32" not in given:  # each of two ranks holds a half, and nothing beside it
            assert want.itemsize / 2 <= found["bytes"] < want.itemsize / 2 + 0.1


@pytest.mark.parametrize(("arguments", "want"), [({}, torch.bfloat16), ({"dtype": torch.float32}, torch.float32)])
def test_a_model_without_a_file_too(arguments: dict[str, Any], want: torch.dtype, saved: Path) -> None:
    for found in run_ranks(load, 2, saved, BF16, "config", **arguments):
        assert set(found["kinds"].values()) == {want}
        assert found["losses"][2] < found["losses"][0]
