"""A process group of torch, with two ends: after an error, and when nobody needs it any more."""

from __future__ import annotations

import ctypes
import datetime
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hf_zero.connections import Connections, Ends
from hf_zero.waiting import Waiter

_OVER_S = 0.2
# Links whose owners were garbage, collected in the middle of anything: they are ended where a link is made.
_FORGOTTEN: list[Link] = []


class Link:
    """All ranks of the world must construct it, alike.

    Args:
        owner: Who begins operations; once it is garbage, the link is too.
        ranks: Of the world, those that are linked.
    """

    def __init__(self, owner: object, ranks: Sequence[int], backend: str, timeout_s: float) -> None:
        _end_forgotten()
        self._is_gloo = backend == "gloo"
        self._under_way: dict[int, dist.Work] = {}  # operations begun and not waited for, by id
        self._connections = Connections()
        self.group: Any = dist.new_group(list(ranks), backend=backend, timeout=datetime.timedelta(seconds=timeout_s))
        self._waiter = Waiter(self._connections) if self._is_gloo else None
        self._forgotten = weakref.finalize(owner, self._forget)
        self._forgotten.atexit = False

    def find_connections(self, exchange: Callable[[list[Ends]], Sequence[Sequence[Ends]]]) -> None:
        """Learn which sockets are the group's. `exchange` gives what every rank of the group passes to it."""
        if self._is_gloo:
            self._connections.keep(exchange(self._connections.find()))

    def begin(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """torch's Work of each of `calls`, for `wait`."""
        works = [call() for call in calls]
        self._under_way.update({id(work): work for work in works if isinstance(work, dist.Work)})
        return works

    def wait(self, works: list[Any], has_reason: Callable[[], bool], look: Callable[[], None]) -> None:
        """Until torch's `works` are over; RuntimeError if one broke off. `has_reason`, `look`: see Waiter."""
        wait = functools.partial(_wait, works)
        if self._waiter is None:
            wait()
        else:
            self._waiter.run(wait, has_reason, look)
        for work in works:
            self._under_way.pop(id(work), None)

    def end(self) -> None:
        """Give group, sockets and threads back. All ranks must call, when nobody has more to begin here."""
        self._forgotten.detach()
        # A group's destructor waits for operations, and would keep every thread of Python waiting as well.
        if not all(self._is_over(work) for work in self._under_way.values()):
            _FORGOTTEN.append(self)
            return
        self._under_way.clear()
        self._waiter = None  # its thread ends with it
        group, self.group = self.group, None
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)

    def _is_over(self, work: dist.Work) -> bool:
        """Messages of gloo do not say so by themselves; by now every rank has begun its side of them."""
        if work.is_completed() or not self._is_gloo:
            return bool(work.is_completed())
        try:
            work.wait(datetime.timedelta(seconds=_OVER_S))
        except RuntimeError:
            return False
        return True

    def _forget(self) -> None:
        """The owner was garbage, at a moment of this rank's own: `end` when another link is made.

        Nobody begins another operation here, and those of others do not need this rank: what is over on gloo has sent
        all that others wait for. On NCCL an end is a common act, so there the group stays.
        """
        if self._is_gloo:
            self._waiter = None  # its thread ends at once
            _FORGOTTEN.append(self)

    def ended_ranks(self) -> list[int]:
        """Ranks that have closed their connection to this one, or died; [] where that cannot be seen."""
        return self._connections.ended_ranks() if self._is_gloo else []

    def close(self) -> None:
        """End what this rank and the others wait for here; operations under way are lost. Any thread may call."""
        self._forgotten.detach()
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


def _end_forgotten() -> None:
    links = _FORGOTTEN[:]
    _FORGOTTEN.clear()
    for link in links:
        link.end()
