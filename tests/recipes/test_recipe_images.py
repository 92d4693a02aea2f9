"""The recipe of images: every way of training takes the steps of one process, and the report tells of all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recipes.images.train import parse, train, without_zero
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "images"
SMALL = "--images 640 --epochs 2"
ZERO = [f"--precision fp32 --stage {stage}" for stage in range(4)]
OFFLOAD = ["--precision fp32 --stage 2 --offload", "--precision fp32 --stage 3 --offload"]
# In fp32 a rank of two keeps weights, gradients and two moments; offloaded states have a master beside the weights.
BYTES = {"DDP": 16, **{f"fp32, stage {stage}": number for stage, number in enumerate((16, 12, 10, 8))}}
BYTES |= {"fp32, stage 2, offload": 12, "fp32, stage 3, offload": 10}


def train_all(options: list[str]) -> list[dict[str, Any]]:
    return [train(parse([*one.split(), *SMALL.split()])) for one in options]


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    alone = run_ranks(train_all, 1, ["--way plain", "--way dp"])[0]
    return [*alone, *run_ranks(train_all, 2, ["--way ddp", *ZERO, *OFFLOAD, "--precision bf16"], timeout=240)[0]]


@pytest.mark.slow
def test_all_ways_take_the_steps_of_one_process(runs: list[dict[str, Any]]) -> None:
    base, data_parallel, *others = runs[:-1]
    assert len(base["losses"]) == 40 and base["losses"][0] > 2.2 and base["losses"][-1] < 0.5, "it did not learn"
    assert data_parallel["losses"] == base["losses"]  # without GPUs it is the module that it holds
    for run in others:  # torch's fused AdamW updates all but offloaded states, so there is nothing to round otherwise
        rounding = 1e-4 if "offload" in run["name"] else 0
        assert run["losses"] == pytest.approx(base["losses"], rel=rounding, abs=0), run["name"]
        assert run["accuracy"] == pytest.approx(base["accuracy"], abs=1.1), run["name"]
    kinds = ("parameters", "gradients", "master", "optimizer")
    found = {run["name"]: sum(run["bytes"][kind] for kind in kinds) for run in others}
    assert found == pytest.approx(BYTES, abs=0.2)  # small parameters stay whole at stage 3
    assert [run["sent"] for run in others] == pytest.approx([4, 4, 4, 4, 6, 4, 6], abs=0.2)


@pytest.mark.slow
def test_bf16_differs_from_fp32_and_learns(runs: list[dict[str, Any]]) -> None:
    base, bf16 = runs[0], runs[-1]
    assert bf16["name"] == "bf16, stage 2" and bf16["losses"] != pytest.approx(base["losses"], rel=1e-4)
    assert bf16["losses"][0] > 2.2 and bf16["accuracy"]["all"] > 80


@pytest.mark.slow
def test_the_report_tells_of_all_runs(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    for number, run in enumerate(runs):
        (tmp_path / f"{number}.json").write_text(json.dumps(run))
    ran = run_script(RECIPE / "report.py", tmp_path, "--output", tmp_path, folder=tmp_path, processes=1)
    assert ran.status == [0], ran.err
    text = (tmp_path / "report.md").read_text()
    for run in runs:
        assert text.count(f"\n| {run['name']} ") == 2
    assert re.search(r"^\| fp32, stage 3 \| 0\.\d{4} \| 0 \| 0 \| 8\d \|", text, re.M)
    for name in ("losses", "costs", "scale"):
        assert (tmp_path / f"{name}.svg").read_text().count("<path") > 12


def test_ways_without_zero_refuse_what_only_zero_takes_from_the_json(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="A schedule or clipping in the JSON needs --way zero"):
        without_zero("plain", 2, None, None, {"gradient_clipping": 1})  # type: ignore[arg-type]
