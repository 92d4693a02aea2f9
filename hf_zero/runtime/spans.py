"""Stretches of time in which an engine does something, in named lanes: collectives, copies, transfers of a disk.

Without a log nothing here is called: what records puts itself in the place of methods of single objects, and goes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.distributed.work import Pending
from hf_zero.errors import ZeroError
from hf_zero.runtime.clocks import Clock, HostClock, clock_of
from hf_zero.runtime.comms_log import CommsLog, Running
from hf_zero.storage.base import ShardStore
from hf_zero.storage.copy_stream import CopyStreams

# From the top of a picture down.
LANES = (
    "forward",
    "backward",
    "step",
    "gather",
    "reduce",
    "other collectives",
    "update",
    "copy to device",
    "copy to host",
    "disk read",
    "disk write",
)
_OF_COLLECTIVE = {"all_gather_into_tensor": "gather", "broadcast": "gather", "reduce_scatter_tensor": "reduce"}
_OTHERS = "other collectives"
_POLL_S = 0.0002  # how late the end of a disk's transfer is noticed


@dataclass(frozen=True)
class Span:
    """Times are milliseconds since the log began."""

    lane: str
    name: str
    start_ms: float
    ms: float
    nbytes: int = 0
    op: str = ""  # of a collective, DeepSpeed's name


@dataclass(frozen=True)
class _Marked:
    lane: str
    name: str
    start: Any
    end: Any
    nbytes: int
    op: str
    on_host: bool


class SpanLog:
    """Collects spans of several threads.

    Times of the device are those of its streams; those of the host, of time.perf_counter. Waits for the device when
    it is made, so that both begin at the same moment.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: Clock = clock_of(device)
        self._host = HostClock()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        self._zero, self._host_zero = self._clock.mark(), self._host.mark()
        self.began_at = time.time()
        self._marked: list[_Marked] = []

    def mark(self) -> Any:
        """A point of the current stream's time."""
        return self._clock.mark()

    def host_mark(self) -> float:
        return self._host.mark()

    def host_ms(self) -> float:
        """Now, since the log began."""
        return self._host.ms(self._host_zero, self._host.mark())

    def add(self, lane: str, name: str, start: Any, end: Any, nbytes: int = 0, op: str = "") -> None:
        """Between two `mark`s."""
        self._marked.append(_Marked(lane, name, start, end, nbytes, op, on_host=False))

    def add_on_host(self, lane: str, name: str, start: float, end: float, nbytes: int = 0) -> None:
        """Between two `host_mark`s."""
        self._marked.append(_Marked(lane, name, start, end, nbytes, "", on_host=True))

    @contextlib.contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        start = self.mark()
        try:
            yield
        finally:
            self.add(lane, name, start, self.mark())

    def spans(self) -> list[Span]:
        """In the order of their starts. Waits for the device."""
        return sorted((self._span(one) for one in self._marked), key=lambda span: (span.start_ms, -span.ms))

    def _span(self, one: _Marked) -> Span:
        clock, zero = (self._host, self._host_zero) if one.on_host else (self._clock, self._zero)
        return Span(one.lane, one.name, clock.ms(zero, one.start), clock.ms(one.start, one.end), one.nbytes, one.op)


class Replacements:
    """Methods of single objects that something else stands in the place of for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Let `make(method)` stand in the place of `owner.name`."""
        self._before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, make(getattr(owner, name)))

    def undo(self) -> None:
        while self._before:
            owner, name, before = self._before.pop()
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class CommSpans(CommsLog):
    """The collectives of an engine as spans, with the bytes of the whole tensor.

    Args:
        on_start: Called as each one starts.
    """

    def __init__(self, comm: Comm, log: SpanLog, on_start: Callable[[], None]) -> None:
        self._log = log
        self._on_start = on_start
        super().__init__(comm, names_tensors=True)
        self._votes = Replacements()
        self._votes.put(comm, "vote", self._around_vote)

    def close(self) -> None:
        """Waits for the collectives under way."""
        self._votes.undo()
        super().close()
        with contextlib.suppress(ZeroError):  # a lost rank, which the training itself reports
            self.calls()

    def _around_vote(self, vote: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def logged(values: torch.Tensor, what: str) -> torch.Tensor:
            begun = self._log.mark()
            by_rank = vote(values, what)
            self._log.add(_OTHERS, f"vote on {what}", begun, self._log.mark(), by_rank.nbytes, "vote")
            return by_rank

        return logged

    def _note(self, name: str, what: str, nbytes: int, begun: Any, pending: Pending) -> None:
        self._on_start()
        super()._note(name, what, nbytes, begun, pending)

    def _is_over(self, one: Running, end: Any) -> None:
        op, _, what = one.name.partition(" | ")
        self._log.add(_OF_COLLECTIVE.get(op, _OTHERS), what[1:-1], one.begun, end, one.nbytes, op)


def record_copies(copies: CopyStreams, log: SpanLog, replaced: Replacements, device: torch.device) -> None:
    """Those between host and device, on their streams; on the CPU, where nothing has to be copied, as they are."""
    beside = None if device.type == "cpu" else torch.Stream(device)

    def around(lane: str) -> Callable[[Any], Any]:
        def make(start: Callable[..., torch.Event | None]) -> Callable[..., torch.Event | None]:
            def copy(target: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> torch.Event | None:
                begun = log.mark()
                event = start(target, source, **kwargs)
                if event is None or beside is None:
                    log.add(lane, lane, begun, log.mark(), target.nbytes)
                    return event
                with beside:
                    event.wait(beside)
                    log.add(lane, lane, begun, log.mark(), target.nbytes)
                return event

            return copy

        return make

    def around_block(block: Callable[[], contextlib.AbstractContextManager[None]]) -> Callable[[], Any]:
        @contextlib.contextmanager
        def marked() -> Iterator[None]:
            with block(), log.span("copy to device", "parameters"):
                yield

        return marked

    replaced.put(copies, "upload", around("copy to device"))
    replaced.put(copies, "download", around("copy to host"))
    if beside is not None:
        replaced.put(copies, "beside", around_block)


class DiskSpans:
    """Transfers of stores on disk. A thread looks again and again which ones are over."""

    def __init__(self, stores: Iterable[ShardStore], log: SpanLog) -> None:
        self._log = log
        self._under_way: list[tuple[str, str, int, float, Callable[[], bool]]] = []
        self._wake = threading.Condition()
        self._closed = False
        self._undo = [store.watch_transfers(self._started) for store in stores]
        self._thread = threading.Thread(target=self._look, name="hf_zero-profile", daemon=True)
        if self._undo:
            self._thread.start()

    def close(self) -> None:
        """Waits for the transfers under way."""
        while self._undo:
            self._undo.pop()()
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _started(self, is_write: bool, key: str, nbytes: int, is_over: Callable[[], bool]) -> None:
        with self._wake:
            lane = "disk write" if is_write else "disk read"
            self._under_way.append((lane, key, nbytes, self._log.host_mark(), is_over))
            self._wake.notify()

    def _look(self) -> None:
        while True:
            with self._wake:
                while not self._under_way and not self._closed:
                    self._wake.wait()
                if not self._under_way:
                    return
                looked_at = list(self._under_way)
            over = [one for one in looked_at if one[4]()]
            now = self._log.host_mark()
            for lane, key, nbytes, begun, _ in over:
                self._log.add_on_host(lane, key, begun, now, nbytes)
            with self._wake:
                self._under_way = [one for one in self._under_way if one not in over]
            time.sleep(_POLL_S)
