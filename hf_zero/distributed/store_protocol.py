"""The ranks tell each other through the key-value store, without a collective, who has come and why one left."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from hf_zero.distributed.gloo_connections import limit_silence_of_store
from hf_zero.distributed.processes import call_site
from hf_zero.distributed.timeouts import TIMEOUTS
from hf_zero.errors import DivergenceError, OffloadError, OutOfMemoryError, StateError, ZeroError

_KINDS: dict[str, type[ZeroError]] = {
    one.__name__: one for one in (DivergenceError, OffloadError, OutOfMemoryError, StateError)
}
# A rank closes its connections so that all stop at once, or because an error has ended its process.
STOP, ENDED = "failure", "ended"


class LostRankError(Exception):
    """A rank that is needed has ended: it cannot come any more."""


class Presence:
    """The calls of one group that need every rank, counted by name."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = collections.Counter()

    def clear(self) -> None:
        """Forget all calls: the group was made anew, under another name."""
        self._calls.clear()

    def wait(
        self,
        name: str,
        group: str,
        rank: int,
        world_size: int,
        timeout_s: float | None,
        ended_ranks: Callable[[], list[int]],
        look: Callable[[], None],
    ) -> None:
        """Return once every rank has called with the same `name`.

        The store may live in a rank: none must end its process before all have returned. `look` is called again and
        again, and raises LostRankError where others do something else.

        Raises:
            StateError: Some did not come.
            LostRankError: Some have ended, or the store has gone with the process that held it.
        """
        timeout_s = timeout_s or TIMEOUTS.presence
        call = f"hf_zero/{group}/{name}/{self._calls[name]}"
        try:
            missing = _missing(call, rank, world_size, timeout_s, ended_ranks, look)
        except RuntimeError as error:  # DistNetworkError
            reason = str(error).splitlines()[0]
            raise LostRankError(
                f"the key-value store does not answer ({reason}): the process that holds it, often rank 0's, has ended"
            ) from error
        if missing:
            given_up = "".join(f"\n{text}" for text in _exchange_failures(group, rank, missing, name))
            raise StateError(
                f"rank {rank} called {name}, but rank(s) {missing} did not within {timeout_s:.0f} s: it "
                f"needs all {world_size} ranks, because each holds a part of the model.\n"
                f"Call {name} on every rank (outside `if rank == 0`); it writes on one rank by itself.\n"
                f"Called from: {call_site()}{given_up}"
            )
        self._calls[name] += 1


def _exchange_failures(group: str, rank: int, missing: Sequence[int], name: str) -> list[str]:
    """Leave word that this rank has given up; what those that did not come have given up before."""
    store, prefix = _store(), f"hf_zero/{group}/given up"
    store.set(f"{prefix}/{rank}", f"Rank {rank} had called {name} before, and given up: {call_site()}")
    return [store.get(f"{prefix}/{other}").decode() for other in missing if store.check([f"{prefix}/{other}"])]


def _missing(
    call: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    ended_ranks: Callable[[], list[int]],
    look: Callable[[], None],
) -> list[int]:
    """Return the ranks that have not come within `timeout_s`; this rank has then not come either.

    They are counted, so that many ranks do not ask for as many keys each.
    """
    store = _store()
    store.set(f"{call}/{rank}", "1")
    come = store.add(call, 1)
    now = time.monotonic()
    deadline, look_at = now + timeout_s, now + TIMEOUTS.look_for_ended
    pause = 0.0002  # ranks in step come within less than a millisecond; others are not worth a busy store
    while come < world_size:
        now = time.monotonic()
        if now > look_at:
            if ended := ended_ranks():
                raise LostRankError(f"rank(s) {ended} have ended, or closed their connections after an error")
            look()
            look_at = now + TIMEOUTS.look_for_ended
        if now > deadline:
            if missing := [other for other in range(world_size) if not store.check([f"{call}/{other}"])]:
                store.delete_key(f"{call}/{rank}")
                store.add(call, -1)
            return missing
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
        come = store.add(call, 0)
    return []


class MessageBox:
    """Messages between threads of the ranks, beside the collectives of the main threads.

    They go through a connection to the store of its own, which the first use makes: no other thread waits for it.

    Args:
        name: Of this exchange: the same on all ranks, and of no other one.
        is_over: Whether the group's connections are closed, so that lost ranks cannot be seen.
    """

    def __init__(self, name: str, ended_ranks: Callable[[], list[int]], is_over: Callable[[], bool]) -> None:
        self._store = _store()
        self._is_own = False
        self._name = name
        self._ended_ranks = ended_ranks
        self._is_over = is_over

    def send(self, subject: str, content: bytes) -> None:
        """Raises LostRankError where the store is gone."""
        self._ask(lambda: self._store.set(self._key(subject), content))

    def has(self, subject: str) -> bool:
        """Whether something was sent under it."""
        return bool(self._ask(lambda: self._store.check([self._key(subject)])))

    def receive(self, subjects: Sequence[str], on_wait: Callable[[], None]) -> list[bytes]:
        """Return what was sent under each subject, once all of it is there; LostRankError where some will not come.

        `on_wait` is called again and again until then, and may raise it too.
        """
        keys = [self._key(subject) for subject in subjects]
        closed_at: float | None = None
        pause = 0.001
        while not self._ask(lambda: self._store.check(keys)):
            # A rank that ends in order has sent everything before.
            if (ended := self._ended_ranks()) and not self._ask(lambda: self._store.check(keys)):
                raise LostRankError(f"rank(s) {ended} have ended")
            if self._is_over():
                closed_at = closed_at or time.monotonic()
                if time.monotonic() > closed_at + TIMEOUTS.presence:
                    raise LostRankError("the ranks have closed their connections")
            on_wait()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        contents: list[bytes] = self._ask(lambda: self._store.multi_get(keys))
        return contents

    def delete(self, subjects: Sequence[str]) -> None:
        """Delete messages that all have received: a store keeps what it has, and every save sends more."""
        for subject in subjects:
            self._ask(partial(self._store.delete_key, self._key(subject)))

    def _key(self, subject: str) -> str:
        return f"hf_zero/{self._name}/{subject}"

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            if not self._is_own:
                self._store, self._is_own = self._store.clone(), True
                limit_silence_of_store(self._store)
            return question()
        except RuntimeError as error:  # DistNetworkError
            reason = str(error).splitlines()[0]
            raise LostRankError(f"the key-value store does not answer ({reason})") from error


def publish_reason(group: str, reason: ZeroError, subject: str = STOP) -> None:
    """Publish why this rank is about to close its connections in `group`, where none has said so before."""
    store = _store()
    with contextlib.suppress(RuntimeError):  # the store has gone with the process that held it
        if published_reason(group) is None:
            store.set(_key(group, subject), f"{type(reason).__name__}\n{reason}")


def published_reason(group: str, subjects: Sequence[str] = (STOP, ENDED)) -> ZeroError | None:
    """Return what a rank of `group` published, an error of the same kind and text; None if none did."""
    if not dist.is_initialized():
        return None
    try:
        key = next((key for one in subjects if _store().check([key := _key(group, one)])), None)
        published = None if key is None else _store().get(key).decode()
    except RuntimeError:  # the store has gone with the process that held it
        return None
    kind, _, text = (published or "").partition("\n")
    return _KINDS[kind](text) if published is not None else None


def _store() -> Any:
    if not dist.is_initialized():
        raise StateError(
            "torch.distributed.destroy_process_group() was called before engine.teardown(): this engine cannot reach "
            "the other ranks any more.\nCall engine.teardown() first, on all ranks."
        )
    return dist.distributed_c10d._get_default_store()


def _key(group: str, subject: str) -> str:
    return f"hf_zero/{group}/{subject}"
