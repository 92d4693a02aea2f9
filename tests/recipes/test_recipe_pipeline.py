"""The recipe of pipelines, run as a user would: all schedules, one process beside them, and a picture of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.scripts import run_script

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "pipeline"


@pytest.mark.nightly
def test_all_schedules_beside_one_process(tmp_path: Path) -> None:
    sizes = "--layers 4 --width 32 --longest 48 --steps 4 --micros 4 --pictures pictures --save saved".split()
    output = run_script(RECIPE / "train.py", *sizes, folder=tmp_path).out
    rows = dict(
        re.findall(r"^(one process|gpipe|1f1b|interleaved|zero_bubble) +\d+ ms +([0-9.]+ -> [0-9.]+)", output, re.M)
    )
    assert list(rows) == ["one process", "gpipe", "1f1b", "interleaved", "zero_bubble"]
    first, last = map(float, rows["one process"].split(" -> "))
    assert first > last + 0.005
    assert re.search(r"^gpipe .* 4, 4$", output, re.M) and re.search(r"^1f1b .* 2, 1$", output, re.M)
    assert "The losses of all schedules are those of one process" in output
    for schedule in ("gpipe", "zero_bubble"):
        assert (tmp_path / "pictures" / f"{schedule}.svg").read_text().count("<path") > 12
    assert (tmp_path / "saved/latest").read_text() == "global_step4"
