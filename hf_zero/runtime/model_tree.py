"""Notices that parameters of a model were replaced by others: training would use the new, saves hold the old."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hf_zero.errors import StateError
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.partition import clean_name, named_parameters
from hf_zero.sharding.unit import ShardUnit

_MOST_NAMES = 5


class ModelTree:
    """Which parameter is where in a model, as the engine took it over.

    A check costs a comparison per module and per parameter. Modules may change (wrappers, activation checkpointing,
    parts that are dropped) as long as the parameters stay.
    """

    def __init__(self, model: nn.Module, units: Sequence[ShardUnit]) -> None:
        self._model = model
        self._units = units
        self._look()

    def _look(self) -> None:
        modules = list(self._model.modules())
        self._places = [
            (module, list(module._parameters.values()), list(module._modules.values())) for module in modules
        ]

    def check(self, rank: int) -> None:
        """Raise StateError if a parameter was put in the place of one of the engine's, or a trainable one added."""
        for module, params, modules in self._places:
            mine, below = module._parameters, module._modules
            if len(mine) != len(params) or len(below) != len(modules):
                break
            if not all(map(_is, mine.values(), params)) or not all(map(_is, below.values(), modules)):
                break
        else:
            return
        self._refuse_strangers(rank)
        self._look()

    def _refuse_strangers(self, rank: int) -> None:
        known = ParamIndex(self._units)
        names = {slot.name for unit in self._units for buffer in unit.buffers for slot in buffer.layout.slots}
        strangers = [
            clean_name(name)
            for name, param in named_parameters(self._model)
            # Who has hooks for its gradient is trained by another engine.
            if param not in known
            and (name in names or (param.requires_grad and not param._post_accumulate_grad_hooks))
        ]
        if strangers:
            raise StateError(
                f"rank {rank}: {len(strangers)} parameter(s) came into the model after hf_zero had taken it over, and "
                f"would be neither trained nor saved: {', '.join(strangers[:_MOST_NAMES])}.\nTo change values, call "
                "hf_zero.set_full_param(model, tensor, name), or write in place inside `with hf_zero.gathered_params("
                "model, write_rank=0):`. To change modules, do it before the model is handed to hf_zero, or call "
                "engine.teardown() first and initialize after."
            )


def _is(one: object, other: object) -> bool:
    return one is other
