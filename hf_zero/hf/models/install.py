"""Puts methods in front of those of a model of transformers or PEFT while its parameters are in shards."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.engine.replace import replace_engines
from hf_zero.errors import StateError
from hf_zero.hf.models.generation import install_generate
from hf_zero.hf.models.peft_layers import install_peft
from hf_zero.hf.models.saving import install_save_pretrained
from hf_zero.hf.patching import replace_method
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.unit import ShardUnit

_RESIZE = "resize_token_embeddings"


class ModelPart(EnginePart):
    """Lets saving, generating, resizing and PEFT work on shards while the engine is on its model."""

    engine: ZeroEngine

    def attach(self) -> None:
        model = self.engine.module
        if "peft" not in sys.modules and not any(hasattr(module, "save_pretrained") for module in model.modules()):
            return  # a plain model, which PEFT is not at work on
        install_peft(self.engine)
        if self.engine.is_sharded:
            _install(self.engine)


def _install(engine: ZeroEngine) -> None:
    install_save_pretrained(engine.module, engine)
    install_generate(engine.module, engine)
    for module in engine.module.modules():
        if isinstance(module, PreTrainedModel):
            replace_method(module, _RESIZE, engine, functools.partial(_resize, module, engine))


def _resize(
    module: PreTrainedModel, engine: ZeroEngine, original: Callable[..., nn.Module], *args: Any, **kwargs: Any
) -> nn.Module:
    """Resize unsharded embeddings; then replace the engine, whose units have new sizes. All ranks must call."""
    if not any(value is not None for value in (*args, *kwargs.values())):
        return original(*args, **kwargs)  # only asks for the embeddings
    engine.require_all_ranks(_RESIZE)
    if engine.optimizer is not None:
        raise StateError(
            f"rank {engine.rank}: {_RESIZE} came after the model met its optimizer, which refers to shards of the old "
            "size.\nResize before the Trainer starts to train, or before accelerator.prepare or hf_zero.initialize."
        )
    units = _embedding_units(module, engine)
    for unit in units:
        engine.params.unshard(unit, exact=True)
    try:
        with engine.weights.worked_on(units):
            resized = original(*args, **kwargs)
    except BaseException:
        for unit in units:
            engine.params.reshard(unit)
        raise
    # Rank 0's values win: new rows may have been drawn with other seeds elsewhere.
    settings = {"managed": engine.managed, "train": engine.trains}
    replace_engines(engine.module, [engine], engine.config, **settings)
    return resized


def _embedding_units(module: PreTrainedModel, engine: ZeroEngine) -> list[ShardUnit]:
    modules = [module.get_input_embeddings(), module.get_output_embeddings()]
    wanted = [param for one in modules if one is not None for param in one.parameters()]
    return ParamIndex(unit for unit in engine.units if unit.on_demand).units_of(wanted)
