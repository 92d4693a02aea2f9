"""The first program with DPO, run as a user would; the guides' tests run the others of recipes/first_steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.harness.scripts import run_script

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "first_steps"


def test_preferences_are_learned(tmp_path: Path) -> None:
    options = ["--zero", RECIPE / "zero3.json", "--output_dir", tmp_path / "dpo", "--max_steps", 12]
    options += ["--learning_rate", 1e-4, "--logging_steps", 1, "--report_to", "none", "--bf16", False]
    ran = run_script(RECIPE / "trl_dpo.py", *options, folder=tmp_path, timeout=240, ACCELERATE_USE_CPU="true")
    assert ran.status == [0, 0], ran.err
    state = json.loads((tmp_path / "dpo" / "checkpoint-12" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4), "model and reference are not the same at first"
    assert len(losses) == 12 and losses[-1] < 0.98 * losses[0]
    assert (tmp_path / "dpo" / "model.safetensors").is_file()
