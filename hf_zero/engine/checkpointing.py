"""Whole weights and checkpoints of an engine: the part of ZeroEngine that files have to do with."""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint import collective
from hf_zero.checkpoint.agreement import agree_on_source, agree_on_target, mark_latest
from hf_zero.checkpoint.collective import ALL_PARTS, Parts
from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.runtime.attach import ModelAttachment
from hf_zero.runtime.full_weights import FullWeights
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.unit import ShardUnit

logger = logging.getLogger(__name__)


class EngineState(abc.ABC):
    """The base of ScriptCalls, and so of ZeroEngine, which owns everything that is named here."""

    module: nn.Module
    config: ResolvedConfig
    comm: Comm
    units: list[ShardUnit]
    params: OnDemandParams
    weights: FullWeights
    schedule: StepSchedule
    lr_scheduler: Any
    _attachment: ModelAttachment

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        return self.schedule.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: ShardedOptimizer | None) -> None:
        self.schedule.optimizer = optimizer

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of an update."""
        return self.schedule.accumulation_steps

    @property
    def micro_steps(self) -> int:
        """Micro-batches whose `step()` was called."""
        return self.schedule.micro_steps

    @property
    def global_steps(self) -> int:
        """Updates, and those left out (fp16)."""
        return self.schedule.global_steps

    @abc.abstractmethod
    def finish_updates(self) -> None: ...

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def require_all_ranks(self, name: str) -> None:
        """Raise StateError, within seconds, unless every rank calls this with the same name."""
        self.comm.require_all_ranks(name)

    def full_state_dict(self, keep: bool, *, trainable_only: bool = False) -> dict[str, torch.Tensor]:
        """Whole weights on the CPU under the model's state_dict names, where `keep`; {} elsewhere.

        All ranks must call. Tied names share one tensor; persistent buffers are included. Peak extra memory: one unit.
        """
        self.require_all_ranks("full_state_dict")
        self._check_model()
        self.finish_updates()
        return self.weights.state_dict(keep, trainable_only=trainable_only)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take weights from a mapping of whole tensors, given on every rank. Masters start from these values."""
        self.finish_updates()
        self.weights.load_state_dict(state, strict=strict)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint into `save_dir/tag`; it loads at any world size and stage. Returns True.

        All ranks must call, with the same arguments. Without a tag it is "global_stepN". With `save_latest`, loading
        `save_dir` without a tag finds this one. Without frozen parameters it loads only where these are the same
        already.

        Raises CheckpointError on every rank: ranks name different folders or tags (nothing is written), or a rank
        could not write its part.
        """
        self.require_all_ranks("save_checkpoint")
        options = {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen_parameters}
        target = agree_on_target(self.comm, save_dir, tag, f"global_step{self.global_steps}", options)
        self._write(target.folder, client_state, exclude_frozen_parameters)
        if save_latest:
            mark_latest(self.comm, target)
        return True

    def write_checkpoint(self, folder: str | Path, exclude_frozen_parameters: bool = False) -> None:
        """As `save_checkpoint`, but into `folder` itself: no tag, no `latest`. All ranks must call."""
        self.require_all_ranks("write_checkpoint")
        options = {"exclude_frozen_parameters": exclude_frozen_parameters}
        target = agree_on_target(self.comm, folder, None, "", options)
        self._write(target.folder, None, exclude_frozen_parameters)

    def _check_model(self) -> None:
        """Raise StateError on every rank if one has a model that does not hold what would be saved."""

        def check() -> None:
            self._attachment.check_model()
            for buffer in (buffer for unit in self.units for buffer in unit.buffers):
                buffer.check_views()

        self.comm.together("the model's parameters", check, catch=(StateError,), raise_as=StateError)

    def _write(self, folder: Path, client_state: Any, exclude_frozen: bool) -> None:
        self._check_model()
        self.finish_updates()
        collective.save(self._session(), folder, client_state, exclude_frozen)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        *,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Restore weights, optimizer state, scheduler and counters; returns (the checkpoint's folder, client_state).

        All ranks must call, with the same arguments. Without a tag it is the one saved last in `load_dir`, and where
        nothing was saved yet (None, {}) with a warning. `load_module_only` leaves all but weights and buffers as they
        are. Parameters must fit with `load_module_strict=False` too.

        Raises ConfigError for a `custom_load_fn`, CheckpointError on every rank where the checkpoint is not there, is
        damaged or does not fit, or where ranks would load different ones.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...): use hf_zero.load_fp32_state_dict and set_full_param"
            )
        self.require_all_ranks("load_checkpoint")
        parts = Parts(
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
        )
        folder = agree_on_source(self.comm, load_dir, tag, vars(parts))
        if folder is None:
            if self.comm.rank == 0:
                logger.warning("load_checkpoint: %s holds no checkpoint, nothing is loaded", load_dir)
            return None, {}
        return str(folder), self.read_checkpoint(folder, parts)

    def read_checkpoint(self, folder: str | Path, parts: Parts = ALL_PARTS) -> Any:
        """As `load_checkpoint`, but from `folder` itself, whatever its `latest` names; returns the client_state or {}.

        All ranks must call. Raises CheckpointError on every rank, also where there is none.
        """
        self.params.release_all()
        self.finish_updates()
        self.zero_grad()
        loaded = collective.load(self._session(), Path(folder), parts)
        if parts.counters:
            self.schedule.restart_at(loaded.global_step)
            if self.optimizer is not None:
                self.optimizer.restart_at(loaded.global_step)
        return {} if loaded.client_state is None else loaded.client_state

    def _session(self) -> collective.Session:
        return collective.Session(
            self.module, self.units, self.comm, self.optimizer, self.lr_scheduler, self.config.stage, self.global_steps
        )
