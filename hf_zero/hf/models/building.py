"""Models of transformers that are built in shards: their weight initialisation meets whole parameters, by module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from torch import nn
from transformers import PreTrainedModel

from hf_zero.engine.sharded_init import ShardedConstruction
from hf_zero.hf.models.install import install_on_model

_INITIALIZE = "_initialize_weights"


@contextlib.contextmanager
def initialising(construction: ShardedConstruction) -> Iterator[None]:
    """Inside, `_init_weights` finds the parameters of the module that it initialises, and of its children, whole."""
    original: Callable[..., None] = PreTrainedModel.__dict__[_INITIALIZE]

    @functools.wraps(original)
    def _initialize_weights(self: PreTrainedModel, module: nn.Module, is_custom_code: bool = False) -> None:
        if getattr(module, "_is_hf_initialized", False):
            return
        with construction.whole([module, *module.children()]):
            original(self, module, is_custom_code)

    setattr(PreTrainedModel, _INITIALIZE, _initialize_weights)
    try:
        yield
    finally:
        setattr(PreTrainedModel, _INITIALIZE, original)


@contextlib.contextmanager
def constructing(construction: ShardedConstruction) -> Iterator[None]:
    """Models built inside come out in shards, under engines for inference. All ranks must enter and leave together."""
    with construction.watching(), initialising(construction):
        yield
    for engine in construction.finish():
        install_on_model(engine)
