"""Who has come to a call that needs every rank, found out without a collective, so that a rank alone can say so."""

from __future__ import annotations

import collections
import os
import time

import torch.distributed as dist

from hf_zero.errors import StateError
from hf_zero.processes import call_site

# Seconds that a call which needs every rank waits for the others before it says who is missing.
PRESENCE_TIMEOUT_S = 12.0


class Presence:
    """The calls of one group so far, counted by name. Goes through the key-value store."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = collections.Counter()

    def clear(self) -> None:
        """For a group that was made anew, under another name."""
        self._calls.clear()

    def wait(self, name: str, group: str, rank: int, world_size: int, timeout_s: float | None) -> None:
        """Return once every rank has called with the same `name`; raise StateError if some do not come.

        The store may live in a rank: none must end its process before all have returned.
        """
        timeout_s = timeout_s or float(os.environ.get("HF_ZERO_PRESENCE_TIMEOUT", PRESENCE_TIMEOUT_S))
        store = dist.distributed_c10d._get_default_store()
        keys = [f"hf_zero/{group}/{name}/{self._calls[name]}/{rank}" for rank in range(world_size)]
        store.set(keys[rank], "1")
        deadline = time.monotonic() + timeout_s
        pause = 0.0002  # ranks in step come within less than a millisecond; others are not worth a busy store
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                store.delete_key(keys[rank])
                raise StateError(
                    f"rank {rank} called {name}, but rank(s) {missing} did not within {timeout_s:.0f} s: it "
                    f"needs all {world_size} ranks, because each holds a part of the model.\n"
                    f"Call {name} on every rank (outside `if rank == 0`); it writes on one rank by itself.\n"
                    f"Called from: {call_site()}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        self._calls[name] += 1
