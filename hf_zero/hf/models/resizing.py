"""`resize_token_embeddings` of a model in shards: on whole embeddings, then the units are cut anew."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.replace import renew
from hf_zero.errors import StateError
from hf_zero.sharding.unit import ShardUnit

_NAME = "resize_token_embeddings"


def install_resize(model: nn.Module, engine: ZeroEngine) -> None:
    """Wrap the method of every transformers model in `model`; until the engine leaves it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            _install(module, engine)


def _install(module: PreTrainedModel, engine: ZeroEngine) -> None:
    original: Callable[..., nn.Module] = getattr(module, _NAME)

    @functools.wraps(original)
    def resize_token_embeddings(*args: Any, **kwargs: Any) -> nn.Module:
        if not any(value is not None for value in (*args, *kwargs.values())):
            return original(*args, **kwargs)  # only asks for the embeddings
        return _resize(module, engine, functools.partial(original, *args, **kwargs))

    module.__dict__[_NAME] = resize_token_embeddings
    engine.on_uninstall(lambda: module.__dict__.pop(_NAME, None))


def _resize(module: PreTrainedModel, engine: ZeroEngine, original: Callable[[], nn.Module]) -> nn.Module:
    engine.require_all_ranks(_NAME)
    if engine.optimizer is not None:
        raise StateError(
            f"rank {engine.rank}: {_NAME} came after the model met its optimizer, which refers to shards of the old "
            "size.\nResize before the Trainer starts to train, or before accelerator.prepare or hf_zero.initialize."
        )
    units = _embedding_units(module, engine)
    for unit in units:
        engine.params.unshard(unit)
    try:
        resized = original()
    except BaseException:
        for unit in units:
            engine.params.reshard(unit)
        raise
    # Rank 0's values win: new rows may have been drawn with other seeds elsewhere.
    renew(engine.module, [engine], engine.config, managed=engine.managed, train=engine.trains)
    return resized


def _embedding_units(module: PreTrainedModel, engine: ZeroEngine) -> list[ShardUnit]:
    modules = [module.get_input_embeddings(), module.get_output_embeddings()]
    wanted = {id(param) for one in modules if one is not None for param in one.parameters()}
    return [
        unit
        for unit in engine.units
        if unit.on_demand and any(id(param) in wanted for buffer in unit.buffers for param in buffer.params)
    ]
