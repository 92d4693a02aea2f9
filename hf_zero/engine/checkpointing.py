"""The checkpoints of one engine: where they go to and come from, and what of the engine is in them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from hf_zero.checkpoint import collective
from hf_zero.checkpoint.agreement import agree_on_source, agree_on_target, mark_latest
from hf_zero.checkpoint.collective import Parts, Session
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.runtime.build import BuiltUnits

logger = logging.getLogger(__name__)


class Checkpointing:
    """Saves and loads one engine; the engine's methods say what each argument means. All ranks must call each method.

    Args:
        check_model: Raises StateError on every rank if one has a model that does not hold what would be saved.
    """

    def __init__(
        self, model: nn.Module, built: BuiltUnits, schedule: StepSchedule, check_model: Callable[[], None]
    ) -> None:
        self._model = model
        self._built = built
        self._comm = built.comm
        self._schedule = schedule
        self._check_model = check_model

    def session(self) -> Session:
        """What of the engine goes into a checkpoint now."""
        schedule = self._schedule
        return Session(
            self._model,
            self._built.units,
            self._comm,
            schedule.optimizer,
            schedule.lr_scheduler,
            self._built.settings.stage,
            schedule.global_steps,
        )

    def save(
        self,
        save_dir: str | Path,
        tag: str | int | None,
        client_state: Any,
        *,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> None:
        """Write into `save_dir/tag`, and with `save_latest` name it in `save_dir/latest`."""
        self._comm.require_all_ranks("save_checkpoint")
        options = {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen}
        default = f"global_step{self._schedule.global_steps}"
        target = agree_on_target(self._comm, save_dir, tag, default, options)
        self._write(target.folder, client_state, exclude_frozen)
        if save_latest:
            mark_latest(self._comm, target)

    def write(self, folder: str | Path, *, exclude_frozen: bool) -> None:
        """Write into `folder` itself: no tag, no `latest`."""
        self._comm.require_all_ranks("write_checkpoint")
        options = {"exclude_frozen_parameters": exclude_frozen}
        self._write(agree_on_target(self._comm, folder, None, "", options).folder, None, exclude_frozen)

    def _write(self, folder: Path, client_state: Any, exclude_frozen: bool) -> None:
        self._check_model()
        self._schedule.finish_updates()
        collective.save(self.session(), folder, client_state, exclude_frozen)

    def load(self, load_dir: str | Path, tag: str | int | None, parts: Parts) -> tuple[str | None, Any]:
        """Restore `parts`; returns (the checkpoint's folder, client_state), (None, {}) where nothing was saved yet."""
        self._comm.require_all_ranks("load_checkpoint")
        folder = agree_on_source(self._comm, load_dir, tag, vars(parts))
        if folder is None:
            if self._comm.rank == 0:
                logger.warning("load_checkpoint: %s holds no checkpoint, nothing is loaded", load_dir)
            return None, {}
        return str(folder), self.read(folder, parts)

    def read(self, folder: str | Path, parts: Parts) -> Any:
        """Restore `parts` from `folder` itself; returns the client_state or {}."""
        schedule = self._schedule
        schedule.params.reshard_all()
        schedule.finish_updates()
        schedule.zero_grad()
        loaded = collective.load(self.session(), Path(folder), parts)
        if parts.counters:
            schedule.restart_at(loaded.global_step)
            if schedule.optimizer is not None:
                schedule.optimizer.restart_at(loaded.global_step)
        return {} if loaded.client_state is None else loaded.client_state
