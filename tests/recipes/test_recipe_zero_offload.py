"""The recipe of offloading, run as a user would: losses are those without offload, and no swap file is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_zero import ZeroConfig
from recipes.zero_offload.comparison import Result, verdict
from recipes.zero_offload.configs import choose_nvme_path, is_delayed, offloads, with_nvme_path, without_offload
from tests.harness.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "zero_offload"
FILES = ["zero2_offload", "zero2_offload_delayed", "zero3_offload", "zero_infinity"]
STEPS = 8


def config_of(name: str) -> dict[str, Any]:
    return json.loads((RECIPE / f"{name}.json").read_text())


# ---------------------------------------------------------------- configurations
@pytest.mark.parametrize("name", FILES)
def test_files_are_complete_configurations(name: str) -> None:
    config = config_of(name)
    assert ZeroConfig.load(str(RECIPE / f"{name}.json")).check() == []
    assert offloads(config)
    assert is_delayed(config) == name.endswith("_delayed")
    plain = without_offload(config)
    assert not offloads(plain)
    resolved = ZeroConfig.load(plain).resolve(world_size=2, client_optimizer=True)
    assert (resolved.stage, resolved.zero.offload_optimizer.device) == (2, "none")


def test_only_nvme_blocks_get_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("zero_infinity")
    config["zero_optimization"]["offload_param"]["device"] = "cpu"
    zero = with_nvme_path(config, "/there")["zero_optimization"]
    assert zero["offload_optimizer"]["nvme_path"] == "/there"
    assert zero["offload_param"]["nvme_path"] == config["zero_optimization"]["offload_optimizer"]["nvme_path"]
    monkeypatch.delenv("HF_ZERO_NVME_PATH", raising=False)
    assert choose_nvme_path(None, "out") == "out/swap"
    monkeypatch.setenv("HF_ZERO_NVME_PATH", "/disk")
    assert choose_nvme_path(None, "out") == "/disk"
    assert choose_nvme_path("/given", "out") == "/given"


def test_verdict_tells_what_differs() -> None:
    def run(*losses: float, delayed: bool = False) -> Result:
        return Result("run", delayed, list(losses), [], 1.0)

    plain = run(2.0, 1.5)
    assert verdict(plain, run(2.00001, 1.5)) == "the losses of all 2 steps are equal to the printed digits"
    assert verdict(plain, run(2.0, 1.501)).startswith("1 of 2 losses differ, by at most 0.001")
    assert "one step late; the losses differ by at most 0.2500" in verdict(plain, run(2.0, 1.75, delayed=True))


# ---------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of two layers and a tokenizer with one token per byte."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(vocabulary), num_hidden_layers=2, tie_word_embeddings=True, **sizes)
    ).save_pretrained(folder)
    return folder


def train(model: Path, output: Path, zero: str, *more: str) -> str:
    """Run the recipe on two processes; returns what it printed."""
    command = ["--zero", str(RECIPE / f"{zero}.json"), "--model", str(model)]
    command += f"--use_cpu True --report_to none --block_length 64 --max_steps {STEPS} --logging_steps 1".split()
    command += "--per_device_train_batch_size 2 --learning_rate 1e-3 --train_blocks 64".split()
    command += ["--output_dir", str(output), *more]
    ran = run_script(RECIPE / "train.py", *command, folder=output.parent)
    assert ran.status == [0, 0], ran.out + ran.err
    return ran.out


def swap_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.nightly
def test_every_configuration_gives_the_losses_without_offload(model: Path, tmp_path: Path) -> None:
    others = [str(RECIPE / f"{name}.json") for name in FILES[1:]]
    swap = tmp_path / "disk"
    text = train(
        model, tmp_path / "out", FILES[0], "--also", *others, "--compare", "--bf16", "False", "--nvme_path", str(swap)
    )
    plain, *runs = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    assert [run["name"] for run in runs] == FILES
    assert plain["losses"][-1] < plain["losses"][0] - 0.05, "nothing was learnt"
    assert len(plain["losses"]) == STEPS
    for run in runs:
        if run["delayed"]:
            assert run["losses"] != plain["losses"]
            assert run["losses"] == pytest.approx(plain["losses"], abs=0.3)
            assert run["losses"][-1] < run["losses"][0] - 0.05
        else:
            assert run["losses"] == pytest.approx(plain["losses"], abs=1e-4), run["name"]
            assert f"{run['name']}: the losses of all {STEPS} steps are equal to the printed digits" in text

    memory = {run["name"]: run["media"] for run in [plain, *runs]}
    for rank in range(2):
        without, host = memory["without"][rank], memory["zero2_offload"][rank]["host"]
        assert not without["host"] and not without["disk"]
        assert set(host) == {"master", "exp_avg", "exp_avg_sq"}
        # In fp32 the parameters are their own masters: what leaves is the moments, and torch's step counters.
        left = without["device"] - memory["zero2_offload"][rank]["device"]
        assert left == pytest.approx(host["exp_avg"] + host["exp_avg_sq"], abs=1000)
        assert memory["zero3_offload"][rank]["device"] < memory["zero2_offload"][rank]["device"]
        assert memory["zero_infinity"][rank]["device"] == memory["zero3_offload"][rank]["device"]
        assert set(memory["zero_infinity"][rank]["disk"]) == {"master", "exp_avg", "exp_avg_sq"}
    assert swap.is_dir(), "nothing was on disk"
    assert swap_files(swap) == []


@pytest.mark.nightly
def test_cpu_adam_in_bf16_gives_the_same_bits(model: Path, tmp_path: Path) -> None:
    """One kernel updates both runs, so that no rounding of bf16 parameters can differ."""
    train(model, tmp_path / "out", "zero2_offload", "--compare", "--optimizer", "cpu-adam")
    plain, offloaded = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    assert plain["losses"] == offloaded["losses"]
    assert plain["losses"][-1] < plain["losses"][0] - 0.05


@pytest.mark.nightly
def test_training_on_disk_resumes_on_the_host(model: Path, tmp_path: Path) -> None:
    text = train(model, tmp_path / "disk", "zero_infinity", "--save_steps", str(STEPS // 2), "--eval_blocks", "4")
    assert "after training:  loss" in text
    assert "second moments" in text and "on the disk" in text
    assert swap_files(tmp_path / "disk" / "swap") == []
    checkpoint = tmp_path / "disk" / f"checkpoint-{STEPS // 2}"
    train(model, tmp_path / "host", "zero3_offload", "--eval_blocks", "0", "--resume_from_checkpoint", str(checkpoint))
    first, resumed = (
        [step["loss"] for step in json.loads((tmp_path / name / "summary.json").read_text())["steps"]]
        for name in ("disk", "host")
    )
    assert first == resumed
