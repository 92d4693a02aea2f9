"""The sockets of one gloo group, so that they can be closed for certain.

torch has no call for that: what destroys a group waits for operations under way until their timeout, and leaves the
connections open as long as anything holds one of the operations: a traceback, a gather under way, a data loader worker
that was forked. The other ranks, which learn of a failure by the end of a connection, go on waiting.

[Note: Hosts that are cut off]
A host that loses its network, or its power, ends no connection: the system gives one up after a quarter of an hour
where something was sent, and else never. So connections between ranks, and those to the key-value store, have a limit
of their own. The system of the other host has to answer within it, while its process may compute for longer.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_zero.distributed.timeouts import TIMEOUTS

_OPEN_FILES = Path("/proc/self/fd")  # Linux; elsewhere connections end with the process
_GLOO_CLOSES_S = 1.0
# Address and port of both ends, a rank's own first.
Ends = tuple[tuple[object, ...], tuple[object, ...]]


class Connections:
    """The connections of a gloo group. It is made before the group; `find` looks for what was opened since."""

    def __init__(self) -> None:
        self._before = _open_sockets()
        self._sockets: dict[tuple[int, int], Ends] = {}
        self._ranks: dict[Ends, int] = {}  # this rank's ends of a connection -> the rank at the other end

    def find(self) -> list[Ends]:
        """The ends of the connections opened since, other libraries' included: for the other ranks' `keep`."""
        for file, inode in _open_sockets() - self._before:
            with contextlib.suppress(OSError), _duplicate(file, inode) as connection:  # OSError: it listens only
                self._sockets[file, inode] = connection.getsockname(), connection.getpeername()
        return list(self._sockets.values())

    def keep(self, everyone: Sequence[Sequence[Ends]]) -> None:
        """Keep those whose other end is with another rank, by what `everyone` found: the rest is not ours to close."""
        mine = set(self._sockets.values())
        self._ranks = {ends[::-1]: rank for rank, found in enumerate(everyone) for ends in found if ends not in mine}
        self._sockets = {key: ends for key, ends in self._sockets.items() if ends in self._ranks}
        for file, inode in self._sockets:
            with contextlib.suppress(OSError), _duplicate(file, inode) as connection:
                _limit_silence(connection)

    def __len__(self) -> int:
        return len(self._sockets)

    def has_ended(self) -> bool:
        """Whether any of them has: the rank at the other end closed it or died, or gloo gave it up."""
        return any(_is_over(file, inode) for file, inode in list(self._sockets))

    def ended_ranks(self) -> list[int]:
        """Return the ranks at the other end of connections that have ended."""
        over = [ends for (file, inode), ends in list(self._sockets.items()) if _is_over(file, inode)]
        return sorted({self._ranks[ends] for ends in over if ends in self._ranks})  # before `keep` none is known

    def close(self) -> None:
        """End them at both sides, whoever else holds them: what waits for them fails at once. Any thread may call."""
        for file, inode in list(self._sockets):
            with contextlib.suppress(OSError), _duplicate(file, inode) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        # gloo may be writing what came before into memory that the caller will release; then it closes the file.
        deadline = time.monotonic() + _GLOO_CLOSES_S
        while self._sockets.keys() & _open_sockets() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._sockets.clear()


def limit_silence_of_store(store: Any) -> None:
    """Let this process's connections to torch's key-value store end where its host is cut off: [Note: Hosts that are
    cut off]. No communication."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    for file, inode in _open_sockets() if port is not None else ():
        with contextlib.suppress(OSError), _duplicate(file, inode) as connection:
            if connection.getpeername()[1:2] == (port,):
                _limit_silence(connection)


def _limit_silence(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux, which has the others too
        seconds = max(1, int(TIMEOUTS.unreachable))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 4))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 4))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def _open_sockets() -> set[tuple[int, int]]:
    """File and inode of each. The inode tells whether a number still stands for the same socket."""
    found = set()
    for file in map(int, os.listdir(_OPEN_FILES) if _OPEN_FILES.is_dir() else ()):
        with contextlib.suppress(OSError):  # the listing itself was a file, or another thread closed one
            status = os.fstat(file)
            if stat.S_ISSOCK(status.st_mode):
                found.add((file, status.st_ino))
    return found


def _is_over(file: int, inode: int) -> bool:
    try:
        with _duplicate(file, inode) as connection:
            poll = select.poll()
            poll.register(connection, select.POLLRDHUP)
            return bool(poll.poll(0))
    except OSError:
        return True


def _duplicate(file: int, inode: int) -> socket.socket:
    """The socket under a file number of its own; OSError if `file` has become something else."""
    copy = os.dup(file)
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        raise OSError(f"file {file} was closed")
    return socket.socket(fileno=copy)
