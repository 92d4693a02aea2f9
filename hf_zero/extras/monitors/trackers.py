"""The monitors that the numbers of a run may go to, and the keys of each beside its class. Tags, files and counts by
samples are DeepSpeed's; accelerate's trackers talk to the libraries.

No torch and no accelerate here: a configuration is checked without them.
"""

from __future__ import annotations

import csv
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from hf_zero.config.schema import Block, Choice, Count, Flag, Text, key, keys_of
from hf_zero.errors import ConfigError

logger = logging.getLogger(__name__)


class Monitor(Protocol):
    """A place where numbers go."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write `values` by tag, such as "Train/Samples/lr"; `step` counts samples."""

    def finish(self) -> None: ...


@dataclass(frozen=True)
class FilesSection:
    """The blocks `tensorboard` and `csv_monitor`: files in `output_path`/`job_name`."""

    enabled: bool = key("Write losses, rates and loss scales of training to files, on rank 0.", Flag(False))
    output_path: str = key("The folder that the files are written into.", Text(""))
    job_name: str = key("The folder inside output_path for this run.", Text("DeepSpeedJobName"))


class CsvMonitor:
    """A file for each tag, "Train_Samples_lr.csv": a line of names, then samples and value. A later run appends."""

    def __init__(self, section: FilesSection) -> None:
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


def _tensorboard(section: FilesSection) -> Monitor:
    _import("tensorboard", "tensorboard")
    folder = _writable_folder("tensorboard", section)
    tracker: Monitor = _started("TensorBoardTracker", folder.name, folder.parent)
    return tracker


@dataclass(frozen=True)
class WandbSection:
    """The `wandb` block: a run of Weights & Biases. None is the library's own value, as its environment sets it."""

    enabled: bool = key(
        "Send losses, rates and loss scales of training to Weights & Biases, from rank 0.", Flag(False)
    )
    group: str | None = key("The group of runs that this one belongs to.", Text())
    team: str | None = key("The team or user (entity) that the run belongs to.", Text())
    project: str = key("The project that the run belongs to.", Text("deepspeed"))


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


@dataclass(frozen=True)
class CometSection:
    """The `comet` block: an experiment of Comet. None is the library's own value, as its configuration sets it."""

    enabled: bool = key("Send losses, rates and loss scales of training to Comet, from rank 0.", Flag(False))
    samples_log_interval: int = key("The number of samples after which a value is sent again.", Count(100))
    project: str | None = key("The project that the experiment belongs to.", Text())
    workspace: str | None = key("The workspace that the experiment belongs to.", Text())
    api_key: str | None = key("The key of the account; logs do not show it.", Text())
    experiment_name: str | None = key("The name that the experiment is shown under.", Text())
    experiment_key: str | None = key("The identifier of an experiment that exists and is continued.", Text())
    online: bool | None = key("Send to the server; false writes an archive on this machine.", Flag(None))
    mode: str | None = key(
        "The choice between a new experiment and one that is continued.",
        Choice(choices=("get", "create", "get_or_create")),
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
    device = importlib.import_module("hf_zero.distributed.processes").default_device()
    # The logger that the trackers call raises without accelerate's state.
    importlib.import_module("accelerate").PartialState(cpu=device.type == "cpu")
    tracker = getattr(importlib.import_module("accelerate.tracking"), name)(*args, **kwargs)
    tracker.main_process_only = False  # rank 0 alone has one
    tracker.start()
    return tracker


def _writable_folder(name: str, section: FilesSection) -> Path:
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


# The block of the configuration -> its section, and what opens its monitor.
TRACKERS: dict[str, tuple[type[Any], Callable[[Any], Monitor]]] = {
    "tensorboard": (FilesSection, _tensorboard),
    "csv_monitor": (FilesSection, CsvMonitor),
    "wandb": (WandbSection, WandbMonitor),
    "comet": (CometSection, CometMonitor),
}
BLOCKS = {name: Block(always=True, keys=keys_of(section)) for name, (section, _) in TRACKERS.items()}
