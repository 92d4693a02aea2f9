"""The values of a plain accelerate loop for what TrainingArguments would give: as accelerate does for DeepSpeed.

Accumulation that the Accelerator does not set comes from the file; a batch size that the file leaves open comes
from the loaders that are prepared with the model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader

from hf_zero.config import ZeroConfig
from hf_zero.config.conditions import ACCUMULATION, MICRO, TRAIN
from hf_zero.config.resolved import LossScaling

logger = logging.getLogger(__name__)


def take_accumulation(accelerator: Accelerator, config: ZeroConfig) -> None:
    """Let an Accelerator that has the default, 1, accumulate as often as the file sets.

    Another number that differs from the file's is a contradiction, which resolving reports.
    """
    steps = config.get(ACCUMULATION)
    if isinstance(steps, int) and steps != 1 == accelerator.gradient_accumulation_steps:
        if accelerator.is_main_process:
            logger.warning("gradient_accumulation_steps: the Accelerator accumulates %d times, as configured", steps)
        accelerator.gradient_accumulation_steps = steps


def batch_of_loaders(accelerator: Accelerator, config: ZeroConfig, prepared: Iterable[Any]) -> int | None:
    """Return the samples per rank and micro-batch of the smallest loader, without accumulation.

    The result is None where the file has numbers of its own, or where no loader is given.
    """
    if any(isinstance(config.get(key), int) for key in (MICRO, TRAIN)):
        return None
    sizes = [one.batch_size for one in prepared if isinstance(one, DataLoader) and one.batch_size]
    if accelerator.split_batches:
        sizes = [max(1, size // accelerator.num_processes) for size in sizes]
    return min(sizes, default=None)


def arguments_of(accelerator: Accelerator, per_device: int | None) -> Any:
    """The values of a plain Accelerator for keys that TrainingArguments would give."""
    values: dict[str, Any] = {"gradient_accumulation_steps": accelerator.gradient_accumulation_steps}
    if per_device is not None:
        values["per_device_train_batch_size"] = per_device
    if accelerator.mixed_precision in ("bf16", "fp16"):
        # "no" is the default, so it sets nothing.
        for kind in ("bf16", "fp16"):
            values |= {kind: accelerator.mixed_precision == kind, f"{kind}_full_eval": False}
    return SimpleNamespace(**values)


def scaling_of(scaler: Any) -> LossScaling | None:
    """The rules of accelerate's gradient scaler, if it is on. accelerator_conflicts has seen to what is not done."""
    if not scaler.is_enabled():
        return None
    return LossScaling.of_torch(round(math.log2(scaler._init_scale)), scaler.get_growth_interval())
