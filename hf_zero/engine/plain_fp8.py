"""FP8 training of a plain PyTorch loop, as `msamp.initialize` gives it."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.engine.engine import engine_of
from hf_zero.engine.initialize import ModelT, shard
from hf_zero.optim.sharded import ShardedOptimizer


def initialize(
    model: ModelT, optimizer: torch.optim.Optimizer, opt_level: str = "O1", use_te: bool = False
) -> tuple[ModelT, ShardedOptimizer]:
    """Train `model` in FP8 by a level of MS-AMP, in a loop of forward, `loss.backward()` and `optimizer.step()`.

    With several processes gradients are means over them, in 8 bits. All ranks must call.

    Args:
        model: Built alike on all ranks, on the device that it will train on; its linear layers are replaced in place.
        optimizer: Over the model's parameters: torch's Adam or AdamW at O2 and O3.
        opt_level: "O1": FP8 products and gradients. "O2": Adam's states have 8 and 16 bits too. "O3": O2 with states
            that are sharded over the ranks, as at ZeRO stage 2.
        use_te: The model is made of TransformerEngine's modules, which compute in FP8 themselves.

    Returns:
        (model, optimizer): the model itself, and what is to be stepped.
    Raises:
        ConfigError: The level is unknown, a package is missing, or the optimizer does not fit the level.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "msamp": {"enabled": True, "opt_level": opt_level, "use_te": use_te},
        "zero_optimization": {"stage": 2 if opt_level == "O3" else 0},
    }
    shard(model, config, train=True)
    engine = engine_of(model)
    assert engine is not None
    return model, engine.attach_optimizer(optimizer)
