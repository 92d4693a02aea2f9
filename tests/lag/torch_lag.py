"""The module torch.lag: what torch and other libraries ask of an accelerator's module by these names."""

from __future__ import annotations

import torch

from tests.lag import device

Stream = torch.Stream
Event = torch.Event
current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
synchronize = torch.accelerator.synchronize
empty_cache = torch.accelerator.empty_cache
memory_allocated = torch.accelerator.memory_allocated
memory_reserved = torch.accelerator.memory_reserved
memory_stats = torch.accelerator.memory_stats
max_memory_allocated = torch.accelerator.max_memory_allocated
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats


def device_count() -> int:
    return int(device.library().visible_devices())


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """Its random numbers are the CPU's, from the CPU's generator."""


def get_rng_state(device: torch.types.Device = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.types.Device = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True
