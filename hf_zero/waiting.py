"""Waiting for gloo, and leaving off where it would wait in vain.

When a connection ends, gloo fails the operations that have not begun to use it; one whose bytes were on their way
waits on, until the group's timeout, and cannot be called back. So another thread waits, and may be left behind.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from hf_zero.connections import Connections

_FIRST_LOOK_S = 0.05
_LOOK_EVERY_S = 0.5
# Seconds for what others have on their way to each other when a rank leaves: it may have been the last they had to do.
_GRACE_S = 5.0
_T = TypeVar("_T")


class Waiter:
    """A thread that waits for operations over `connections`; it ends with this object, or with the process."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._jobs: SimpleQueue[_Job[object] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._jobs,), name="hf_zero-waiter", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def run(self, call: Callable[[], _T], has_reason: Callable[[], bool], look: Callable[[], None]) -> _T:
        """What `call` returns or raises; RuntimeError if a connection has ended and it goes on and on.

        Args:
            has_reason: Whether another rank has said why it left. Then there is nothing to wait for.
            look: Called again and again meanwhile; what it raises ends the wait.
        """
        job = _Job(call)
        self._jobs.put(job)  # type: ignore[arg-type]  # nobody looks at the result there
        broken_at: float | None = None
        pause = _FIRST_LOOK_S
        while not job.done.acquire(timeout=pause):
            pause = min(2 * pause, _LOOK_EVERY_S)
            if not self._connections.has_ended():
                look()
                continue
            broken_at = broken_at or time.monotonic()
            if has_reason() or time.monotonic() > broken_at + _GRACE_S:
                raise RuntimeError("another rank closed its connections")
        return job.outcome()


class _Job(Generic[_T]):
    def __init__(self, call: Callable[[], _T]) -> None:
        self._call: Callable[[], _T] | None = call
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def perform(self) -> None:
        assert self._call is not None
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error
        self._call = None  # the operations are not kept until the next job
        self.done.release()

    def outcome(self) -> _T:
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: no cycle, which would keep the operations
        return self._results[0]


def _serve(jobs: SimpleQueue[_Job[object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.perform()
        del job
