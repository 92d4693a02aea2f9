"""Monitors: numbers of a run for TensorBoard, wandb, Comet and CSV files. Tags, files and what they count by are
DeepSpeed's.

Rank 0 writes. What cannot be written is an error on every rank before the first step.
"""

from __future__ import annotations

import csv
import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from hf_zero.config import CometSection, MonitorSection, ResolvedConfig, WandbSection
from hf_zero.distributed.comm import Comm
from hf_zero.engine.reports import Event, Watcher
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.errors import ConfigError
from hf_zero.optim.hyperparameters import learning_rates

logger = logging.getLogger(__name__)


class Monitor(Protocol):
    """Where numbers go."""

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """`values` by tag, such as "Train/Samples/lr", after as many samples."""

    def close(self) -> None: ...


class CsvMonitor:
    """A file for each tag, "Train_Samples_lr.csv": a line of names, then samples and value. A later run appends."""

    def __init__(self, section: MonitorSection) -> None:
        self._folder = _writable_folder("csv_monitor", section)
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

    def __init__(self, section: MonitorSection) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(_missing("tensorboard", "tensorboard", error)) from error
        self._writer = SummaryWriter(log_dir=str(_writable_folder("tensorboard", section)))

    def write(self, values: Mapping[str, float], samples: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbMonitor:
    """A run of Weights & Biases: the script's own where it has begun one, else one that ends with the engine."""

    def __init__(self, section: WandbSection) -> None:
        named = {"project": section.project, "group": section.group, "entity": section.team}
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(_missing("wandb", "wandb", error)) from error
        self._is_ours = wandb.run is None
        if not self._is_ours and section != WandbSection(enabled=True):
            logger.warning("wandb.project, group and team have no effect: the script has begun a run, which is used")
        try:
            # init would ask for the key on a terminal, while the other ranks wait.
            if self._is_ours and wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
                raise ConfigError(_WANDB_LOGIN)
            self._run = wandb.init(**named) if self._is_ours else wandb.run
        except wandb.errors.Error as error:
            raise ConfigError(f"wandb.enabled is true, and wandb.init failed: {error}\n{_WANDB_LOGIN}") from error

    def write(self, values: Mapping[str, float], samples: int) -> None:
        self._run.log(dict(values), step=samples)

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()


_WANDB_LOGIN = (
    "wandb.enabled is true, and wandb is not logged in on rank 0's machine: run `wandb login`, or set WANDB_API_KEY, "
    "or WANDB_MODE=offline."
)


class CometMonitor:
    """A Comet experiment. Each tag is written once in `samples_log_interval` samples, the first time at once."""

    def __init__(self, section: CometSection) -> None:
        named = {
            "api_key": section.api_key,
            "project": section.project,
            "workspace": section.workspace,
            "experiment_key": section.experiment_key,
            "mode": section.mode,
            "online": section.online,
        }
        self._interval, name = section.samples_log_interval, section.experiment_name
        self._written: dict[str, int] = {}  # tag -> samples at its last write
        try:
            import comet_ml
        except ImportError as error:
            raise ConfigError(_missing("comet", "comet_ml", error)) from error
        try:
            self._experiment = comet_ml.start(**named)
        except Exception as error:  # of many classes, ValueError for a missing key
            raise ConfigError(
                f"comet.enabled is true, and comet_ml.start failed: {error}\nRun `comet login`, or set COMET_API_KEY "
                'or comet.api_key; "online": false writes to this machine.'
            ) from error
        if name is not None:
            self._experiment.set_name(name)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        for tag, value in values.items():
            if tag not in self._written or samples - self._written[tag] >= self._interval:
                self._written[tag] = samples
                self._experiment.log_metric(tag, value, step=samples)

    def close(self) -> None:
        self._experiment.end()


def _missing(block: str, package: str, error: ImportError) -> str:
    return (
        f"{block}.enabled is true, and the package {package} cannot be imported on rank 0's machine ({error}): "
        f"pip install {package}, or use csv_monitor"
    )


_KINDS: dict[str, Callable[[Any], Monitor]] = {
    "csv_monitor": CsvMonitor,
    "tensorboard": TensorBoardMonitor,
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


def open_monitors(config: ResolvedConfig, comm: Comm, *, train: bool) -> list[Monitor]:
    """What `config` asks for, on rank 0, of a run that trains. All ranks must call.

    Raises ConfigError on every rank.
    """
    sections = {name: getattr(config, name) for name in _KINDS}
    wanted = {name: section for name, section in sections.items() if section.enabled}
    if not wanted or not train:
        return []
    opened: list[Monitor] = []
    problems = []
    for name, section in wanted.items() if comm.rank == 0 else ():
        try:
            opened.append(_KINDS[name](section))
        except ConfigError as error:
            problems.append(str(error))
    if problem := "\n".join(comm.all_gather_object(problems, "monitors")[0]):
        _close_all(opened)
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
