"""Full weights and checkpoints of the models that an Accelerator has prepared: half of the plugin's mixin."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_zero.checkpoint.load import Parts
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.hf.accelerator.optimizer import ZeroAcceleratedOptimizer
from hf_zero.hf.local_files import on_all_ranks, writing
from hf_zero.hf.models.peft import live_state
from hf_zero.hf.models.saving import apart
from hf_zero.hf.trainer.resume import state_to_load


class AcceleratorState(Accelerator):
    """The base of ZeroAcceleratorMixin."""

    _models: list[nn.Module]
    _optimizers: list[torch.optim.Optimizer]

    def _engines(self) -> list[ZeroEngine]:
        return [engine for model in self._models if (engine := engine_of(model)) is not None]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Full weights: of a sharded model on the ranks that write, {} elsewhere; else on every rank.

        All ranks must call where the model is sharded.
        """
        engine = engine_of(model)
        if engine is None:
            stock: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap=unwrap)
            return stock
        # accelerate removes tied names when it saves, and it does so for an OrderedDict only.
        if not engine.is_sharded:
            return OrderedDict(apart(live_state(engine.module)))
        engine.require_all_ranks("accelerator.get_state_dict")
        per_node = self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if per_node else self.is_main_process
        return OrderedDict(engine.full_state_dict(writes))

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save as accelerate does, with the state of the engines in a folder of its own. All ranks must call."""
        engines = self._engines()
        for engine in engines:
            engine.require_all_ranks("accelerator.save_state")
            engine.finish_updates()

        def write() -> Any:
            return super(AcceleratorState, self).save_state(output_dir, safe_serialization, **kwargs)

        with self._without_engines(keep=lambda engine: engine.config.writes_full_weights):
            folder = on_all_ranks(engines[0].comm, writing(output_dir), write) if engines else write()
        for index, engine in enumerate(engines):
            engine.write_checkpoint(_engine_folder(folder, index))
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load as accelerate does, with weights and optimizer state from the engines' folder. All ranks must call."""
        engines = self._engines()
        if engines:
            input_dir = state_to_load(self.project_configuration, input_dir)
        # Engines first: with the optimizer they load the rates of its groups, which are the schedulers' to set.
        for index, engine in enumerate(engines):
            engine.read_checkpoint(_engine_folder(str(input_dir), index), Parts(is_scheduled=True))
        with self._without_engines(keep=lambda engine: False):
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextlib.contextmanager
    def _without_engines(self, *, keep: Callable[[ZeroEngine], bool]) -> Iterator[None]:
        """Hide what the engines save and load themselves from accelerate, but for models whose engine is to be kept.

        Models without an engine come first, so that they have the same file names in saving, which writes the weights
        of all models, and in loading, which reads theirs only.
        """
        models, optimizers = self._models, self._optimizers
        engines = [(model, engine_of(model)) for model in models]
        without = [model for model, engine in engines if engine is None]
        self._models = without + [model for model, engine in engines if engine is not None and keep(engine)]
        self._optimizers = [one for one in optimizers if not isinstance(one, ZeroAcceleratedOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def _engine_folder(folder: str | os.PathLike[str], index: int) -> Path:
    return Path(folder) if index == 0 else Path(folder) / f"model_{index}"
