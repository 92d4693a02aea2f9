"""Restarts by torchrun's agent (`--max-restarts`, `--nnodes MIN:MAX`): each attempt has keys of its own in the store.

The agent keeps one key-value store for all attempts, and torch gives their groups the same keys: a rank would find the
addresses of processes that have ended, and wait for them. So the ranks agree on a name for the attempt, under which
their groups meet. The agent's own number of the attempt does not change where hosts come and go.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from hf_zero.errors import DivergenceError

_PREFIX = "hf_zero/attempt"
_PAUSE_S = 0.01
_plain = _rendezvous_handlers["env"]
_names: list[str] = []  # the one of this process's attempt, once it is known


def separate_attempts() -> None:
    """Let groups that are made by an agent's variables meet in their attempt. All ranks must call."""
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    if may_restart and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _rendezvous_handlers["env"] = _meet


def _meet(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """Do what torch's handler does, with a store of this attempt."""
    for store, rank, world_size in _plain(url, *args, **kwargs):
        if not _names:
            _names.append(_agreed_name(store, rank, world_size))
        yield dist.PrefixStore(f"{_PREFIX}/{_names[0]}", store), rank, world_size


def _agreed_name(store: Any, rank: int, world_size: int) -> str:
    """Return the name of this attempt: rank 0's token.

    Each rank leaves a token of its own and waits for an answer that repeats it: only a rank 0 of this attempt can have
    seen it. What is left of other attempts answers nobody.
    """
    mine = uuid.uuid4().hex
    store.set(f"{_PREFIX}/token/{rank}", mine)
    if rank == 0:
        answered = dict[int, bytes]()
        _poll(store, lambda: all(_answer(store, other, mine, answered) for other in range(1, world_size)))
        return mine
    answer = f"{_PREFIX}/answer/{rank}"
    _poll(store, lambda: _get(store, answer).startswith(mine.encode()))
    name = _get(store, answer).decode().partition(" ")[2]
    store.set(f"{_PREFIX}/{name}/came/{rank}", "")
    return name


def _poll(store: Any, is_over: Callable[[], bool]) -> None:
    """Return when it is over; raise DivergenceError after the store's own limit."""
    limit_s = store.timeout.total_seconds()
    deadline = time.monotonic() + limit_s
    while not is_over():
        if time.monotonic() > deadline:
            raise DivergenceError(f"some ranks of this attempt of torchrun did not come within {limit_s:.0f} s")
        time.sleep(_PAUSE_S)


def _answer(store: Any, other: int, name: str, answered: dict[int, bytes]) -> bool:
    """Answer the token of a rank, if it is another one than before; whether that rank has got the answer."""
    token = _get(store, f"{_PREFIX}/token/{other}")
    if token and token != answered.get(other):
        answered[other] = token
        store.set(f"{_PREFIX}/answer/{other}", token + f" {name}".encode())
    return bool(store.check([f"{_PREFIX}/{name}/came/{other}"]))


def _get(store: Any, key: str) -> bytes:
    """Return what is there; b"" where nothing is."""
    value: bytes = store.get(key) if store.check([key]) else b""
    return value
