"""How many threads the library uses.

OMP_NUM_THREADS is not asked: torchrun sets it to 1 for every rank, which left others' CPU updates single-threaded.
"""

from __future__ import annotations

import os

from hf_zero.errors import ConfigError
from hf_zero.native.machine import usable_cores

THREADS_VARIABLE = "HF_ZERO_CPU_THREADS"


def default_threads() -> int:
    """HF_ZERO_CPU_THREADS if set; else this process's share of the cores that it may run on, at least 1.

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
    return max(1, usable_cores() // _local_ranks())


def _local_ranks() -> int:
    """Processes of this job on this machine; 1 outside of a launcher."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isascii() and ranks.isdecimal() else 1
