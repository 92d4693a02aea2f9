"""zero_to_fp32.py lies where DeepSpeed puts it and takes DeepSpeed's arguments; it writes all weights in fp32."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint.folders import latest_files
from tests.checkpoint.test_consolidate import assert_equal, expected, run_alone
from tests.harness.checkpoints import WholeModel, make_model, save

NAME = "zero_to_fp32.py"


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WholeModel:
    """Two saves in the current folder, as an engine makes them; `latest` names the second."""
    monkeypatch.chdir(tmp_path)
    for seed, tag in enumerate(["first", "second"]):
        model = make_model(seed)
        save(tmp_path / tag, model, 2, 16, beside=latest_files(tmp_path, tag))
    return model


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the file in the current folder; the exit status."""
    monkeypatch.setattr("sys.argv", [NAME, *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(NAME, run_name="__main__")
    assert isinstance(stop.value.code, int)
    return stop.value.code


def fp32(model: WholeModel) -> dict[str, torch.Tensor]:
    """Every name, tied ones too; buffers as they are."""
    weights = expected(model, torch.float32)
    return weights | {alias: weights[name] for alias, name in model.tied.items()}


def test_the_usual_line(saved: WholeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(monkeypatch, ".", "out") == 0
    assert os.listdir("out") == ["pytorch_model.bin"]
    assert_equal(torch.load("out/pytorch_model.bin", weights_only=True), fp32(saved))
    assert called(monkeypatch, ".", "weights.bin", "-t", "first") == 0  # as releases before 0.16 were called
    assert_equal(torch.load("weights.bin", weights_only=True), fp32(make_model(0)))
    assert called(monkeypatch, "second", "trained", "--exclude_frozen_parameters") == 0
    trained = torch.load("trained/pytorch_model.bin", weights_only=True)
    assert fp32(saved).keys() - trained.keys() == {name for name in fp32(saved) if name.startswith("embedding")}


def test_shards_have_every_name_in_their_index(saved: WholeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(monkeypatch, ".", ".", "--max_shard_size", "200") == 0  # beside other files, and none is replaced
    weight_map = json.loads(Path("pytorch_model.bin.index.json").read_text())["weight_map"]
    assert weight_map.keys() == fp32(saved).keys()
    files = {file: torch.load(file, weights_only=True) for file in {*weight_map.values()}}
    assert len(files) > 3
    assert_equal({name: files[file][name] for name, file in weight_map.items()}, fp32(saved))
    assert Path("latest").read_text() == "second"
    before = sorted(os.listdir())
    assert called(monkeypatch, ".", ".") == 1
    assert sorted(os.listdir()) == before


def test_errors(
    saved: WholeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, ".", "out", "--tag", "third") == 1
    assert "third/zero/manifest.json is missing. There are checkpoints in" in capsys.readouterr().err
    assert called(monkeypatch, ".", "out", "--max_shard_size", "much") == 2
    assert called(monkeypatch, ".") == 2
    assert not Path("out").exists()
    monkeypatch.setattr("sys.argv", [NAME, "-d", "nowhere", "out"])
    with pytest.raises(RuntimeError, match="nowhere holds no complete checkpoint"):
        runpy.run_path(NAME, run_name="__main__")


def test_it_stands_alone_in_each_checkpoint(saved: WholeModel, tmp_path: Path) -> None:
    """Also where there is no `latest`, as in a folder of the Trainer. Without torch it writes safetensors alone."""
    for folder in (".", "first"):
        assert os.access(Path(folder, NAME), os.X_OK)
        assert Path(folder, NAME).read_bytes().startswith(b"#!/usr/bin/env python3\n")
    done = run_alone(tmp_path / "second", "second", "second/safe", "--safe_serialization", script=NAME)
    assert (done.returncode, done.stderr) == (0, "")
    weights = expected(saved, torch.float32)
    assert_equal(load_file("second/safe/model.safetensors"), weights)
    done = run_alone(tmp_path / "second", "second", "out", script=NAME)
    assert done.returncode == 1
    assert "out needs torch, which is not installed: add --safe_serialization" in done.stderr
