"""A process group of torch, with two ends: after an error, and when nobody needs it any more.

Threads start messages of gloo, which writes into the socket in the thread that sends, while this rank computes; and
they wait for gloo, and may be left behind: see HostWork in group_work.py.
"""

from __future__ import annotations

import ctypes
import datetime
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.gloo_connections import Connections, Ends
from hf_zero.distributed.interface import choose_interface
from hf_zero.distributed.process_end import Turn, end_at_once_on_errors, end_with_python

# Messages of more operations than these are begun when one of them is over. All ranks begin them in the same order.
_THREADS = 3
_OVER_S = 0.2
_OVER_AT_THE_LAST_S = 5.0  # on a busy machine threads that have nothing to do may come late, too
# Links whose owners were garbage, collected in the middle of anything: they are ended where a link is made.
_FORGOTTEN: list[Link] = []
Jobs = SimpleQueue[Callable[[], None] | None]


class Link:
    """All ranks of the world must construct it, alike.

    Args:
        owner: Who begins operations; once it is garbage, the link is too.
        groups: The world's ranks, split into those that are linked.
    """

    def __init__(self, owner: object, groups: Sequence[Sequence[int]], backend: str, timeout_s: float) -> None:
        _end_forgotten()
        self.is_gloo = backend == "gloo"
        # A device has here: who waits for an operation -> torch's Work
        self._works: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()
        self.connections = Connections()
        self.group: Any = _new_group(groups, backend, datetime.timedelta(seconds=timeout_s))
        self._threads: list[threading.Thread] = []
        self._served: list[Jobs] = []  # by each of them
        self._end_threads = weakref.finalize(self, _end_threads, self._served)
        self._end_threads.atexit = False
        self.jobs = self.serve(_THREADS if self.is_gloo else 0)
        self._is_lost = False  # its operations are
        self._forgotten = weakref.finalize(owner, self._forget)
        self._forgotten.atexit = False
        end_with_python(self, Turn.LINKS)
        if not self.is_gloo:
            end_at_once_on_errors()

    def serve(self, num_threads: int) -> Jobs:
        """A queue whose jobs threads call, until the link ends. They are begun in the order of the queue."""
        jobs: Jobs = SimpleQueue()
        for _ in range(num_threads):
            thread = threading.Thread(target=_serve, args=(jobs,), name="hf_zero-gloo", daemon=True)
            self._threads.append(thread)
            self._served.append(jobs)
            thread.start()
        return jobs

    def find_connections(self, exchange: Callable[[list[Ends]], Sequence[Sequence[Ends]]]) -> None:
        """Learn which sockets are the group's. `exchange` gives what every rank of the group passes to it."""
        if self.is_gloo:
            self.connections.keep(exchange(self.connections.find()))

    def coalesces(self, device: torch.device) -> bool:
        """Whether several tensors can travel in one operation: NCCL groups its calls."""
        group = self.group
        # A backend in Python is the group itself.
        backend = group._get_backend(device) if type(group) is dist.ProcessGroup else group
        return bool(getattr(backend, "supports_coalescing", False))

    def track(self, waiter: object, work: Any) -> None:
        """An operation of a device was begun, and `waiter` has not waited for it."""
        self._works[waiter] = work

    def end(self, within_s: float = _OVER_S) -> None:
        """Give group, sockets and threads back. All ranks must call, when nobody has more to begin here."""
        self._forgotten.detach()
        self._end_threads()
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A group's destructor waits for operations, and would keep every thread of Python waiting as well.
        is_over = not any(thread.is_alive() for thread in self._threads)
        if not is_over or not all(work.is_completed() for work in self._works.values()):
            _FORGOTTEN.append(self)
            return
        group, self.group = self.group, None
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)

    def _forget(self) -> None:
        """The owner was garbage, at a moment of this rank's own: `end` when another link is made.

        Nobody begins another operation here, and those of others do not need this rank: what is over on gloo has sent
        all that others wait for. On NCCL an end is a common act, so there the group stays.
        """
        if self.is_gloo:
            self._end_threads()
            _FORGOTTEN.append(self)

    def end_with_python(self) -> None:
        """A group's destructor joins gloo's threads, which free an operation some time after it is over."""
        if self.is_gloo and self.group is not None:
            self.end(_OVER_S if self._is_lost else _OVER_AT_THE_LAST_S)

    def ended_ranks(self) -> list[int]:
        """Return the ranks that have closed their connection to this one, or died; [] where that cannot be seen."""
        return self.connections.ended_ranks() if self.is_gloo else []

    def close(self) -> None:
        """End what this rank and the others wait for here; operations under way are lost. Any thread may call."""
        self._forgotten.detach()
        self._is_lost = True
        if self.is_gloo:
            self.connections.close()
            # A group's destructor waits for operations, and some will not end before their timeout.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
            dist.destroy_process_group(self.group)
        else:
            self.group.abort()


def _new_group(groups: Sequence[Sequence[int]], backend: str, timeout: datetime.timedelta) -> Any:
    """The group of this rank. Those of other ranks are made with it: the names of groups are numbers that all ranks
    count, and stay free of those of groups that have ended."""
    if backend == "gloo":
        choose_interface(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    made = [dist.new_group(list(ranks), backend=backend, timeout=timeout) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _end_threads(served: list[Jobs]) -> None:
    for jobs in served:
        jobs.put(None)


def _end_forgotten() -> None:
    # Another thread may append meanwhile, and `end` does so with a link that is not over.
    for _ in range(len(_FORGOTTEN)):
        _FORGOTTEN.pop(0).end()
