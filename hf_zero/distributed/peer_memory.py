"""Memory of other processes of this host, read without their help (Linux, process_vm_readv).

One copy, where a message over the loopback takes two, and packets. Not everywhere allowed: kernels that let a process
read its children only (kernel.yama.ptrace_scope), a container per rank and other systems refuse; `can_read` finds out.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hf_zero.distributed.environment import host_id

_TOKEN_BYTES = 16
# (full, part): `full` is 1-D, and gets the `part` of every rank in rank order; `part` may lie inside it.
Gather = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ProcessIdentity:
    """The facts by which other processes find this one and its memory."""

    host: str  # the running system and the name space of its process ids
    pid: int
    address: int  # of a token, with which a reader proves that it reads this process
    token: bytes


class PeerMemory:
    """The processes of a group, in rank order. Lives as long as any of them may still be asked for its token."""

    def __init__(self) -> None:
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
        self._pids: list[int] = []

    def identity(self) -> ProcessIdentity | None:
        """None where the system has no way to read other processes."""
        if _reader() is None:
            return None
        return ProcessIdentity(host_id("pid"), os.getpid(), ctypes.addressof(self._token), self._token.raw)

    def can_read(self, identities: Sequence[ProcessIdentity | None]) -> bool:
        """Return whether this process can read all those that gave `identities`.

        It must not end before every other one has tried too.
        """
        mine = self.identity()
        for identity in identities:
            if identity is None or mine is None or identity.host != mine.host:
                return False
            seen = ctypes.create_string_buffer(_TOKEN_BYTES)
            try:
                _read(identity.pid, identity.address, ctypes.addressof(seen), _TOKEN_BYTES)
            except OSError:
                return False
            if seen.raw != identity.token:
                return False
        self._pids = [identity.pid for identity in identities if identity is not None]
        return True

    def fill(self, gathers: Sequence[Gather], addresses: Sequence[Sequence[int]], me: int) -> None:
        """Bring the parts of all ranks into place. `addresses[rank][i]`: where `rank` has its part of the i-th gather.

        OSError if a process has ended. Contiguous CPU tensors only.
        """
        world_size = len(self._pids)
        for rank in range(me, me + world_size):  # not all of them begin with the same one
            origin = rank % world_size
            for (full, part), address in zip(gathers, addresses[origin], strict=True):
                place = full.chunk(world_size)[origin]
                if origin != me:
                    _read(self._pids[origin], address, place.data_ptr(), place.numel() * place.element_size())
                elif place.data_ptr() != part.data_ptr():
                    place.copy_(part)


def find_peers(exchange: Callable[[Any], list[Any]]) -> PeerMemory | None:
    """The memory of the other ranks, where every rank can read that of every other. All ranks must call.

    `exchange` gives what every rank passes to it, in rank order.
    """
    peers = PeerMemory()
    met = peers.can_read(exchange(peers.identity()))
    return peers if all(exchange(met)) else None


class _Piece(ctypes.Structure):
    """The struct iovec of the kernel."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _read(pid: int, address: int, into: int, nbytes: int) -> None:
    reader = _reader()
    assert reader is not None
    done = 0
    while done < nbytes:  # the kernel stops at 2 GiB
        here, there = _Piece(into + done, nbytes - done), _Piece(address + done, nbytes - done)
        count = reader(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"the memory of process {pid} cannot be read: {os.strerror(code)}")
        done += count


@cache
def _reader() -> ctypes._NamedFuncPointer | None:
    """The C library's process_vm_readv (Linux)."""
    try:
        process = ctypes.CDLL(None, use_errno=True)
    except TypeError:  # Windows: a process has no functions by name
        return None
    function: ctypes._NamedFuncPointer | None = getattr(process, "process_vm_readv", None)
    if function is not None:
        pieces = ctypes.POINTER(_Piece)
        count = ctypes.c_ulong
        function.argtypes, function.restype = [ctypes.c_int, pieces, count, pieces, count, count], ctypes.c_ssize_t
    return function
