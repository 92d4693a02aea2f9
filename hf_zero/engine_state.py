"""Whole weights and checkpoints of an engine: the part of ZeroEngine that files have to do with."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint import session
from hf_zero.checkpoint.latest import chosen
from hf_zero.comm import Comm
from hf_zero.config import ResolvedConfig
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.runtime.params import OnDemandParams
from hf_zero.runtime.weights import WholeWeights
from hf_zero.shards.unit import ShardUnit


class EngineState(abc.ABC):
    """The base of ScriptCalls, and so of ZeroEngine, which owns everything that is named here."""

    module: nn.Module
    config: ResolvedConfig
    comm: Comm
    units: list[ShardUnit]
    params: OnDemandParams
    weights: WholeWeights
    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    accumulation_steps: int
    micro_steps: int
    global_steps: int

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
        self.finish_updates()
        return self.weights.state_dict(keep, trainable_only=trainable_only)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take weights from a mapping of whole tensors, given on every rank. Masters start from these values."""
        self.finish_updates()
        self.weights.load_state_dict(state, strict=strict)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write a checkpoint into `save_dir` (or `save_dir/tag`); it loads at any world size and stage.

        All ranks must call. With `save_latest`, loading `save_dir` without a tag finds this one. Without frozen
        parameters it loads only where these are the same already.
        """
        self.require_all_ranks("save_checkpoint")
        self.finish_updates()
        folder = Path(save_dir, tag or "")
        session.save(self._session(), folder, client_state, exclude_frozen_parameters)
        if save_latest:
            session.mark_latest(self.comm, Path(save_dir), tag)
        return folder

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str, Any]:
        """Restore weights, optimizer state, scheduler and counters; returns (the checkpoint's folder, client_state).

        All ranks must call. Without a tag it is the one saved last in `load_dir`. `load_module_only` leaves all but
        weights and buffers as they are. Parameters must fit with `load_module_strict=False` too.

        Raises ConfigError for a `custom_load_fn`, CheckpointError where there is none or it does not fit.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...): use hf_zero.load_fp32_state_dict and set_full_param"
            )
        self.params.release_all()
        self.finish_updates()
        self.zero_grad()
        folder = self._chosen_by_all(load_dir, tag)
        loaded = session.load(
            self._session(),
            folder,
            load_optimizer=load_optimizer_states and not load_module_only,
            load_scheduler=load_lr_scheduler_states and not load_module_only,
        )
        if load_module_only:
            return str(folder), loaded.client_state
        self.global_steps = loaded.global_step
        self.micro_steps = loaded.global_step * self.accumulation_steps
        if self.optimizer is not None:
            self.optimizer.restart_at(loaded.global_step)
        return str(folder), loaded.client_state

    def _chosen_by_all(self, load_dir: str | Path, tag: str | None) -> Path:
        """What `latest` names, if it is the same for all ranks: their file systems may not agree yet."""
        everyone = self.comm.together(
            "load_checkpoint",
            lambda: str(chosen(load_dir, tag)),
            catch=(CheckpointError, OSError),
            raise_as=CheckpointError,
        )
        if len({folder.removeprefix(str(load_dir)) for folder in everyone}) > 1:
            raise CheckpointError(f"ranks would load different checkpoints: {everyone} (in rank order)")
        return Path(everyone[self.comm.rank])

    def _session(self) -> session.Session:
        return session.Session(
            self.module, self.units, self.comm, self.optimizer, self.lr_scheduler, self.config.stage, self.global_steps
        )
