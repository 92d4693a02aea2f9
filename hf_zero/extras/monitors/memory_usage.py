"""The memory that device and host hold at this moment. Sizes are in GiB, which the lines call GB as DeepSpeed's do."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import psutil
import torch

from hf_zero.logs import log_line
from hf_zero.native.machine import peak_resident_bytes

_GIB = 1024**3


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. Without an accelerator the process's own: resident now, and at most so far."""

    allocated: int
    max_allocated: int
    cached: int
    max_cached: int


def device_memory() -> DeviceMemory:
    if not torch.accelerator.is_available():
        resident = psutil.Process().memory_info().rss
        peak = max(resident, peak_resident_bytes())
        return DeviceMemory(resident, peak, resident, peak)
    return DeviceMemory(
        torch.accelerator.memory_allocated(),
        torch.accelerator.max_memory_allocated(),
        torch.accelerator.memory_reserved(),
        torch.accelerator.max_memory_reserved(),
    )


def log_memory_usage(message: str) -> None:
    """Log `message` and what is allocated now.

    Max_MA and Max_CA are the peaks since the last call on an accelerator, and since the process began without one.
    Python's garbage is collected first, so that the numbers are true.
    """
    gc.collect()
    memory, host = device_memory(), psutil.virtual_memory()
    log_line(message)
    log_line(
        f"MA {_gib(memory.allocated)} GB         Max_MA {_gib(memory.max_allocated)} GB         "
        f"CA {_gib(memory.cached)} GB         Max_CA {_gib(memory.max_cached)} GB"
    )
    log_line(f"CPU Virtual Memory:  used = {_gib(host.total - host.available)} GB, percent = {host.percent}%")
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()


def _gib(num_bytes: int) -> float:
    return round(num_bytes / _GIB, 2)
