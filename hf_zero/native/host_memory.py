"""Host memory on huge pages: for weights that come and go, and for what a disk reads from and writes to.

Fresh memory costs a page fault for every page that is first written, and reads of large weights on pages of 4 KiB miss
the address cache. Linux gives 2 MiB pages to whoever asks, where `transparent_hugepage` is "madvise" as it mostly is.
scripts/bench_generate.py shows what it brings: token by token, gathered weights are read as fast as a plain model's.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20


def page_rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def private_pages(nbytes: int, *, populate: bool = False) -> mmap.mmap:
    """`nbytes` > 0 zero bytes of this process from a page's start on; with `populate` in memory at once (Linux)."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return mmap.mmap(-1, nbytes, flags=flags | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0))


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages under a CPU tensor's memory, where it covers them whole; before it is first written.

    A hint, no promise: small pages stay where the system has no others. Other memory of the process is not touched.
    """
    start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    last = (start + nbytes) // HUGE_PAGE * HUGE_PAGE
    advise = _madvise()
    if advise is not None and last > first:
        advise(first, last - first, mmap.MADV_HUGEPAGE)


def transfer_memory(nbytes: int, *, fork: bool = True) -> torch.Tensor:
    """`nbytes` zero bytes (1-D, uint8) from a page's start on, on huge pages where the system has them.

    A block on small pages is a list of hundreds of them, more than many devices take in one command:
    scripts/bench_io.py measures what huge pages bring. Memory is taken when it is first touched, and given back to the
    system with the last tensor that refers to it.

    `fork=False` keeps it out of forked children: a page that is shared with a child can be copied while the disk still
    writes to the old one.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
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


def return_freed_memory(nbytes: int) -> None:
    """Have the C library give back to the system what it keeps of `nbytes` that were freed; glibc only.

    It keeps what lies below something that is in use: of a model whose weights have just been cut into shards nearly
    half was seen to stay, and up to three times a model that was cut layer by layer. The call costs milliseconds, and
    a page fault where the memory is used again, so that it is left out for less than 1 MiB.
    """
    if nbytes < 1 << 20:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if hasattr(mmap, "MAP_PRIVATE") else None
    if trim is not None:
        trim(0)


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    """The C library's madvise, where the system has huge pages (Linux)."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
