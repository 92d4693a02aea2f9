"""An operation of an engine's group that has started: how the host, or a stream of the device, waits for it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from hf_zero.distributed.engine_group import EngineGroup
from hf_zero.distributed.failure_monitor import FailureMonitor
from hf_zero.distributed.process_group import Jobs, Link
from hf_zero.distributed.timeouts import TIMEOUTS
from hf_zero.distributed.work import Finish

CLOSED = "its connections were closed"


class GroupWork:
    """An operation of a group that has started, and what is left to do once it is over. `wait` may be called again."""

    _group: EngineGroup
    _what: str
    _finish: Finish
    _is_over = False

    def wait(self) -> None:
        if self._is_over:
            return
        try:
            if self._group.stopped:
                raise RuntimeError(CLOSED)
            self._until_over()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._group.failure(self._what, error) from error
        self._is_over = True
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _until_over(self) -> None:
        raise NotImplementedError


class DeviceWork(GroupWork):
    """torch's Work for which a stream of the device waits, and not the host."""

    def __init__(self, group: EngineGroup, link: Link, work: Any, what: str, finish: Finish = None) -> None:
        self._group, self._what, self._finish = group, what, finish
        self._work = work
        link.track(self, work)

    def hold_stream(self) -> None:
        """The current stream goes on when the operation is over. It does not count as waited for."""
        self._work.wait()

    def _until_over(self) -> None:
        self._work.wait()


class HostWork(GroupWork):
    """A call over gloo that a thread makes, and leaving off where the wait for it would be in vain.

    When a connection ends, gloo fails the operations that have not begun to use it; one whose bytes were on their way
    waits on, until the group's timeout, and cannot be called back. So another thread waits, and may be left behind.

    Args:
        call: Takes torch's group, and returns when all is over.
        link: Over which; None for that of the group's control traffic.
        jobs: Whose threads make the call; None for the link's own.
    """

    def __init__(
        self,
        group: EngineGroup,
        call: Callable[[Any], object],
        what: str,
        finish: Finish = None,
        *,
        link: Link | None = None,
        jobs: Jobs | None = None,
    ) -> None:
        self._group, self._what, self._finish = group, what, finish
        link = link or group.control
        if link is None or group.stopped:  # another thread has closed it
            raise group.failure(what, RuntimeError(CLOSED))
        self._link = link
        self._call: Callable[[], object] | None = functools.partial(call, link.group)
        self._error: BaseException | None = None
        self.ended_at: float | None = None  # of time.perf_counter
        self._running = threading.Lock()
        self._running.acquire()
        (jobs or link.jobs).put(self.perform)

    def perform(self) -> None:
        """Called in a thread, once."""
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._call = None  # the operations are not kept until the next job
        self.ended_at = time.perf_counter()
        self._running.release()

    def _until_over(self) -> None:
        if not self._running.acquire(timeout=TIMEOUTS.first_look):
            self._wait_and_look()
        self._running.release()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: no cycle, which would keep the operations

    def _wait_and_look(self) -> None:
        """Go on waiting; RuntimeError if a connection ended, or other ranks started other operations."""
        monitor = FailureMonitor(self._link.connections, self._group.name)
        pause = TIMEOUTS.first_look
        while True:
            pause = min(2 * pause, TIMEOUTS.look_every)
            monitor.look()
            self._group.look_for_difference()
            if self._running.acquire(timeout=pause):
                return
