"""A process group of torch, with an end: to waiting, and to its connections."""

from __future__ import annotations

import ctypes
import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hf_zero.connections import Connections, Ends
from hf_zero.waiting import Waiter


class Link:
    """All ranks of the world must construct it, alike.

    Args:
        ranks: Of the world, those that are linked.
    """

    def __init__(self, ranks: Sequence[int], backend: str, timeout_s: float) -> None:
        self._is_gloo = backend == "gloo"
        self._connections = Connections()
        self.group: Any = dist.new_group(list(ranks), backend=backend, timeout=datetime.timedelta(seconds=timeout_s))
        self._waiter = Waiter(self._connections) if self._is_gloo else None

    def find_connections(self, exchange: Callable[[list[Ends]], Sequence[Sequence[Ends]]]) -> None:
        """Learn which sockets are the group's. `exchange` gives what every rank of the group passes to it."""
        if self._is_gloo:
            self._connections.keep(exchange(self._connections.find()))

    def wait(self, works: list[Any], has_reason: Callable[[], bool]) -> None:
        """Until torch's `works` are over; RuntimeError if one broke off. `has_reason`: see Waiter."""
        wait = functools.partial(_wait, works)
        if self._waiter is None:
            wait()
        else:
            self._waiter.run(wait, has_reason)

    def close(self) -> None:
        """End what this rank and the others wait for here; operations under way are lost. Any thread may call."""
        if self._is_gloo:
            self._connections.close()
            # A group's destructor waits for operations, and some will not end before their timeout.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
            dist.destroy_process_group(self.group)
        else:
            self.group.abort()


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
