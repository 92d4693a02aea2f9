"""Host memory that a disk reads from and writes to at full speed."""

from __future__ import annotations

import mmap

import torch

from hf_zero.native.pages import HUGE_PAGE, private_pages


def transfer_memory(nbytes: int, *, fork: bool = True) -> torch.Tensor:
    """`nbytes` zero bytes (1-D, uint8) from a page's start on, on huge pages where the system has them.

    A block on small pages is a list of hundreds of them, more than many devices take in one command:
    scripts/bench_io.py measures what huge pages bring. Memory is taken when it is first touched, and given back to the
    system with the last tensor that refers to it.

    `fork=False` keeps it out of forked children: a page that is shared with a child can be copied while the disk still
    writes to the old one.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Less than one huge page is not worth the space that its alignment costs.
    slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    memory = private_pages(nbytes + slack)
    if not fork and hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them: small pages work, too
            slack = 0
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE if slack else 0
    return whole[start : start + nbytes]
