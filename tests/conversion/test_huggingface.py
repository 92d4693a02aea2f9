"""Weights of a Hugging Face folder are a checkpoint to start from, and come back as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import hf_zero
from hf_zero.conversion.huggingface import from_hf
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.main import main
from tests.conversion.tiny_model import batch, tiny_model
from tests.harness.ranks import run_ranks


def hf_folder(folder: Path, dtype: torch.dtype = torch.float32, shards: int = 2) -> dict[str, torch.Tensor]:
    """Return what save_pretrained leaves of a model with tied weights and a buffer of integers, in several files."""
    state = {name: value.detach().clone() for name, value in tiny_model(3).state_dict().items()}
    del state["head.weight"]  # tied
    state = {name: value.to(dtype) for name, value in state.items()} | {"count": torch.tensor(7)}
    folder.mkdir()
    names = sorted(state)
    files = {f"model-{n:05d}-of-{shards:05d}.safetensors": names[n::shards] for n in range(shards)}
    files = files if shards > 1 else {"model.safetensors": names}
    for file, held in files.items():
        save_file({name: state[name] for name in held}, folder / file, {"format": "pt"})
    if shards > 1:
        weight_map = {name: file for file, held in files.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return state


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_come_back_as_they_were(shards: int, tmp_path: Path) -> None:
    state = hf_folder(tmp_path / "hf", torch.bfloat16, shards)
    arguments = [str(tmp_path / "hf"), str(tmp_path / "zero"), "--buffers", "gain"]
    assert main(["convert", "from-hf", *arguments]) == 0
    assert main(["consolidate", str(tmp_path / "zero"), str(tmp_path / "back"), "--dtype", "bf16"]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype for name in state)


def start_from(folder: str) -> list[tuple[list[bool], int]]:
    """A run at stages 2 and 3 with the checkpoint's weights, which goes on to a first step."""
    outcomes = []
    for stage, module_only in ((2, True), (3, False)):
        model: Any = tiny_model(1)
        model.register_buffer("count", torch.tensor(0))
        zero = {"stage": stage}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
        engine = hf_zero.initialize(model=model, config=config)[0]
        engine.load_checkpoint(folder, load_module_only=module_only)
        found = {name: hf_zero.full_param(param).detach().clone() for name, param in engine.module.named_parameters()}
        wanted = tiny_model(3)
        same = [torch.equal(found[name], value) for name, value in wanted.named_parameters()]
        same += [torch.equal(model.gain, wanted.gain), model.count.item() == 7]
        engine.backward(engine(batch(0, dist.get_rank(), 2)))
        engine.step()
        outcomes.append((same, engine.global_steps))
        engine.teardown()
    return outcomes


def test_a_run_starts_from_it(tmp_path: Path) -> None:
    hf_folder(tmp_path / "hf")
    assert from_hf(tmp_path / "hf", tmp_path / "zero", buffers=["gain"]) == 5
    assert run_ranks(start_from, 2, str(tmp_path / "zero"))[0] == [([True] * 7, 1)] * 2


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "neither model.safetensors nor"),
    "a broken index": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "cannot read .*index.json"),
    "a way out": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        "files that are not beside it",
    ),
    "a missing file": (lambda f: (f / "model-00001-of-00002.safetensors").unlink(), "cannot read .*model-00001"),
    "a torn file": (
        lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b"\x10"),
        "cannot read .*model-00001.*Copy the file again",
    ),
    "two saves": (
        lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(
            (f / "model-00000-of-00002.safetensors").read_bytes()
        ),
        "so does another file",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_input_is_one_line_and_leaves_nothing(damage: str, tmp_path: Path) -> None:
    hf_folder(tmp_path / "hf")
    edit, message = DAMAGES[damage]
    edit(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=message):
        from_hf(tmp_path / "hf", tmp_path / "zero")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_is_no_weight_is_said(tmp_path: Path) -> None:
    hf_folder(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"holds no gane"):
        from_hf(tmp_path / "hf", tmp_path / "zero", buffers=["gane"])
    save_file({"w": torch.zeros(3).to(torch.float8_e4m3fn)}, tmp_path / "fp8.safetensors")
    with pytest.raises(CheckpointError, match="quantized weights cannot be converted"):
        from_hf(tmp_path / "fp8.safetensors", tmp_path / "zero")
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "mine").touch()
    with pytest.raises(CheckpointError, match="exists: name a new folder"):
        from_hf(tmp_path / "hf", tmp_path / "zero")
