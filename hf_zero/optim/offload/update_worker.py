"""The thread that runs offloaded updates beside forward and backward. It calls no collective."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hf_zero.distributed.process_end import Turn, end_with_python
from hf_zero.distributed.processes import use_device

_ENDS_WITHIN_S = 30.0  # the job under way, where Python ends


class Job(Protocol):
    """A job of the worker. `run` gets a function to call when the job after it may prefetch its data."""

    def run(self, look_ahead: Callable[[], None]) -> None: ...

    def prefetch(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class UpdateWorker:
    """Runs jobs one after the other, in the order in which they were submitted.

    After a job has failed no other one runs: each gets the same error, so that nothing goes on with half of the state.

    Args:
        device: That jobs copy to and from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: collections.deque[Job] = collections.deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Called after each job, in the worker's thread, with the time of time.perf_counter at which it began.
        self.observers: list[Callable[[Job, float], None]] = []
        self._is_running = False  # a job
        self._closed = False

    def submit(self, jobs: Sequence[Job]) -> None:
        with self._wake:
            self._jobs.extend(jobs)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hf_zero-update", daemon=True)
                self._thread.start()
                end_with_python(self, Turn.UPDATES)
            self._wake.notify()

    def bring_forward(self, jobs: Sequence[Job]) -> None:
        """Let those of `jobs` that have not begun run before all others, in this order."""
        with self._wake:
            waiting = {id(job) for job in self._jobs}
            first = [job for job in jobs if id(job) in waiting]
            chosen = {id(job) for job in first}
            self._jobs = collections.deque([*first, *(job for job in self._jobs if id(job) not in chosen)])

    def wait(self) -> None:
        """Wait until no job is left; errors stay where they are raised otherwise."""
        with self._wake:
            self._wake.wait_for(lambda: not self._jobs and not self._is_running)

    def end(self) -> None:
        """Let the thread end when its jobs are done, without waiting for that.

        A garbage collection may call it anywhere, also inside of threading.enumerate, which holds a lock that an
        ending thread needs: who waited for the thread there would wait for ever.
        """
        with self._wake:
            self._closed = True
            self._wake.notify()

    def close(self, wait_s: float | None = None) -> None:
        """End the thread when its jobs are done; return before that after `wait_s` seconds."""
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(wait_s)
            self._thread = None

    def end_with_python(self) -> None:
        """Close the worker without the jobs that have not begun."""
        with self._wake:
            self._jobs.clear()
        self.close(_ENDS_WITHIN_S)

    def _work(self) -> None:
        use_device(self._device)
        while True:
            with self._wake:
                self._is_running = False
                if not self._jobs:
                    self._wake.notify_all()  # who waits for that
                while not self._jobs and not self._closed:
                    self._wake.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_running = True
            if self._error is None:
                begun = time.perf_counter()
                try:
                    job.run(self._look_ahead)
                    for observer in self.observers:
                        observer(job, begun)
                except BaseException as error:  # it is raised where the job is waited for
                    self._error = error
            if self._error is not None:
                job.fail(self._error)
            del job  # while it waits, this thread keeps nobody's tensors alive

    def _look_ahead(self) -> None:
        with self._wake:
            following = self._jobs[0] if self._jobs else None
        if following is not None:
            following.prefetch()
