"""Cores, threads and memory of this process, and how much it has used, on every operating system."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from hf_zero.errors import ConfigError

THREADS_VARIABLE = "HF_ZERO_CPU_THREADS"
_STATUS = Path("/proc/self/status")  # Linux


def usable_cores() -> int:
    """The number of cores that this process may run on, at least 1; all cores if the system has no such limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads(*, spare: int = 0) -> int:
    """HF_ZERO_CPU_THREADS if set; else this process's share of the cores that it may run on but `spare`, at least 1.

    OMP_NUM_THREADS is not asked: torchrun sets it to 1 for every rank, which would make updates single-threaded.

    Raises:
        ConfigError: HF_ZERO_CPU_THREADS is not a positive whole number.
    """
    named = os.environ.get(THREADS_VARIABLE)
    if named:
        if not named.isascii() or not named.isdecimal() or int(named) < 1:
            raise ConfigError(
                f"{THREADS_VARIABLE}={named!r} is not a number of threads: set it to 1 or more, or unset it"
            )
        return int(named)
    return max(1, usable_cores() // _local_ranks() - spare)


def _local_ranks() -> int:
    """The number of processes of this job on this machine; 1 outside of a launcher."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isascii() and ranks.isdecimal() else 1


def memory_bytes() -> int:
    """The memory of the machine."""
    return int(psutil.virtual_memory().total)


def available_bytes() -> int:
    """The memory that processes may still take before the system swaps or kills."""
    return int(psutil.virtual_memory().available)


def peak_resident_bytes() -> int:
    """The most that this process has had in memory at once, libraries included."""
    if _STATUS.exists():
        # Not ru_maxrss, which a process takes over from the one that started it.
        lines = (line.split() for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines())
        return next((int(words[1]) << 10 for words in lines if words and words[0] == "VmHWM:"), 0)
    try:
        import resource
    except ImportError:  # Windows
        return int(psutil.Process().memory_info().peak_wset)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
