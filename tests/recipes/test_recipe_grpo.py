"""The recipe of GRPO, run as a user would: ZeRO's rewards are those of TRL alone, whoever generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.scripts import run_script

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "grpo"
STEPS = 8
ZERO = ["--zero", str(RECIPE / "zero3.json")]
RUNS = {"ddp-policy": [], "zero3-policy": ZERO, "zero3-copy": [*ZERO, "--generate", "copy"]}


def run(arguments: list[str], folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    options = ["--steps", STEPS, "--output", folder]
    ran = run_script(RECIPE / "train.py", *arguments, *options, folder=folder, ACCELERATE_USE_CPU="true")
    assert ran.status == [0, 0], ran.err
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_rewards_are_those_of_trl_alone(tmp_path: Path) -> None:
    lines = {name: run(arguments, tmp_path / name) for name, arguments in RUNS.items()}
    rewards = {name: [line["reward"] for line in steps] for name, steps in lines.items()}
    alone = rewards.pop("ddp-policy")
    assert len(alone) == STEPS and sum(alone[-3:]) > 1.4 * sum(alone[:3]), "the reference did not learn"
    for name, mine in rewards.items():
        assert mine == pytest.approx(alone, abs=1e-5), name
    assert all(line["seconds"]["weights to the copy"] > 0 for line in lines["zero3-copy"])
    for name in RUNS:
        (path,) = (tmp_path / name).glob("*.jsonl")
        path.rename(tmp_path / path.name)
    ran = run_script(RECIPE / "report.py", tmp_path, "--output", tmp_path / "report", folder=tmp_path, processes=1)
    assert ran.status == [0], ran.err
    report = (tmp_path / "report" / "report.md").read_text()
    assert report.count("| stage 3, ") == 2 and "| DDP, TRL alone | " in report
    assert {path.name for path in (tmp_path / "report").glob("*.svg")} == {"rewards.svg", "parts.svg"}
