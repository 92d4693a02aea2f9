"""Large host memory that asks for huge pages gets them, and only where it covers them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_zero.native.pages import HUGE_PAGE, use_huge_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def kib_on_huge_pages(tensor: torch.Tensor) -> int:
    """Of the mappings that hold the tensor's memory, in /proc/self/smaps."""
    start = tensor.data_ptr()
    end = start + tensor.numel() * tensor.element_size()
    total, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            first, last = (int(bound, 16) for bound in head[0].split("-"))
            mine = first < end and last > start
        elif mine and head[0] == "AnonHugePages:":
            total += int(head[1])
    return total


@pytest.mark.skipif(
    not _SETTING.exists() or "[madvise]" not in _SETTING.read_text(), reason="huge pages are not for the asking here"
)
def test_memory_lies_on_huge_pages() -> None:
    # More than malloc ever takes from its heap, parts of which have been written before: 32 MiB
    tensor = torch.empty(24 * HUGE_PAGE, dtype=torch.uint8)
    use_huge_pages(tensor)
    tensor.fill_(1)
    # The system gives as many as it has: one is enough to see that it was asked.
    assert kib_on_huge_pages(tensor) >= HUGE_PAGE // 1024
    assert int(tensor.sum()) == tensor.numel()


def test_memory_too_small_for_one_stays_as_it_is() -> None:
    for numel in (0, 1, HUGE_PAGE - 1):
        use_huge_pages(torch.empty(numel, dtype=torch.uint8))
