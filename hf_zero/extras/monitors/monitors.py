"""Monitors: numbers of a run for TensorBoard, wandb, Comet and CSV files. Tags, files and what they count by are
DeepSpeed's; accelerate's trackers talk to the libraries.

Rank 0 writes. What cannot be written is an error on every rank before the first step.
"""

from __future__ import annotations

import csv
import importlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from hf_zero.config import CometSection, MonitorSection, WandbSection
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.engine.reports import Event, Watcher
from hf_zero.errors import ConfigError
from hf_zero.optim.hyperparameters import learning_rates

logger = logging.getLogger(__name__)


class Monitor(Protocol):
    """A place where numbers go."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write `values` by tag, such as "Train/Samples/lr"; `step` counts samples."""

    def finish(self) -> None: ...


class CsvMonitor:
    """A file for each tag, "Train_Samples_lr.csv": a line of names, then samples and value. A later run appends."""

    def __init__(self, section: MonitorSection) -> None:
        self._folder = _writable_folder("csv_monitor", section)
        self._files: dict[str, TextIO] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            file = self._files.get(tag) or self._open(tag)
            csv.writer(file).writerow([step, value])
            file.flush()

    def _open(self, tag: str) -> TextIO:
        path = self._folder / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
        file = self._files[tag] = path.open("a", newline="", encoding="utf-8")
        csv.writer(file).writerow(["step", tag.rpartition("/")[2]])
        return file

    def finish(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def _tensorboard(section: MonitorSection) -> Monitor:
    _import("tensorboard", "tensorboard")
    folder = _writable_folder("tensorboard", section)
    tracker: Monitor = _started("TensorBoardTracker", folder.name, folder.parent)
    return tracker


class WandbMonitor:
    """A run of Weights & Biases: the script's own where it has begun one, else one that ends with the engine."""

    def __init__(self, section: WandbSection) -> None:
        named = {"group": section.group, "entity": section.team, "reinit": "return_previous"}
        project = section.project
        wandb = _import("wandb", "wandb")
        self._is_ours = wandb.run is None
        if not self._is_ours and section != WandbSection(enabled=True):
            logger.warning("wandb.project, group and team have no effect: the script has begun a run, which is used")
        try:
            # init would ask for the key on a terminal, while the other ranks wait.
            if self._is_ours and wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
                raise ConfigError(_WANDB_LOGIN)
            self._tracker = _started("WandBTracker", project, **named)
        except wandb.errors.Error as error:
            raise ConfigError(f"wandb.enabled is true, and wandb.init failed: {error}\n{_WANDB_LOGIN}") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._tracker.log(values, step=step)

    def finish(self) -> None:
        if self._is_ours:
            self._tracker.finish()


_WANDB_LOGIN = (
    "wandb.enabled is true, and wandb is not logged in on rank 0's machine: run `wandb login`, or set WANDB_API_KEY, "
    "or WANDB_MODE=offline."
)


class CometMonitor:
    """A Comet experiment. Each tag is written once in `samples_log_interval` samples, the first time at once."""

    def __init__(self, section: CometSection) -> None:
        names = ("api_key", "workspace", "experiment_key", "mode", "online")
        self._interval = section.samples_log_interval
        self._next: dict[str, int] = {}  # tag -> samples from which on it is written again
        named = {name: getattr(section, name) for name in names}
        project, name = section.project, section.experiment_name
        _import("comet", "comet_ml")
        try:
            self._tracker = _started("CometMLTracker", project, **named)
        except Exception as error:  # of many classes, ValueError for a missing key
            raise ConfigError(
                f"comet.enabled is true, and comet_ml.start failed: {error}\nRun `comet login`, or set COMET_API_KEY "
                'or comet.api_key; "online": false writes to this machine.'
            ) from error
        if name is not None:
            self._tracker.tracker.set_name(name)

    def log(self, values: Mapping[str, float], step: int) -> None:
        due = {tag: value for tag, value in values.items() if self._next.get(tag, step) <= step}
        self._next |= dict.fromkeys(due, step + self._interval)
        if due:
            self._tracker.log(due, step=step)

    def finish(self) -> None:
        self._tracker.finish()


def _import(block: str, package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{block}.enabled is true, and the package {package} cannot be imported on rank 0's machine ({error}): "
            f"pip install {package}, or use csv_monitor"
        ) from error


def _started(name: str, *args: Any, **kwargs: Any) -> Any:
    """Start one of accelerate's trackers; the import waits until a run asks for one."""
    tracker = getattr(importlib.import_module("accelerate.tracking"), name)(*args, **kwargs)
    tracker.main_process_only = False  # rank 0 alone has one
    tracker.start()
    return tracker


_KINDS: dict[str, Callable[[Any], Monitor]] = {
    "csv_monitor": CsvMonitor,
    "tensorboard": _tensorboard,
    "wandb": WandbMonitor,
    "comet": CometMonitor,
}


def _writable_folder(name: str, section: MonitorSection) -> Path:
    """`output_path`/`job_name`. Before training: a disk may be read-only, a folder somebody else's.

    Raises ConfigError.
    """
    folder = Path(section.output_path, section.job_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".hf_zero"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot write into {folder}: {error.strerror or error}. Set {name}.output_path."
        ) from error
    return folder


class MonitorsPart(EnginePart):
    """Opens the monitors that the configuration asks for, on rank 0 of a run that trains, before the model is sharded.

    All ranks must call. Raises ConfigError on every rank.
    """

    engine: ZeroEngine

    def __init__(self, engine: ZeroEngine) -> None:
        super().__init__(engine)
        self._monitors: list[Monitor] = []
        sections = {name: getattr(engine.config, name) for name in _KINDS}
        wanted = {name: section for name, section in sections.items() if section.enabled}
        if not wanted or not engine.trains:
            return
        problems = []
        if engine.run_comm.rank == 0:
            if wanted.keys() != {"csv_monitor"}:
                # The logger that accelerate's trackers call raises without accelerate's state.
                importlib.import_module("accelerate").PartialState(cpu=engine.comm.computes_on_host)
            for name, section in wanted.items():
                try:
                    self._monitors.append(_KINDS[name](section))
                except ConfigError as error:
                    problems.append(str(error))
        if problem := "\n".join(engine.run_comm.all_gather_object(problems, "monitors")[0]):
            _finish_all(self._monitors)
            raise ConfigError(problem)

    def start(self) -> Sequence[Watcher]:
        return [Monitored(self.engine, self._monitors)] if self._monitors else []


class Monitored(Watcher):
    """Tells monitors of each step: the loss that engine.backward was given, the rate, the loss scale.

    Reading the loss waits for the device, once a step, as in DeepSpeed. Where the script calls loss.backward() itself,
    as under Trainer, the loss is not known here; Trainer's `report_to` has it.
    """

    def __init__(self, engine: ZeroEngine, monitors: list[Monitor]) -> None:
        self._engine = engine
        self._monitors = monitors
        self._losses: list[torch.Tensor] = []  # of the micro-batches of a step
        # For a script that forgets the engine without a teardown.
        self._finalizer = weakref.finalize(self, _finish_all, monitors)

    def on(self, event: Event) -> None:
        """Do nothing: losses and steps are all that counts."""

    def loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())

    def micro_ends(self, boundary: bool) -> None:
        if not boundary:
            return
        schedule = self._engine.schedule
        values: dict[str, float] = {}
        if self._losses:
            values["Train/Samples/train_loss"] = sum(float(loss) for loss in self._losses) / len(self._losses)
        self._losses.clear()
        if schedule.optimizer is not None:
            values["Train/Samples/lr"] = float(learning_rates(schedule.optimizer.param_groups)[0])
            if self._engine.config.dtype == "float16":
                values["Train/Samples/loss_scale"] = float(schedule.optimizer.guard.scaler.cur_scale)
        samples = schedule.global_steps * self._engine.config.train_batch_size
        for monitor in self._monitors:
            monitor.log(values, samples)

    def close(self) -> None:
        self._finalizer()


def _finish_all(monitors: list[Monitor]) -> None:
    for monitor in monitors:
        monitor.finish()
