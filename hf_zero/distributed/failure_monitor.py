"""Finds out that waiting for the other ranks is in vain, because one of them has died or stopped.

On gloo the thread that waits looks from time to time. A device waits without the host, and its kernels would wait for
ever, as would the host once it asks for a result of theirs: there a thread of its own looks, and has them aborted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from hf_zero.distributed.gloo_connections import Connections
from hf_zero.distributed.store_protocol import STOP, published_reason
from hf_zero.distributed.timeouts import TIMEOUTS

logger = logging.getLogger(__name__)

_THREAD = "hf_zero-watch"
_watched: list[tuple[weakref.WeakMethod[Callable[[], None]], threading.Event]] = []
_starting = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A child has no part in the groups of its parent, whose connections to the store it holds too.
    os.register_at_fork(after_in_child=_watched.clear)


class FailureMonitor:
    """The looks of one wait.

    Args:
        connections: Of a gloo group of the ranks: a rank that ends closes them.
        name: Of the group under which ranks publish why they stop.
    """

    def __init__(self, connections: Connections, name: str) -> None:
        self._connections = connections
        self._name = name
        self._ended_at: float | None = None

    def look(self) -> bool:
        """Whether all connections stand; RuntimeError where one has ended: at once if its rank wants all to stop.

        A rank that an error ends may have had all messages of this wait, and the error is the other ranks' own then.
        """
        if not self._connections.has_ended():
            return True
        self._ended_at = self._ended_at or time.monotonic()
        if published_reason(self._name, (STOP,)) is not None or time.monotonic() > self._ended_at + TIMEOUTS.grace:
            raise RuntimeError("another rank closed its connections")
        return False


def watch_for(look: Callable[[], None], over: threading.Event) -> None:
    """Call `look`, a method, again and again, until `over` is set or the method's object is garbage.

    One thread of the process does so for all of them: it stays.
    """
    _watched.append((weakref.WeakMethod(look), over))
    with _starting:
        if not any(thread.name == _THREAD for thread in threading.enumerate()):
            threading.Thread(target=_look_at_all, name=_THREAD, daemon=True).start()


def _look_at_all() -> None:
    while True:
        time.sleep(TIMEOUTS.look_every)
        for watched in _watched[:]:
            method, over = watched
            look = method()
            if look is None or over.is_set() or not _could(look):
                _watched.remove(watched)
            del look  # the object may be garbage while the thread sleeps


def _could(look: Callable[[], None]) -> bool:
    """Call `look`; whether it raised nothing. What it raises is logged, and ends no look at others."""
    try:
        look()
    except Exception:
        logger.exception("a look at the other ranks failed, and there will be no other one")
        return False
    return True
