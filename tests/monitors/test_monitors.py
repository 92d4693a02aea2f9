"""Monitors: what a run writes, and what is refused before it begins. wandb and comet need not be installed."""

from __future__ import annotations

import atexit
import csv
import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config.notices import start_text
from hf_zero.errors import ConfigError
from tests.harness.ranks import run_ranks

STEPS, ACCUMULATION = 3, 2


def start(folder: str, *, rate: Any = 0.5, **keys: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    config = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "board"},
    }
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config | keys)[0]


def train(folder: str) -> tuple[list[float], list[float]]:
    """The mean loss of each step on this rank, and the rates."""
    engine = start(folder)
    losses, rates = [], []
    for step in range(STEPS):
        window = []
        for micro in range(ACCUMULATION):
            data = torch.full((2, 4), 0.1 * (1 + step + micro + 10 * engine.rank))
            loss = engine(data).square().mean()
            engine.backward(loss)
            window.append(loss.item())
            rates.append(engine.optimizer.param_groups[0]["lr"])
            engine.step()
        engine.optimizer.param_groups[0]["lr"] *= 0.5
        losses.append(sum(window) / ACCUMULATION)
    engine.teardown()
    half = start(folder, fp16={"enabled": True, "initial_scale_power": 5}, csv_monitor={"enabled": False})
    for _ in range(ACCUMULATION):
        half.backward(half(torch.ones(2, 4, dtype=torch.float16)).square().mean())
        half.step()
    half.teardown()
    return losses, rates[::ACCUMULATION]


def refuse_missing() -> str:
    for package in ("wandb", "comet_ml"):
        sys.modules[package] = None  # type: ignore[assignment]  # as if it were not installed
    switched_on = {"enabled": True}
    with pytest.raises(ConfigError) as raised:
        start("", csv_monitor={}, tensorboard={}, wandb=switched_on, comet={**switched_on, "api_key": "secret"})
    return str(raised.value)


def refuse(folder: str) -> str:
    with pytest.raises(ConfigError) as raised:
        start(folder, csv_monitor={"enabled": True, "output_path": f"{folder}/file"})
    return str(raised.value)


def test_numbers_of_a_run_are_in_the_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses, rates = run_ranks(train, 2, str(tmp_path))[0]
    assert losses[0] != losses[1] and rates == [0.5, 0.25, 0.125], "vacuous: nothing changes"
    samples = [2 * ACCUMULATION * 2 * (step + 1) for step in range(STEPS)]
    wanted = {"train_loss": losses, "lr": rates}
    found = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert found == ["Train_Samples_lr.csv", "Train_Samples_train_loss.csv"], "one rank writes"
    for name, values in wanted.items():
        with (tmp_path / "run" / f"Train_Samples_{name}.csv").open(newline="") as file:
            head, *rows = csv.reader(file)
        assert head == ["step", name]
        assert [(int(at), float(value)) for at, value in rows] == list(zip(samples, values, strict=True))
    events: Any = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for name, values in wanted.items():
        board = [(one.step, one.value) for one in events.Scalars(f"Train/Samples/{name}")]
        assert board[:STEPS] == [(at, pytest.approx(value)) for at, value in zip(samples, values, strict=True)]
    assert [one.value for one in events.Scalars("Train/Samples/loss_scale")] == [2.0**5]


def collected_inside_of_threading(folder: str) -> list[bool]:
    """Tell whether TensorBoard's thread lives when its engine is garbage, and when Python has ended."""
    engine = start(folder)
    names = {thread.name for thread in threading.enumerate()}
    writers = [thread for thread in threading.enumerate() if type(thread).__name__ == "_AsyncWriterThread"]
    assert len(writers) == (engine.rank == 0), names
    for _ in range(ACCUMULATION):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    forgotten = weakref.ref(engine)
    gc.collect()
    del engine
    assert forgotten() is not None, "vacuous: it is garbage without a collection"
    with threading._active_limbo_lock:  # type: ignore[attr-defined]  # as threading.enumerate holds it
        gc.collect()
    assert forgotten() is None
    alive = [thread.is_alive() for thread in writers]
    atexit._run_exitfuncs()
    return [*alive, *(thread.is_alive() for thread in writers)]


def test_a_forgotten_engine_closes_its_files_at_the_end(tmp_path: Path) -> None:
    """A collection of garbage waits for no thread."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run_ranks(collected_inside_of_threading, 2, str(tmp_path), timeout=30) == [[True, False], []]
    events: Any = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert len(events.Scalars("Train/Samples/train_loss")) == 1


def test_a_folder_that_cannot_be_written_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    texts = run_ranks(refuse, 2, str(tmp_path))
    assert texts[0] == texts[1]
    folder = f"{tmp_path}/file/DeepSpeedJobName"
    assert texts[0] == f"csv_monitor: cannot write into {folder}: Not a directory. Set csv_monitor.output_path."


def test_a_missing_package_is_named_with_its_command_on_all_ranks() -> None:
    texts = run_ranks(refuse_missing, 2)
    assert texts[0] == texts[1]
    for block, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        assert f"{block}.enabled is true, and the package {package} cannot be imported on rank 0's machine" in texts[0]
        assert f"pip install {package}, or use csv_monitor" in texts[0]


def test_an_api_key_is_in_no_log() -> None:
    given = {"train_micro_batch_size_per_gpu": 1, "comet": {"project": "p", "api_key": "secret"}}
    resolved = hf_zero.ZeroConfig.load(given).resolve(world_size=1)
    assert resolved.settings["comet.api_key"] == "secret", "vacuous"
    text = start_text(resolved)
    assert "secret" not in text and text.count("(not shown)") == 2 and '"project": "p"' in text
