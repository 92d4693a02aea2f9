"""Monitors: numbers of a run for TensorBoard and CSV files. Tags, files and what they count by are DeepSpeed's.

Rank 0 writes. What cannot be written is an error on every rank before the first step.
"""

from __future__ import annotations

import csv
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TextIO

import torch

from hf_zero.config import MonitorSection, ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.reports import Event, Watcher
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.errors import ConfigError
from hf_zero.optim.hyperparameters import learning_rates


class Monitor(Protocol):
    """Where numbers go."""

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """`values` by tag, such as "Train/Samples/lr", after as many samples."""

    def close(self) -> None: ...


class CsvMonitor:
    """A file for each tag, "Train_Samples_lr.csv": a line of names, then samples and value. A later run appends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _check_writable(folder)
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def write(self, values: Mapping[str, float], samples: int) -> None:
        for tag, value in values.items():
            file = self._files.get(tag) or self._open(tag)
            csv.writer(file).writerow([samples, value])
            file.flush()

    def _open(self, tag: str) -> TextIO:
        path = self._folder / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
        file = self._files[tag] = path.open("a", newline="", encoding="utf-8")
        csv.writer(file).writerow(["step", tag.rpartition("/")[2]])
        return file

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class TensorBoardMonitor:
    """An event file, through torch.utils.tensorboard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tensorboard.enabled is true, and the package tensorboard is not installed: pip install tensorboard, "
                "or use csv_monitor"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        _check_writable(folder)
        self._writer = SummaryWriter(log_dir=str(folder))

    def write(self, values: Mapping[str, float], samples: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


_KINDS: dict[str, type[CsvMonitor] | type[TensorBoardMonitor]] = {
    "csv_monitor": CsvMonitor,
    "tensorboard": TensorBoardMonitor,
}


def _check_writable(folder: Path) -> None:
    """Before training: a disk that is read-only, a folder of somebody else's."""
    probe = folder / ".hf_zero"
    probe.touch()
    probe.unlink()


def open_monitors(config: ResolvedConfig, comm: Comm, *, train: bool) -> list[Monitor]:
    """What `config` asks for, on rank 0, of a run that trains. All ranks must call.

    Raises ConfigError on every rank.
    """
    wanted: dict[str, MonitorSection] = {name: getattr(config, name) for name in _KINDS}
    wanted = {name: section for name, section in wanted.items() if section.enabled}
    if not wanted or not train:
        return []
    opened: list[Monitor] = []
    problems = []
    for name, section in wanted.items() if comm.rank == 0 else ():
        folder = Path(section.output_path, section.job_name)
        try:
            opened.append(_KINDS[name](folder))
        except OSError as error:
            problems.append(f"{name}: cannot write into {folder}: {error.strerror or error}. Set {name}.output_path.")
        except ConfigError as error:
            problems.append(str(error))
    if problem := "\n".join(comm.all_gather_object(problems, "monitors")[0]):
        raise ConfigError(problem)
    return opened


class Monitored(Watcher):
    """Tells monitors of each step: the loss that engine.backward was given, the rate, the loss scale.

    Reading the loss waits for the device, once a step, as in DeepSpeed. Where the script calls loss.backward() itself,
    as under Trainer, the loss is not known here; Trainer's `report_to` has it.
    """

    def __init__(
        self,
        schedule: StepSchedule,
        config: ResolvedConfig,
        monitors: list[Monitor],
        samples_per_step: Callable[[], int],
    ) -> None:
        self._schedule = schedule
        self._scales = config.dtype == "float16"
        self._monitors = monitors
        self._samples_per_step = samples_per_step
        self._losses: list[torch.Tensor] = []  # of the micro-batches of a step
        # For who forgets the engine without a teardown.
        self._finalizer = weakref.finalize(self, _close_all, monitors)

    def on(self, event: Event) -> None:
        """Nothing but losses and steps counts."""

    def loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())

    def micro_ends(self, boundary: bool) -> None:
        if not boundary:
            return
        schedule = self._schedule
        values: dict[str, float] = {}
        if self._losses:
            values["Train/Samples/train_loss"] = sum(float(loss) for loss in self._losses) / len(self._losses)
        self._losses.clear()
        if schedule.optimizer is not None:
            values["Train/Samples/lr"] = float(learning_rates(schedule.optimizer.param_groups)[0])
            if self._scales:
                values["Train/Samples/loss_scale"] = float(schedule.optimizer.guard.scaler.cur_scale)
        samples = schedule.global_steps * self._samples_per_step()
        for monitor in self._monitors:
            monitor.write(values, samples)

    def close(self) -> None:
        self._finalizer()


def _close_all(monitors: list[Monitor]) -> None:
    for monitor in monitors:
        monitor.close()
