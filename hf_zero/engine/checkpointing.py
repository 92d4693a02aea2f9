"""The checkpoints of one engine: where they go to and come from, and what of the engine is in them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_zero.checkpoint.agreement import agree_on_source, agree_on_target
from hf_zero.checkpoint.background import BackgroundSaves
from hf_zero.checkpoint.client_state import decode_client_state
from hf_zero.checkpoint.contents import CheckpointContents
from hf_zero.checkpoint.folders import latest_files
from hf_zero.checkpoint.load import Parts, load
from hf_zero.checkpoint.save import save, snapshot_bytes
from hf_zero.config.resolved import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.runtime.build import BuiltUnits

logger = logging.getLogger(__name__)


class Checkpointing:
    """Saves and loads one engine; the engine's methods say what each argument means. All ranks must call each method.

    Args:
        check_model: Raises StateError on every rank if one has a model that does not hold what would be saved.
        comm: The ranks that save; None: those that share the model.
    """

    def __init__(
        self,
        model: nn.Module,
        built: BuiltUnits,
        schedule: StepSchedule,
        config: ResolvedConfig,
        check_model: Callable[[], None],
        comm: Comm | None = None,
    ) -> None:
        self._model = model
        self._built = built
        self._comm = comm or built.comm
        self._schedule = schedule
        self._settings = config.checkpoint
        self._check_model = check_model
        pin = config.zero.offload_optimizer.pin_memory
        self._background = BackgroundSaves(self._comm, pin=pin) if config.checkpoint.asynchronous else None
        self._is_prepared = False

    def contents(self) -> CheckpointContents:
        """Return the parts of the engine that go into a checkpoint now."""
        schedule = self._schedule
        return CheckpointContents(
            self._model,
            self._built.units,
            self._comm,
            schedule.optimizer,
            schedule.lr_scheduler,
            self._built.settings.stage,
            schedule.global_steps,
            schedule.skipped_steps,
            node_local=self._settings.use_node_local_storage,
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
        target = agree_on_target(self._comm, save_dir, tag, default, options, self._settings.tag_validation)
        beside = latest_files(target.root, target.tag) if save_latest else {}
        self._write(target.folder, client_state, exclude_frozen, beside)

    def write(self, folder: str | Path, *, exclude_frozen: bool) -> None:
        """Write into `folder` itself: no tag, no `latest`."""
        self._comm.require_all_ranks("write_checkpoint")
        options = {"exclude_frozen_parameters": exclude_frozen}
        self._write(agree_on_target(self._comm, folder, None, "", options).folder, None, exclude_frozen, {})

    def _write(self, folder: Path, client_state: Any, exclude_frozen: bool, beside: Mapping[Path, bytes]) -> None:
        self.finish()
        self._check_model()
        self._schedule.finish_updates()
        save(
            self.contents(),
            folder,
            client_state,
            exclude_frozen=exclude_frozen,
            beside=beside,
            background=self._background,
        )

    # ---------------------------------------------------------------- a save in the background
    def finish(self) -> None:
        """Wait for the save in flight, if there is one."""
        if self._background is not None:
            self._background.finish()

    def after_step(self) -> None:
        """An update was made: raise what has failed in the background."""
        if self._background is None:
            return
        self._background.after_step()
        if not self._is_prepared:  # now there are optimizer states, and it is known how many
            self._is_prepared = True
            self._background.prepare(snapshot_bytes(self.contents()))

    def when_published(self, call: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        """Call `call` when what was saved last is published, from any thread: now if it is. Not of all ranks.

        Call `otherwise` if the save fails.
        """
        if self._background is None:
            call()
        else:
            self._background.when_published(call, otherwise)

    def close(self) -> None:
        """Wait for the save in flight; nothing is saved any more."""
        background, self._background = self._background, None
        if background is not None:
            try:
                background.finish()
            finally:
                background.close()

    def load(self, load_dir: str | Path, tag: str | int | None, parts: Parts) -> tuple[str | None, Any]:
        """Restore `parts`; returns (the checkpoint's folder, client_state), (None, {}) where nothing was saved yet."""
        self.finish()  # it may be the one that is asked for
        self._comm.require_all_ranks("load_checkpoint")
        node_local = self._settings.use_node_local_storage
        folder = agree_on_source(self._comm, load_dir, tag, vars(parts), node_local=node_local)
        if folder is None:
            if self._comm.rank == 0:
                logger.warning("load_checkpoint: %s holds no checkpoint, nothing is loaded", load_dir)
            return None, {}
        return str(folder), self.read(folder, parts)

    def read(self, folder: str | Path, parts: Parts) -> Any:
        """Restore `parts` from `folder` itself; returns the client_state or {}."""
        self.finish()
        schedule = self._schedule
        schedule.params.reshard_all()
        schedule.finish_updates()
        schedule.zero_grad()
        loaded = load(self.contents(), Path(folder), parts)
        if parts.counters:
            schedule.restart_at(loaded.global_step, loaded.skipped_steps)
            if schedule.optimizer is not None:
                schedule.optimizer.restart_at(loaded.global_step)
        return {} if loaded.client_state is None else decode_client_state(loaded.client_state)
