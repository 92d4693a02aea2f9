"""Large host memory asks the system for huge pages, where it covers them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_zero.native.host_memory import HUGE_PAGE, use_huge_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def asks_for_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether a mapping that holds some of the tensor's memory has the advice "hg" in /proc/self/smaps.

    What the kernel gives in answer depends on what is free in one piece, which no test can know.
    """
    start = tensor.data_ptr()
    end = start + tensor.numel() * tensor.element_size()
    mine = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            first, last = (int(bound, 16) for bound in head[0].split("-"))
            mine = first < end and last > start
        elif mine and head[0] == "VmFlags:" and "hg" in head:
            return True
    return False


@pytest.mark.skipif(
    not _SETTING.exists() or "[madvise]" not in _SETTING.read_text(), reason="huge pages are not for the asking here"
)
def test_memory_asks_for_huge_pages() -> None:
    # More than malloc ever takes from its heap, parts of which have been written before: 32 MiB
    tensor = torch.empty(24 * HUGE_PAGE, dtype=torch.uint8)
    assert not asks_for_huge_pages(tensor)
    use_huge_pages(tensor)
    tensor.fill_(1)
    assert asks_for_huge_pages(tensor)
    assert int(tensor.sum()) == tensor.numel()


def test_memory_too_small_for_one_stays_as_it_is() -> None:
    for numel in (0, 1, HUGE_PAGE - 1):
        use_huge_pages(torch.empty(numel, dtype=torch.uint8))
