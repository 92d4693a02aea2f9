"""An exponential moving average of the weights, as one more shard of every trainable parameter."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.folders import chosen
from hf_zero.checkpoint.load import load_attached
from hf_zero.engine.engine import engine_of
from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.optim.state_access import assemble
from hf_zero.runtime.full_weights import share_resident
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.model_params import tied_names
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.shard import MemoryShard, ShardTensor
from hf_zero.sharding.unit import ShardUnit


class ShardedEMA:
    """`average = decay * average + (1 - decay) * weight` after every update, from the fp32 master weights.

    Every rank keeps the average of what it owns, in fp32 (fp64 for fp64 parameters), where the master weights are (on
    the host where these are on disk): 4 bytes per trainable parameter over all ranks together at stages 1-3. Frozen
    parameters and buffers are not averaged. Checkpoints of the engine hold the average, and restore it at any world
    size and stage.

    Args:
        model: In training under hf_zero. The average starts from its weights.
        decay: From 0 to 1.
        name: Of this average in checkpoints; several have several names.
    All ranks must construct it, and call its methods together.
    Raises:
        ConfigError: `decay` is no number from 0 to 1; there is an average of this name.
        StateError: The model is not in training under hf_zero.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, name: str = "ema") -> None:
        engine = engine_of(model)
        if engine is None or engine.optimizer is None:
            raise StateError(
                "ShardedEMA needs a model in training under hf_zero: make it after hf_zero.initialize, after "
                "accelerator.prepare, or in a Trainer's on_train_begin"
            )
        self.decay = _checked(decay)
        self.name = name
        self._model = model
        self._engine = engine
        self._optimizer = engine.optimizer
        self._shards: dict[FlatParam, ShardTensor] = {}
        if name in self._optimizer.attached:
            raise ConfigError(f"this model has an average called {name!r} already: pass another name=, or close() it")
        engine.run_comm.note_call(f"ShardedEMA({name!r})")
        engine.finish_updates()
        for _, flat in self._averaged():
            self._shards[flat] = self._make_shard(flat)
        self._optimizer.attached[name] = self._shards

    def _averaged(self) -> Iterator[tuple[ShardUnit, FlatParam]]:
        for unit in self._engine.units:
            for flat in unit.flats:
                if flat.master is not None:
                    yield unit, flat

    def _make_shard(self, flat: FlatParam) -> ShardTensor:
        master, placements = flat.master, self._engine.placements
        assert master is not None
        store = placements.device if flat.placement.master.is_on_device else placements.states
        shard = MemoryShard(flat.layout, flat.rank, store, self.name, master.dtype)
        shard.copy_from(master)
        return shard

    # ---------------------------------------------------------------- training
    @torch.no_grad()
    def update(self, decay: float | None = None) -> None:
        """Take the weights into the average; call it after each step. No communication. All ranks must call.

        Offloaded updates under way are waited for, delayed ones too, which publishes them.

        Args:
            decay: For this update, instead of the one given at the start (a warm-up).
        Raises:
            StateError: Inside `swapped`; the model was given another engine.
        """
        self._checked_optimizer().check_active("ShardedEMA.update")
        self._engine.run_comm.note_call(f"ShardedEMA({self.name!r}).update")
        self._engine.finish_updates()
        weight = 1.0 - (self.decay if decay is None else _checked(decay))
        for flat, average in self._shards.items():
            assert flat.master is not None
            at = 0
            for chunk in flat.master.chunks(0, flat.layout.shard_numel):
                average.memory[at : at + chunk.numel()].lerp_(chunk, weight)
                at += chunk.numel()

    def _checked_optimizer(self) -> ShardedOptimizer:
        """The optimizer whose checkpoints hold the average: a second Trainer brings another one."""
        engine = engine_of(self._model)
        if engine is not self._engine or engine.optimizer is None:
            raise StateError("the model of this ShardedEMA was given another hf_zero engine: make a new ShardedEMA")
        if engine.optimizer is not self._optimizer:
            self._optimizer = engine.optimizer
            self._optimizer.attached[self.name] = self._shards
        return self._optimizer

    # ---------------------------------------------------------------- use
    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model has the averaged weights: evaluate, generate, save_pretrained. All ranks must call.

        On leaving, also by an exception, weights and masters are what they were, bit for bit. No extra memory; where
        parameters are unsharded between uses (stages 1-2) an all-gather at both ends.

        Raises:
            StateError: Not all ranks called; between forward and backward, or inside gathered_params; nested. Inside,
                a step and a checkpoint of the engine raise.
        """
        engine, optimizer = self._engine, self._checked_optimizer()
        engine.require_all_ranks("ShardedEMA.swapped")
        optimizer.check_active("ShardedEMA.swapped")
        engine.weights.check_idle(engine.units)
        engine.finish_updates()
        optimizer.suspended = "inside ShardedEMA.swapped(): the model has its averaged weights there"
        self._put(averages=True)
        try:
            yield
        finally:
            self._put(averages=False)
            optimizer.suspended = ""

    @torch.no_grad()
    def _put(self, *, averages: bool) -> None:
        """Let parameters be the averages, or themselves again. Separate masters are not touched."""
        for unit, flat in self._averaged():
            self._engine.params.reshard(unit)
            average = self._shards[flat]
            if flat.master is flat.shard:
                shard = flat.shard.in_memory
                assert shard is not None  # it is the master too
                average.exchange(shard)
            elif averages:
                flat.shard.copy_from(average)
            else:
                flat.refresh()
            share_resident(flat)

    @torch.no_grad()
    def full_state_dict(self, keep: bool) -> dict[str, torch.Tensor]:
        """The unsharded averages on the CPU under the model's parameter names, where `keep`; {} elsewhere.

        fp32 (fp64 for fp64 parameters), trainable parameters only; tied names share one tensor. All ranks must call.
        """
        self._checked_optimizer().check_active("ShardedEMA.full_state_dict")
        self._engine.require_all_ranks("ShardedEMA.full_state_dict")
        full: dict[str, torch.Tensor] = {}
        index = ParamIndex(self._engine.units)
        for flat, average in self._shards.items():
            for place in (index[param] for param in flat.params):
                value = assemble(place, self._engine.comm, average.read_slice, average.dtype)
                if keep:
                    full[place.slot.name] = value.to("cpu", copy=True)
        aliases = tied_names(self._engine.module)
        full.update({name: full[first] for name, first in aliases.items() if first in full})
        return full

    def load_checkpoint(self, folder: str | Path, tag: str | None = None) -> None:
        """Restore the average alone, from a checkpoint of the engine at any world size and stage. All ranks must call.

        `engine.load_checkpoint` does it by itself; this is for an average that is made after the engine has resumed,
        as under Trainer.

        Raises:
            CheckpointError: No complete checkpoint, or one without an average of this name; on all ranks.
        """
        optimizer = self._checked_optimizer()
        optimizer.check_active("ShardedEMA.load_checkpoint")
        self._engine.require_all_ranks("ShardedEMA.load_checkpoint")
        load_attached(self._engine.checkpoints.contents(), chosen(folder, tag), self.name)

    def close(self) -> None:
        """Give the memory back; checkpoints are without the average from here on. All ranks must call."""
        self._engine.run_comm.note_call(f"ShardedEMA({self.name!r}).close")
        self._optimizer.attached.pop(self.name, None)
        while self._shards:
            self._shards.popitem()[1].drop()


def _checked(decay: Any) -> float:
    if isinstance(decay, bool) or not isinstance(decay, numbers.Real) or not 0.0 <= float(decay) <= 1.0:
        raise ConfigError(f"decay={decay!r}: expected a number from 0 (no average) to 1 (no change)")
    return float(decay)
