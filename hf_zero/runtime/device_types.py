"""The types that the device of a training has to compute in."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_zero.errors import ConfigError


def refuse_missing_types(wanted: Mapping[torch.dtype, str], device: torch.device) -> None:
    """Raise if `device` lacks a type: Apple's has no float64, and older ones cannot compute in bfloat16.

    Args:
        wanted: What each type is wanted for.
    Raises:
        ConfigError: Names the types and what wants them.
    """
    if missing := [f"{dtype} ({why})" for dtype, why in wanted.items() if not _has(device, dtype)]:
        raise ConfigError(
            f"{device} cannot compute in {', '.join(missing)}.\nTrain in float16 (fp16.enabled, "
            "TrainingArguments(fp16=True)) or float32 there: cast the model before it is handed to hf_zero, and take "
            "the type out of the configuration (bf16.enabled, data_types, communication_data_type). Or use a device "
            "that has it (for bfloat16 one of NVIDIA's from Ampere on), or the CPU."
        )


def _has(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        return False
    asks = getattr(torch.get_device_module(device), "is_bf16_supported", None) if _is_accelerator(device) else None
    return dtype is not torch.bfloat16 or asks is None or bool(asks())


def _is_accelerator(device: torch.device) -> bool:
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type
