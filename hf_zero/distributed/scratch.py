"""Receive buffers that are used again: fresh memory costs page faults."""

from __future__ import annotations

import torch

_MAX_FREE = 8


class Scratch:
    """Free buffers of a run, of any sizes and types, on one device."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer of the size and type of `like` (1-D), with any content."""
        for i, free in enumerate(self._free):
            if free.numel() == like.numel() and free.dtype == like.dtype:
                return self._free.pop(i)
        if len(self._free) > _MAX_FREE:
            self._free.pop(0)
        return torch.empty_like(like)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)

    def clear(self) -> None:
        self._free.clear()
