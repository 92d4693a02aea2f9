"""deepspeed.runtime.zero.config's names: the block `zero_optimization` by itself, checked and with its defaults."""

from __future__ import annotations

import enum
from typing import Any

from hf_zero.config.resolved import OffloadOptimizer, OffloadParam
from hf_zero.extras.deepspeed.config import DeepSpeedConfig

_BLOCK = "zero_optimization"


class ZeroStageEnum(enum.IntEnum):
    """The stages, by what each shards beside what the one before it does."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig:
    """The values of a block: attributes are its keys, with or without `stage3_` before them.

    Raises:
        ConfigError: Everything that is wrong with the block, at once.
    """

    def __init__(self, **block: Any) -> None:
        config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, _BLOCK: block})
        self._settings = config.settings
        self.offload_param: OffloadParam | None = config.zero.offload_param
        self.offload_optimizer: OffloadOptimizer | None = config.zero.offload_optimizer
        if self.offload_param.medium.is_device and block.get("offload_param") is None:
            self.offload_param = None
        if self.offload_optimizer.medium.is_device and block.get("offload_optimizer") is None:
            self.offload_optimizer = None

    def __getattr__(self, name: str) -> Any:
        for key in (f"{_BLOCK}.{name}", f"{_BLOCK}.stage3_{name}"):
            if key in self.__dict__["_settings"]:
                return self._settings[key]
        raise AttributeError(f"the block {_BLOCK} has no key {name!r}")
