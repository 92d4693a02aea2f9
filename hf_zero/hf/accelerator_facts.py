"""What an Accelerator was told about keys of the configuration: by its own arguments, or by TrainingArguments."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator

from hf_zero.config.precision import LossScaling


def arguments_of(accelerator: Accelerator) -> Any:
    """What a plain Accelerator says about keys that TrainingArguments would say."""
    said: dict[str, Any] = {"gradient_accumulation_steps": accelerator.gradient_accumulation_steps}
    if accelerator.mixed_precision in ("bf16", "fp16"):
        # "no" is the default, so it says nothing.
        for kind in ("bf16", "fp16"):
            said |= {kind: accelerator.mixed_precision == kind, f"{kind}_full_eval": False}
    return SimpleNamespace(**said)


def scaling_of(scaler: Any) -> LossScaling:
    """The rules of accelerate's gradient scaler. It halves and doubles: accelerator_conflicts has seen to that."""
    return LossScaling.of_torch(round(math.log2(scaler._init_scale)), scaler.get_growth_interval())
