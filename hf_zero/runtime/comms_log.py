"""What the collectives of an engine take: sizes, counts, times, bandwidths. DeepSpeed's `comms_logger`, in its layout.

Without the key nothing here is called: a log puts itself in the place of those methods of one Comm that start
collectives. A time is from the start of a collective until it is over, with what other ranks come late. Nothing waits
for it, so what overlaps in a run overlaps here too (DeepSpeed makes every collective blocking).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero.config import COLLECTIVES
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.group_work import DeviceWork, HostWork
from hf_zero.distributed.work import Done, Pending
from hf_zero.runtime.clocks import clock_of

_KEPT = 1000  # times of an operation and size, of which means and stragglers are taken
_COALESCED = "_begin_coalesced"


@dataclass(frozen=True)
class _Method:
    """One of Comm's that starts a collective, and which of its arguments are the whole tensor and its name."""

    name: str
    called: str  # DeepSpeed's name of the collective
    full: int
    what: int


_METHODS = (
    _Method("all_gather", "all_gather_into_tensor", 0, 2),
    _Method("reduce_scatter", "reduce_scatter_tensor", 1, 2),
    _Method("all_reduce", "all_reduce", 0, 1),
    _Method("all_to_all", "all_to_all_single", 1, 2),
    _Method("broadcast_start", "broadcast", 0, 1),
)


@dataclass
class Calls:
    """Those of one operation with one size."""

    count: int = 0
    total_ms: float = 0.0
    last_ms: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=_KEPT))

    def add(self, ms: float) -> None:
        self.count += 1
        self.total_ms += ms
        self.last_ms.append(ms)


@dataclass(frozen=True)
class Running:
    """A collective whose time is not known yet. Times are marks of the clock; a HostWork has its end itself."""

    name: str
    nbytes: int
    begun: Any
    end: Any
    pending: Pending


# Operation -> bytes of the whole tensor -> calls.
Table = dict[str, dict[int, Calls]]
# A call whose time is known: operation, bytes, milliseconds.
Show = Callable[[str, int, float], None]


class CommsLog:
    """The collectives of one engine, from now on until `close`.

    Args:
        wanted: Names out of COLLECTIVES.
        names_tensors: Tell collectives of different tensors apart, by their names.
        show: Called for each collective, some time after it.
    """

    def __init__(
        self, comm: Comm, wanted: Sequence[str] = COLLECTIVES, *, names_tensors: bool = False, show: Show | None = None
    ) -> None:
        self.world_size = comm.world_size
        self._comm = comm
        self._wanted = frozenset(wanted)
        self._names_tensors = names_tensors
        self._show = show
        self._clock = clock_of(comm.device)
        self._stream = None if comm.computes_on_host else torch.Stream(comm.device)
        self._table: Table = {}
        self._running: collections.deque[Running] = collections.deque()
        self._replaced: list[tuple[str, Callable[..., Any] | None]] = []  # what another log had put there
        for method in _METHODS:
            if method.called in self._wanted:
                self._replace(method)
        self._replace_coalesced()

    def close(self) -> None:
        """Log nothing any more; what was logged stays."""
        while self._replaced:
            name, before = self._replaced.pop()
            if before is None:
                delattr(self._comm, name)
            else:
                setattr(self._comm, name, before)

    def calls(self) -> Table:
        """What was logged so far. Waits for the collectives under way."""
        self._read(wait=True)
        return self._table

    def fastest_ms(self) -> dict[str, dict[int, list[float]]]:
        """Of each of the last calls the shortest time of all ranks, which is that of who came last. All must call."""
        mine = {name: {size: [*one.last_ms] for size, one in sizes.items()} for name, sizes in self.calls().items()}
        everyone = self._comm.all_gather_object(mine, "times of collectives")

        def fastest(name: str, size: int) -> list[float]:
            return [min(ms) for ms in zip(*(one[name][size] for one in everyone), strict=False)]

        return {name: {size: fastest(name, size) for size in sizes} for name, sizes in mine.items()}

    # ---------------------------------------------------------------- in the place of Comm's methods
    def _put(self, name: str, call: Callable[..., Any]) -> None:
        self._replaced.append((name, vars(self._comm).get(name)))
        setattr(self._comm, name, call)  # of this object, found before the method of its class

    def _replace(self, method: _Method) -> None:
        start = getattr(self._comm, method.name)

        def logged(*args: Any, **kwargs: Any) -> Pending:
            begun = self._clock.mark()
            pending: Pending = start(*args, **kwargs)
            full = args[method.full]
            nbytes = full.numel() * (kwargs.get("wire_dtype") or full.dtype).itemsize
            self._note(method.called, args[method.what], nbytes, begun, pending)
            return pending

        self._put(method.name, logged)

    def _replace_coalesced(self) -> None:
        start = getattr(self._comm, _COALESCED)
        called = {method.name: method.called for method in _METHODS}

        def logged(what: str, kind: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Pending:
            begun = self._clock.mark()
            pending: Pending = start(what, kind, outputs, inputs)
            if called[kind] in self._wanted:
                whole = outputs if kind == "all_gather" else inputs
                self._note(called[kind], what, sum(one.nbytes for one in whole), begun, pending)
            return pending

        self._put(_COALESCED, logged)

    def _note(self, name: str, what: str, nbytes: int, begun: Any, pending: Pending) -> None:
        end = None
        if isinstance(pending, DeviceWork):
            assert self._stream is not None
            with self._stream:  # another stream waits for it, and marks when it is over
                pending.hold_stream()
                end = self._clock.mark()
        elif isinstance(pending, Done):
            end = self._clock.mark()
        elif not isinstance(pending, HostWork):  # collected in a block, at whose end it is logged
            return
        name = f"{name} | [{what}]" if self._names_tensors else name
        self._running.append(Running(name, nbytes, begun, end, pending))
        self._read(wait=False)

    def _read(self, *, wait: bool) -> None:
        """Take the times of what is over, in the order of the starts."""
        while self._running:
            one = self._running[0]
            if wait:
                one.pending.wait()
            end = one.pending.ended_at if isinstance(one.pending, HostWork) else one.end
            if end is None or not (wait or self._clock.is_past(end)):
                return
            self._running.popleft()
            self._is_over(one, end)

    def _is_over(self, one: Running, end: Any) -> None:
        ms = self._clock.ms(one.begun, end)
        self._table.setdefault(one.name, {}).setdefault(one.nbytes, Calls()).add(ms)
        if self._show is not None:
            self._show(one.name, one.nbytes, ms)
