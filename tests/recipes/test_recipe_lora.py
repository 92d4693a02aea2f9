"""The recipe of LoRA, run as a user would: every configuration gives one loss, and plain PEFT reads what it leaves."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_zero import ZeroConfig
from recipes.causal_lm.report import load_summary, loss_pairs
from recipes.lora.check import check
from recipes.lora.train import LoraArguments
from tests.harness import in_memory
from tests.harness.scripts import run_script
from tests.recipes.test_recipe_zero_inference import save_model

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "lora"
FILES = ["zero2", "zero3", "zero3_offload"]
STEPS = 6
tmp_path_factory = in_memory.tmp_path_factory


@pytest.mark.parametrize("name", FILES)
def test_files_are_complete_configurations(name: str) -> None:
    config = ZeroConfig.load(str(RECIPE / f"{name}.json"))
    assert config.check() == []
    assert config.stage == (2 if name == "zero2" else 3)
    for block in ("offload_param", "offload_optimizer"):
        assert (config.get(f"zero_optimization.{block}.device", "none") == "cpu") == name.endswith("offload")


def test_targets_are_names_or_all_linear() -> None:
    assert LoraArguments().config().target_modules == "all-linear"
    assert LoraArguments(lora_targets=["q_proj", "v_proj"]).config().target_modules == {"q_proj", "v_proj"}


# ---------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def train(model: Path, output: Path, zero: str, *more: str) -> str:
    """Run the recipe on two processes; returns what it printed."""
    command = ["--zero", str(RECIPE / f"{zero}.json"), "--model", str(model)]
    command += f"--use_cpu True --report_to none --block_length 32 --max_steps {STEPS} --logging_steps 1".split()
    command += "--per_device_train_batch_size 2 --learning_rate 1e-2 --train_blocks 64 --eval_blocks 8".split()
    command += [
        "--per_device_eval_batch_size",
        "2",
        "--save_steps",
        str(STEPS // 2),
        "--output_dir",
        str(output),
        *more,
    ]
    ran = run_script(RECIPE / "train.py", *command, folder=output.parent, timeout=150)
    assert ran.status == [0, 0], ran.out + ran.err
    return ran.out


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what a run at stage 3 leaves."""
    output = tmp_path_factory.mktemp("trained") / "out"
    text = train(model, output, "zero3", "--gradient_checkpointing", "True")
    assert "before training: loss" in text and "after training:  loss" in text
    return output


def memory_of(output: Path) -> list[dict[str, Any]]:
    by_rank: list[dict[str, Any]] = json.loads((output / "data.json").read_text())["memory"]
    return by_rank


@pytest.mark.nightly
def test_training_resumes_and_plain_peft_evaluates_the_same(
    model: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, merged = tmp_path / "first", tmp_path / "merged"
    shutil.copytree(trained, first)
    summary = load_summary(first)
    assert summary["eval_loss_after"] < summary["eval_loss_before"] - 0.05, "nothing was learnt"

    # Runs on another medium and at another stage, from half-way, have the same losses.
    for zero in ("zero3_offload", "zero2"):
        text = train(model, tmp_path / zero, zero, "--resume", str(first / f"checkpoint-{STEPS // 2}"))
        assert "before training" not in text
        pairs = loss_pairs(summary, load_summary(tmp_path / zero))
        assert len(pairs) == STEPS // 2
        assert [loss for _, loss, _ in pairs] == pytest.approx([again for *_, again in pairs], abs=1e-6)

    # In a process of its own: hf_zero must not be there.
    command = [sys.executable, "-m", "recipes.lora.check", str(first), "--merge", str(merged)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Equal within 0.0001." in done.stdout
    lines = dict(line.rsplit(None, 1) for line in done.stdout.splitlines())
    assert float(lines["base, without adapter"]) == pytest.approx(summary["eval_loss_before"], abs=1e-4)
    for name in ("base and adapter", "merged", "merged, saved and loaded"):
        assert float(lines[name]) == pytest.approx(summary["eval_loss_after"], abs=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(model).state_dict()
    changed = {name for name, value in load_file(merged / "model.safetensors").items() if not value.equal(plain[name])}
    assert changed and all("_proj" in name for name in changed)

    # An adapter that is not the trained one is told.
    path = first / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    assert any(value.any() for name, value in weights.items() if "lora_B" in name)
    summary["eval_loss_after"] += 0.01
    (first / "summary.json").write_text(json.dumps(summary))
    assert check(first, None, None, 4) == 1
    assert "DIFFERENT by more than 0.0001" in capsys.readouterr().out


@pytest.mark.nightly
def test_configurations_agree_and_hold_what_they_should(model: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "zero3")
    train(model, tmp_path / "zero2", "zero2")
    train(model, tmp_path / "zero3_offload", "zero3_offload", "--gradient_checkpointing", "True")
    losses = {name: [step["loss"] for step in load_summary(tmp_path / name)["steps"]] for name in FILES}
    assert len(losses["zero3"]) == STEPS
    assert losses["zero2"] == pytest.approx(losses["zero3"], abs=1e-4)
    assert losses["zero3_offload"] == pytest.approx(losses["zero3"], abs=1e-4)

    adapter = load_file(tmp_path / "zero3" / "adapter" / "adapter_model.safetensors")
    trained = sum(value.nbytes for value in adapter.values())
    whole = sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(model).parameters()) + trained
    for rank in range(2):
        of = {name: memory_of(tmp_path / name)[rank] for name in FILES}
        for report in of.values():
            # Only adapters have gradients and moments, half of them on each rank; buffers are padded a little.
            assert trained / 2 <= report["gradients"] < trained / 2 * 1.1
            assert trained <= report["optimizer"] < trained * 1.1
        assert of["zero2"]["parameters"] == pytest.approx(whole, rel=0.02)
        assert of["zero3"]["parameters"] < 0.7 * whole
        assert of["zero3_offload"]["device"] < 0.4 * of["zero3"]["device"]  # small parameters stay there
        assert of["zero3_offload"]["host"] > 0.6 * of["zero3"]["device"]
    checkpoint = tmp_path / "zero3" / f"checkpoint-{STEPS}"
    assert not any("embed" in name or "base_layer" in name for name in adapter)
    stored = sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors"))
    assert stored < 5 * trained, "a checkpoint holds weights, masters and two moments of the adapters"


@pytest.mark.nightly
def test_bf16(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path / "out", "zero3", "--bf16", "True")
    summary = load_summary(tmp_path / "out")
    assert math.isfinite(summary["eval_loss_after"])
    assert summary["eval_loss_after"] < summary["eval_loss_before"] - 0.05
    assert check(tmp_path / "out", None, None, 4) == 0
    (report, _) = memory_of(tmp_path / "out")
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters())
    assert report["parameters"] < 1.5 * weights * torch.bfloat16.itemsize
    assert report["master"] > 0
