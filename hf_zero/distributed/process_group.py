"""A process group of torch, with two ends: after an error, and when nobody needs it any more."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hf_zero.distributed.gloo_connections import Connections, Ends
from hf_zero.distributed.gloo_threads import Job, OnDevice, Threads

UnderWay = Job | OnDevice  # operations that were begun
_OVER_S = 0.2
# Links whose owners were garbage, collected in the middle of anything: they are ended where a link is made.
_FORGOTTEN: list[Link] = []
_LIVE: weakref.WeakSet[Link] = weakref.WeakSet()


class Link:
    """All ranks of the world must construct it, alike.

    Args:
        owner: Who begins operations; once it is garbage, the link is too.
        ranks: Of the world, those that are linked.
    """

    def __init__(self, owner: object, ranks: Sequence[int], backend: str, timeout_s: float) -> None:
        _end_forgotten()
        self.is_gloo = backend == "gloo"
        self._under_way: dict[int, UnderWay] = {}  # operations begun and not waited for, by id
        self._connections = Connections()
        self.group: Any = dist.new_group(list(ranks), backend=backend, timeout=datetime.timedelta(seconds=timeout_s))
        self._threads = Threads(self._connections) if self.is_gloo else None
        self._forgotten = weakref.finalize(owner, self._forget)
        self._forgotten.atexit = False
        _LIVE.add(self)

    def find_connections(self, exchange: Callable[[list[Ends]], Sequence[Sequence[Ends]]]) -> None:
        """Learn which sockets are the group's. `exchange` gives what every rank of the group passes to it."""
        if self.is_gloo:
            self._connections.keep(exchange(self._connections.find()))

    def begin(self, calls: Sequence[Callable[[], Any]]) -> UnderWay:
        """Start collectives, which are matched by their order; each of `calls` returns torch's Work."""
        works = [call() for call in calls]
        if self._threads is None:
            return self._note(OnDevice(works))
        return self.begin_apart(functools.partial(_wait, works))

    def begin_messages(self, calls: Sequence[Callable[[], Any]]) -> UnderWay:
        """Have a thread start messages of gloo, matched by their tag; each of `calls` returns torch's Work."""
        return self.begin_apart(lambda: _wait([call() for call in calls]))

    def begin_apart(self, call: Callable[[], object]) -> UnderWay:
        """Have a thread make a call over gloo that returns when all is over."""
        if self._threads is None:
            raise RuntimeError("its connections were closed")
        return self._note(self._threads.start(call))

    def _note(self, under_way: UnderWay) -> UnderWay:
        self._under_way[id(under_way)] = under_way
        return under_way

    def wait(self, under_way: UnderWay, has_reason: Callable[[], bool], look: Callable[[], None]) -> None:
        """Until what was begun is over; RuntimeError if it broke off. `has_reason`, `look`: see Job."""
        under_way.wait(has_reason, look)
        self._under_way.pop(id(under_way), None)

    def end(self) -> None:
        """Give group, sockets and threads back. All ranks must call, when nobody has more to begin here."""
        self._forgotten.detach()
        # A group's destructor waits for operations, and would keep every thread of Python waiting as well.
        if not all(one.is_over(_OVER_S) for one in self._under_way.values()):
            _FORGOTTEN.append(self)
            return
        self._under_way.clear()
        self._threads = None  # they end with it
        group, self.group = self.group, None
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)

    def _forget(self) -> None:
        """The owner was garbage, at a moment of this rank's own: `end` when another link is made.

        Nobody begins another operation here, and those of others do not need this rank: what is over on gloo has sent
        all that others wait for. On NCCL an end is a common act, so there the group stays.
        """
        if self.is_gloo:
            self._threads = None  # they end at once
            _FORGOTTEN.append(self)

    def ended_ranks(self) -> list[int]:
        """Ranks that have closed their connection to this one, or died; [] where that cannot be seen."""
        return self._connections.ended_ranks() if self.is_gloo else []

    def close(self) -> None:
        """End what this rank and the others wait for here; operations under way are lost. Any thread may call."""
        self._forgotten.detach()
        if self.is_gloo:
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


@atexit.register
def _end_all() -> None:
    """A thread of gloo frees an operation some time after it is over. After Python's end that aborts the process.

    A group's destructor waits for its threads. This runs after the default group was destroyed (processes.py).
    """
    for link in list(_LIVE):
        if link.is_gloo and link.group is not None:
            link.end()
