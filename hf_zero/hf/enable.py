"""`enable` lets unmodified scripts of this process use ZeRO; `disable` puts the originals back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.distributed.processes import prepare_to_be_joined
from hf_zero.hf.accelerator.plugin import accelerator_patch_points
from hf_zero.hf.conflicts import check_environment
from hf_zero.hf.models.patches import model_functions
from hf_zero.hf.patching import ACTIVATION, Foreign
from hf_zero.hf.trainer.trainer import trainer_patch_points


def enable(config: ZeroConfig | str | Path | Mapping[str, Any]) -> None:
    """Let unmodified transformers, TRL and accelerate code of this process run under ZeRO.

    Call it before the Trainer or Accelerator (and, for stage 3, the model) is made. A second call replaces the
    configuration.

    Args:
        config: Path of a JSON file, a dict, a JSON string, or a ZeroConfig.
    Raises:
        ConfigError: The configuration is wrong, accelerate is configured for DeepSpeed, or this version of
            transformers or accelerate lacks a function that is relied on.
    """
    check_environment()
    prepare_to_be_joined()  # by accelerate, which looks at the environment
    activate(ZeroConfig.load(config), for_everyone=True)


class HfZeroConfig:
    """Sets what from_pretrained and from_config follow in a script without a Trainer (DeepSpeed: HfDeepSpeedConfig).

    It is in force once it is made, until `disable` or the next configuration; it need not be kept. Make it before the
    model.

    Args:
        config: Path of a JSON file, a dict, a JSON string, or a ZeroConfig.
    Raises:
        ConfigError: The configuration is wrong.
    """

    def __init__(self, config: ZeroConfig | str | Path | Mapping[str, Any]) -> None:
        self.config = ZeroConfig.load(config)
        activate(self.config, for_everyone=False)

    def is_zero3(self) -> bool:
        return self.config.shards_parameters


def disable() -> None:
    """End what `enable` or `TrainingArguments(zero=...)` began: no active configuration, every original in place.

    Models and accelerators that already run under ZeRO go on doing so.
    """
    ACTIVATION.deactivate()


def activate(config: ZeroConfig, *, for_everyone: bool) -> None:
    """Make `config` the active one; with `for_everyone` also for code that does not name it, as `enable` does."""
    ACTIVATION.activate(config, all_functions(), for_everyone=for_everyone)


def all_functions() -> list[Foreign]:
    """Every function of transformers and accelerate that ours wrap, replace or rely on."""
    return [*trainer_patch_points(), *accelerator_patch_points(), *model_functions()]
