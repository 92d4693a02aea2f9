"""Monitors: an engine's losses, rates and loss scales go to the trackers of `trackers.py`.

Rank 0 writes. What cannot be written is an error on every rank before the first step.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from functools import partial

import torch

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.engine.reports import Event, Watcher
from hf_zero.errors import ConfigError
from hf_zero.extras.monitors.trackers import TRACKERS, Monitor
from hf_zero.optim.hyperparameters import learning_rates


class MonitorsPart(EnginePart):
    """Opens the monitors that the configuration asks for, on rank 0 of a run that trains, before the model is sharded.

    All ranks must call. Raises ConfigError on every rank.
    """

    engine: ZeroEngine

    def __init__(self, engine: ZeroEngine) -> None:
        super().__init__(engine)
        self._monitors: list[Monitor] = []
        sections = {name: engine.config.section(name, section) for name, (section, _) in TRACKERS.items()}
        wanted = {name: section for name, section in sections.items() if section.enabled}
        if not wanted or not engine.trains:
            return
        problems = []
        if engine.run_comm.rank == 0:
            for name, section in wanted.items():
                try:
                    self._monitors.append(TRACKERS[name][1](section))
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
        # For a script that forgets the engine without a teardown. Nothing ends where this is garbage: TensorBoard's
        # writer waits for its thread, and Python may collect inside of `threading`, whose lock an ending thread needs.
        self._finish = partial(_finish_all, monitors)
        atexit.register(self._finish)

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
        atexit.unregister(self._finish)
        self._finish()


def _finish_all(monitors: list[Monitor]) -> None:
    while monitors:
        monitors.pop().finish()
