"""Finds out that one rank waits in a collective of torch's own, while the others wait in an operation of the engine.

A thread of the process looks, once the rank has started no operation of the engine for long, whether the thread that
trains is in such a call, and publishes it. A rank that waits for that one compares how many operations of that call's
group each of both has begun. Where it has begun fewer, the other waits for it: neither can go on.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from hf_zero.distributed.operation_log import OperationLog
from hf_zero.distributed.processes import call_site
from hf_zero.distributed.timeouts import TIMEOUTS
from hf_zero.errors import DivergenceError, ZeroError

_PACKAGE = __name__.partition(".")[0]
# No rank is over with one of these before all have begun it, so that a slow third rank does not look like a mistake.
_NEED_ALL = ("all_", "barrier", "reduce_scatter")


@dataclass(frozen=True)
class TorchCall:
    """A collective in which a rank of the whole run waits.

    Args:
        group: The name of torch's group.
        begun: How many operations the rank has begun in that group, with this one.
        position: How many operations of the engine it has started.
    """

    rank: int
    name: str
    group: str
    begun: int
    position: int
    site: str


class TorchCallCheck:
    """The calls of torch in which the ranks of one engine wait. The thread that makes it is the one that trains.

    Args:
        log: Of the engine's operations.
        store: Gives the key-value store.
        prefix: The prefix of this engine's keys.
    """

    def __init__(self, log: OperationLog, store: Callable[[], Any], prefix: str) -> None:
        self._log = log
        self._store = store
        self._key = f"{prefix}/torch call"
        self._thread = threading.get_ident()
        self._position = log.position
        self._since = time.monotonic()
        self._published: TorchCall | None = None

    def look(self) -> None:
        """Publish the call in which the training thread stays. Another thread calls this again and again."""
        now = time.monotonic()
        if self._position != self._log.position:
            self._position, self._since = self._log.position, now
        if now < self._since + TIMEOUTS.stalled:
            return
        with _in_doubt_nothing():
            with _no_garbage_collection():
                call = _call_of(sys._current_frames().get(self._thread), self._position)
            if call is not None and call != self._published:
                self._published = call
                self._store().set(self._key, json.dumps(asdict(call)))

    def deadlock(self) -> ZeroError | None:
        """Return an error if another rank waits in a call of torch for this one, which waits in an operation."""
        with _in_doubt_nothing():
            if not self._store().check([self._key]):
                return None
            call = TorchCall(**json.loads(self._store().get(self._key)))
            names = dist.distributed_c10d._world.pg_names
            group: Any = next((one for one, name in list(names.items()) if name == call.group), None)
            if group is None or call.begun <= group._get_sequence_number_for_group():
                return None
            if call.position >= self._log.position:  # this rank waits for a third one
                return None
            operation = (self._log.last() or ["a call of the engine"])[-1]
            return DivergenceError(
                f"rank {dist.get_rank()} waits in {operation} for rank {call.rank}, which waits in torch's "
                f"{call.name} for this rank: neither can go on.\n"
                f"Rank {call.rank} called torch's {call.name} from: {call.site}\n"
                "Call torch's own collectives on every rank, between the same calls of the engine."
            )
        return None


def _in_doubt_nothing() -> contextlib.suppress:
    """Leave the block where the store has gone with the process that held it, or a backend counts no operations.

    Whoever looks takes a RuntimeError for the end of another rank.
    """
    return contextlib.suppress(RuntimeError)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Let no garbage be collected while the frames of another thread are looked up.

    Python 3.10 and 3.11 make an object of each frame under a lock that every thread needs. A collection in between
    frees tensors, which gives other threads their turn: one that looks too, or starts a thread, waits for that lock,
    and keeps Python's own (python/cpython#106883).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _call_of(frame: FrameType | None, position: int) -> TorchCall | None:
    """Return the collective that the innermost frames are in; None for others, and for those that hf_zero calls."""
    outer, frames = frame, list[FrameType]()
    while outer is not None and outer.f_globals.get("__name__", "").startswith("torch.distributed."):
        frames.append(outer)
        outer = outer.f_back
    with_group = [one for one in frames if "group" in one.f_locals]
    if not with_group or not with_group[0].f_code.co_name.startswith(_NEED_ALL):
        return None
    if outer is None or outer.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        return None
    group: Any = with_group[0].f_locals["group"]
    group = dist.group.WORLD if group is None else group
    name = dist.distributed_c10d._world.pg_names.get(group)
    if name is None:
        return None
    begun = group._get_sequence_number_for_group()
    return TorchCall(dist.get_rank(), with_group[-1].f_code.co_name, name, begun, position, call_site(outer))
