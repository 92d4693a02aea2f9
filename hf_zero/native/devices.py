"""The accelerators that this process sees, whichever kind torch was built for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class VisibleDevice:
    name: str
    memory_bytes: int | None  # None where torch cannot say


def visible_devices() -> list[VisibleDevice]:
    """List the devices that torch sees, in the order of their indices; none if it computes on the CPU."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return []
    indices = range(torch.accelerator.device_count())
    return [VisibleDevice(_name(kind, index), _memory_bytes(index)) for index in indices]


def _name(kind: torch.device, index: int) -> str:
    """The maker's, where torch's module of that kind tells it."""
    properties = getattr(torch.get_device_module(kind), "get_device_properties", None)
    return f"{kind.type}:{index}" if properties is None else str(properties(index).name)


def _memory_bytes(index: int) -> int | None:
    try:
        return torch.accelerator.get_memory_info(index)[1]
    except RuntimeError:  # an accelerator whose allocator does not count
        return None
