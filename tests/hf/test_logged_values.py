"""The trackers of `report_to` get ZeRO's own values: a real Trainer with TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_zero
from hf_zero.engine.engine import engine_of
from tests.harness.ranks import run_ranks
from tests.hf.runs import arguments, build, examples, zero_config

STEPS, ACCUMULATION = 3, 2


def train(folder: str, report_to: str, **zero: Any) -> tuple[list[dict[str, float]], dict[str, int], int]:
    """Return (what was logged, the memory report, bytes of the parameters)."""
    config = zero_config(3, fp16={"enabled": "auto", "initial_scale_power": 6})
    config["zero_optimization"] |= zero
    more = {"report_to": report_to, "max_steps": STEPS, "fp16": True}
    args = hf_zero.TrainingArguments(**arguments(folder, **more), zero=config)
    trainer = hf_zero.Trainer(model=build(), args=args, train_dataset=examples(40, 1))
    trainer.train()
    engine = engine_of(trainer.model)
    assert engine is not None
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return history, engine.memory_report(), 2 * sum(param.numel() for param in trainer.model.parameters())


def both(folder: str, disk_folder: str) -> Any:
    disk = {"device": "nvme", "nvme_path": disk_folder}
    return train(folder, "tensorboard", offload_optimizer=disk), train(folder, "none")


def test_tensorboard_gets_zeros_values(tmp_path: Path, disk_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (history, report, nbytes), (silent, _, _) = run_ranks(
        both, 2, str(tmp_path), str(disk_path), env={"TENSORBOARD_LOGGING_DIR": str(tmp_path / "board")}
    )[0]
    assert len(silent) == STEPS and not [key for entry in silent for key in entry if key.startswith("zero/")]
    events: Any = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    shown = [tag for tag in events.Tags()["scalars"] if tag.startswith("train/zero/")]
    values = {tag.removeprefix("train/"): [one.value for one in events.Scalars(tag)] for tag in shown}
    assert values == {name: pytest.approx([entry[name] for entry in history]) for name in values}
    assert values.pop("zero/loss_scale") == [64.0] * STEPS
    assert values.pop("zero/skipped_steps") == [0.0] * STEPS
    assert values.pop("zero/gathered_peak_gb")[-1] == pytest.approx(report["gathered_peak"] / 1e9)
    for moved in values.pop("zero/comm_gb_per_step"):  # a micro-batch gathers at most twice, and reduces once
        assert ACCUMULATION * 2 * nbytes < moved * 1e9 < ACCUMULATION * 4 * nbytes
    assert all(min(rates) > 0 for rates in values.values())
    assert sorted(values) == ["zero/disk_read_gb_per_s", "zero/disk_write_gb_per_s"]
