"""`hf-zero bench io` measures, cleans up, prints settings that can be used, and refuses folders in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hf_zero.config.resolved import Aio
from hf_zero.extras.cli.main import main


def run(*words: str) -> int:
    return main(["bench", "io", *words])


def test_measures_and_cleans_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path), "--quick", "--size", "3MiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert os.listdir(tmp_path) == []
    assert found["size"] == 3 << 20
    assert all(row["read_gb_s"] > 0 and row["write_gb_s"] > 0 for row in found["results"])
    assert "threads" in {row["engine"] for row in found["results"]}
    block = found["aio"]
    Aio(block["block_size"], block["queue_depth"], block["intra_op_parallelism"])


def test_table_ends_with_the_block_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path), "--quick", "--size", "2MiB") == 0
    text = capsys.readouterr().out
    assert text.count("<- best") == 1
    assert json.loads(text[text.index("{") :])["aio"]["block_size"] == 1 << 20


def test_unusable_folders_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    cases = [
        (str(tmp_path / "none"), "does not exist"),
        (str(tmp_path / "file"), "is not a folder"),
        ("/proc", "cannot be written"),
    ]
    for folder, reason in cases:
        assert run(folder) == 2
        error = capsys.readouterr().err
        assert reason in error and folder in error and error.count("\n") == 1
    assert run(str(tmp_path), "--size", "900000GiB") == 2
    assert "MiB free" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(str(tmp_path), "--size", "many")
    assert run(str(tmp_path), "--size", "900kB") == 2
    assert "--size: give at least 1MiB" in capsys.readouterr().err
