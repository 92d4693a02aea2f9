"""Waiting for gloo, and leaving off where it would wait in vain.

When a connection ends, gloo fails the operations that have not begun to use it; one whose bytes were on their way
waits on, until the group's timeout, and cannot be called back. So other threads wait, and may be left behind. They
start messages too: gloo writes into the socket in the thread that sends, and this rank computes meanwhile.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from hf_zero.distributed.gloo_connections import Connections

# Messages of more operations than these are begun when one of them is over. All ranks begin them in the same order.
_THREADS = 3
_FIRST_LOOK_S = 0.05
_LOOK_EVERY_S = 0.5
# Seconds for what others have on their way to each other when a rank leaves: it may have been the last they had to do.
_GRACE_S = 5.0


class Threads:
    """A few threads that make calls over `connections`; they end with this object, or with the process."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        for _ in range(_THREADS):
            threading.Thread(target=_serve, args=(self._jobs,), name="hf_zero-gloo", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)

    def start(self, call: Callable[[], object]) -> Job:
        """Have a thread make `call`, which returns when all is over. Calls are begun in the order given."""
        job = Job(call, self._connections)
        self._jobs.put(job)
        return job


class Job:
    """A call that a thread makes."""

    def __init__(self, call: Callable[[], object], connections: Connections) -> None:
        self._call: Callable[[], object] | None = call
        self._connections = connections
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def perform(self) -> None:
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._call = None  # the operations are not kept until the next job
        self._running.release()

    def is_over(self, timeout_s: float) -> bool:
        """Waits at most so long."""
        if over := self._running.acquire(timeout=timeout_s):
            self._running.release()
        return over

    def wait(self, has_reason: Callable[[], bool], look: Callable[[], None]) -> None:
        """Until the call has returned, and raise what it raised; RuntimeError if a connection ended and it goes on.

        Args:
            has_reason: Whether another rank has said why it left. Then there is nothing to wait for.
            look: Called again and again meanwhile; what it raises ends the wait.
        """
        broken_at: float | None = None
        pause = _FIRST_LOOK_S
        while not self.is_over(pause):
            pause = min(2 * pause, _LOOK_EVERY_S)
            if not self._connections.has_ended():
                look()
                continue
            broken_at = broken_at or time.monotonic()
            if has_reason() or time.monotonic() > broken_at + _GRACE_S:
                raise RuntimeError("another rank closed its connections")
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: no cycle, which would keep the operations


class OnDevice:
    """torch's Works that a stream of the device waits for, and not the host."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_over(self, timeout_s: float) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, has_reason: Callable[[], bool], look: Callable[[], None]) -> None:
        for work in self._works:
            work.wait()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.perform()
        del job
