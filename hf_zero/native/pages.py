"""Huge pages for host memory that comes and goes.

Fresh memory costs a page fault for every page that is first written, and reads of large weights on pages of 4 KiB miss
the address cache. Linux gives 2 MiB pages to whoever asks, where `transparent_hugepage` is "madvise" as it mostly is.
scripts/bench_generate.py shows what it brings: token by token, gathered weights are read as fast as a plain model's.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch

HUGE_PAGE = 2 << 20


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


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    """The C library's madvise, where the system has huge pages (Linux)."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
