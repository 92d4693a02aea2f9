"""Which types the device of a training has to compute in."""

from __future__ import annotations

import torch

from hf_zero.errors import ConfigError


def refuse_missing_type(dtype: torch.dtype | None, device: torch.device) -> None:
    """Raise where `device` cannot compute in `dtype`, of the parameters. The same on all ranks of one kind of device.

    Raises:
        ConfigError: bf16 on a device without it.
    """
    if dtype is not torch.bfloat16 or device.type == "cpu" or not torch.accelerator.is_available():
        return
    is_supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if is_supported is not None and not is_supported():
        raise ConfigError(
            f"bf16.enabled is true, and {device} cannot compute in bf16.\nUse fp16 ("
            '"fp16": {"enabled": true}, TrainingArguments(fp16=True)) or fp32, or a device that can: of NVIDIA\'s '
            "those from Ampere on."
        )
