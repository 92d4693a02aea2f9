"""The recipe of the engine's loop, run as a user would: its losses are those of torch in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_zero import ZeroConfig
from recipes.engine_loop.configs import CONFIGS
from recipes.engine_loop.report import Run
from tests.harness.scripts import Ran, run_script

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "engine_loop"
FILES = {path.stem: path for path in RECIPE.glob("zero_*.json")}
STEPS = 24


def train(folder: Path, *arguments: object, steps: int = STEPS) -> Ran:
    sizes = ["--steps", steps, "--width", 32, "--length", 16, "--output", folder]
    return run_script(RECIPE / "train.py", *arguments, *sizes, folder=folder)


def alone(folder: Path, *arguments: object, steps: int = STEPS) -> list[dict[str, float]]:
    sizes = ["--steps", steps, "--width", 32, "--length", 16, "--output", folder]
    ran = run_script(RECIPE / "one_process.py", "--precision", *arguments, *sizes, folder=folder, processes=1)
    assert ran.status == [0], ran.err
    return lines_of(folder / f"{arguments[0]}.jsonl")


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_fp32(name: str, folder: Path) -> Path:
    """The configuration in fp32, with a rate at which little is learned soon, and with all parameters in shards."""
    config: dict[str, Any] = json.loads(json.dumps(CONFIGS.get(name) or ZeroConfig.load(str(FILES[name])).raw))
    del config["fp16"]
    config["scheduler"]["params"]["warmup_max_lr"] = 1e-2
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "reference"),
    [
        (["zero_dp_config.org", "zero_config.3.org", "zero_r_config"], []),
        (["zero_off_config", "zero_infinity_config"], []),
        (["zero_dp_config"], ["--rows", 8, "--accumulation", 4]),
        (["zero_config.3"], ["--rows", 4, "--accumulation", 8, "--clip", 1.0]),
    ],
)
def test_losses_in_fp32_are_those_of_one_process(names: list[str], reference: list[object], tmp_path: Path) -> None:
    steps = STEPS * (2 if "--clip" in reference else 1)  # of 8 micro-batches for an update, whose first two do nothing
    expected = [line["loss"] for line in alone(tmp_path, "fp32", "--lr", 1e-2, *reference, steps=steps)]
    assert sum(expected[-8:]) < sum(expected[:8]) - 0.1, "the reference did not learn"
    for name in names:
        more: list[object] = ["--checkpoint_layers"] if name == "zero_r_config" else []
        more += ["--nvme_path", tmp_path / "swap"] if name == "zero_infinity_config" else []
        ran = train(tmp_path, "--deepspeed_config", in_fp32(name, tmp_path), *more, steps=steps)
        assert ran.status == [0, 0], ran.err
        assert [line["loss"] for line in lines_of(tmp_path / f"{name}.jsonl")] == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_fp16_as_printed_is_the_walk_by_hand(tmp_path: Path) -> None:
    """Losses, and loss scales from 2 ** 32 down, by file and by dict; then the document's error."""
    steps = 30
    expected = alone(tmp_path, "hand", steps=steps)
    assert expected[0]["scale"] == 2.0**32 > 2.0**20 > expected[-1]["scale"]
    offloaded: list[object] = ["--nvme_path", tmp_path / "swap", "--optimizer", "CPUAdam"]
    for name, more in (("zero_dp_config.org", []), ("zero_config.3.org", []), ("zero_infinity_config", offloaded)):
        given = ["--config", name] if name in CONFIGS else ["--deepspeed_config", FILES[name]]
        ran = train(tmp_path, *given, *more, steps=steps)
        assert ran.status == [0, 0], ran.err
        got = lines_of(tmp_path / f"{name}.jsonl")
        assert [line["scale"] for line in got] == [line["scale"] for line in expected]
        assert [line["loss"] for line in got] == pytest.approx([line["loss"] for line in expected], abs=1e-4)
        assert "Attempted loss scale: 4294967296, but hysteresis is 2. Reducing hysteresis to 1" in ran.err
    assert not list((tmp_path / "swap").rglob("*.swap"))

    ran = train(tmp_path, "--config", "zero_config.3.org", "--nan_from", 16, steps=60)
    assert ran.status == [1, 1]
    for text in ran.errs:
        assert "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run." in text
    assert "Attempted loss scale: 2, reducing to 1" in ran.err
    assert Run.read(tmp_path / "zero_config.3.org-nan.jsonl").scales[-1] == 1.0
    report(tmp_path)


def report(folder: Path) -> None:
    """The report is made of what these runs left."""
    ran = run_script(RECIPE / "memory.py", "--output", folder, folder=folder, processes=2)
    assert ran.status == [0, 0], ran.err
    stages = json.loads((folder / "memory.json").read_text())["stages"]
    assert [stage["total"] for stage in stages] == pytest.approx([16, 10, 9, 8], abs=1e-3)
    assert [stage["sent"] / stages[0]["sent"] for stage in stages] == pytest.approx([1, 1, 1, 1.5])
    ran = run_script(RECIPE / "report.py", folder, "--output", folder, folder=folder, processes=1)
    assert ran.status == [0], ran.err
    assert "| zero_dp_config.org | 5.45, 2.79, 3.71, 3.49 | 1024 | 5.5" in (folder / "report.md").read_text()
    for name in ("losses", "scales"):
        assert (folder / f"{name}.svg").read_text().count("<path") > 12


def test_an_optimizer_that_cannot_be_offloaded_is_refused(tmp_path: Path) -> None:
    ran = train(tmp_path, "--deepspeed_config", FILES["zero_off_config"], "--optimizer", "Adagrad")
    assert ran.status == [1, 1]
    for text in ran.errs:
        assert "torch.optim.adagrad.Adagrad cannot update offloaded states" in text
