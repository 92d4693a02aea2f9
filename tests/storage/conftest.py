"""Pages that are pinned for a device that is not there."""

from __future__ import annotations

import pytest
import torch

from hf_zero.native import pinning

GPU = torch.device("cuda", 0)


class CountedPages:
    """The registration of pages for a device that is not there, counted."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  # address -> bytes
        self.calls = 0

    def register(self, block: torch.Tensor) -> str | None:
        assert block.data_ptr() not in self.registered
        self.registered[block.data_ptr()] = block.numel()
        self.calls += 1
        return None

    def unregister(self, block: torch.Tensor) -> None:
        del self.registered[block.data_ptr()]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> CountedPages:
    """Return what is pinned for GPU."""
    counted = CountedPages()
    monkeypatch.setattr(pinning, "registrar_of", lambda device: counted)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    return counted
