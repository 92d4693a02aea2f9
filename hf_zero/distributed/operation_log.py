"""The operations that this rank has started, in order, and how ranks find out that theirs differ.

Collectives are matched by their order. Ranks that start different ones (stage 3, and a layer that one rank calls
without the model) would exchange tensors that do not belong together: others of the same size, without an error.

[Note: Matching]
Every operation has a tag, a digest of all operations up to it. Messages of gloo carry it, so operations with another
history never meet: both ranks wait. A rank that waits for long publishes its position and digest in the key-value
store, with the list of its last operations, and compares with every rank that has come no farther: it knows its own
digests at the last positions. Lists are read only where digests differ. What gloo matches by order alone (all-reduce,
broadcast) and everything on other backends is confirmed before its result counts: by messages with a tag, at the end
of a forward and before an update (Comm.largest, Comm.vote).

A call that all ranks must make and that exchanges nothing, such as a backward whose gradients stay on their rank, is
an operation too (Comm.note_call): where one rank leaves it out, the next exchange finds the difference.
"""

from __future__ import annotations

import collections
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.distributed.timeouts import TIMEOUTS
from hf_zero.errors import DivergenceError, StateError, ZeroError

_KEPT = 256  # operations, for the comparison
_SHOWN = 5  # operations of each rank in a message
_RANKS_SHOWN = 8  # in a message: it stays readable, and the store is asked for few lists
_TAG_BITS = 31
_DIGEST_BITS = 52  # exact in a float64
# The operations of a unit's parameters and gradients; the rest are calls of the engine.
_UNIT_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
CALL = "call"  # an operation without an exchange
_CALLS = f"{CALL} "


@dataclass(frozen=True)
class Operation:
    """One line of the record of last operations."""

    op: str
    what: str
    numel: int | None = None  # of the full side; None where ranks may give different numbers
    dtype: str = ""

    def __str__(self) -> str:
        size = "" if self.numel is None else f" ({self.numel} x {self.dtype})"
        return f"{self.op} {self.what}{size}"


class OperationLog:
    """Operations of one group. On ranks in step, position, tag and digest are the same."""

    def __init__(self) -> None:
        # With the position of each, because another thread may read while one is added.
        self._kept: collections.deque[tuple[int, Operation, bytes]] = collections.deque(maxlen=_KEPT)
        self.clear()

    def clear(self) -> None:
        """Forget all operations: the group was made anew."""
        self._kept.clear()
        self.position = 0
        self._state = bytes(8)

    def add(self, op: str, what: str, numel: int | None = None, dtype: str = "") -> None:
        """See Operation."""
        same_on_all = f"{op} {what}" if numel is None else f"{op} {what} {numel} {dtype}"
        self._state = hashlib.blake2b(self._state + same_on_all.encode(), digest_size=8).digest()
        self._kept.append((self.position, Operation(op, what, numel, dtype), self._state))
        self.position += 1

    def take_back(self) -> None:
        """Forget the operation that was added last: this rank gave it up, and nothing was exchanged."""
        self._kept.pop()
        self.position -= 1
        self._state = self._kept[-1][2] if self._kept else bytes(8)

    @property
    def tag(self) -> int:
        """The tag of messages that belong to the operation added last."""
        return int.from_bytes(self._state, "big") >> (64 - _TAG_BITS)

    @property
    def digest(self) -> float:
        """An integer: all operations so far."""
        return float(int.from_bytes(self._state, "big") >> (64 - _DIGEST_BITS))

    def last(self) -> list[str]:
        """The last operations, oldest first."""
        return [str(operation) for _, operation, _ in self._kept]

    def by_position(self) -> dict[int, str]:
        return {at: str(operation) for at, operation, _ in list(self._kept)}

    def digests(self) -> dict[int, str]:
        """Return the digests of all operations up to each of the last ones, by its position."""
        return {at: state.hex() for at, _, state in list(self._kept)}


class OperationCheck:
    """Compares the operations of the ranks of one group through the key-value store. No collective.

    Args:
        store: Gives the store; asked at every look, because it goes with the process that holds it.
        prefix: Of this group's keys.
    """

    def __init__(self, log: OperationLog, store: Callable[[], Any], prefix: str, rank: int, world_size: int) -> None:
        self._log = log
        self._store = store
        self._rank = rank
        self._places = [f"{prefix}/place/{other}" for other in range(world_size)]
        self._lists = [f"{prefix}/operations/{other}" for other in range(world_size)]
        self._published: tuple[int, str] | None = None
        self._stalled_at = -1  # position of the log
        self._stalled_since = 0.0
        self._next_look = self._next_line = 0.0

    def is_time_to_compare(self) -> bool:
        """Whether this rank has started no operation for long. Call it again and again, during a wait or always."""
        now = time.monotonic()
        if self._stalled_at != self._log.position:
            self._stalled_at = self._log.position
            self._stalled_since, self._next_look = now, now + TIMEOUTS.stalled
            self._next_line = now + TIMEOUTS.say_every
        if now < self._next_look:
            return False
        self._next_look = now + min(max(now - self._stalled_since, TIMEOUTS.stalled), TIMEOUTS.compare_every)
        return True

    def difference_now(self) -> ZeroError | None:
        """Return an error if this rank waits for nothing, because another one has started other operations."""
        try:
            digests = self._log.digests()
            self._publish(digests)
            if not self._store().check(self._places):
                # Others may be about to publish theirs.
                self._next_look = time.monotonic() + TIMEOUTS.stalled / 4
                return None
            places = [json.loads(place) for place in self._store().multi_get(self._places)]
            others = [rank for rank, (at, digest) in enumerate(places) if digests.get(at, digest) != digest]
            return self._compare([self._rank, *others], self._lists) if others else None
        except (RuntimeError, ValueError):
            # The store has gone with the process that held it, or with the default group, and the end of the wait will
            # say so; or another thread has just added an operation.
            return None

    def difference(self, digests: Sequence[float]) -> ZeroError:
        """The same where every rank knows already that there is one, by the `digests` of all. All ranks must call."""
        last = [f"{key}/last" for key in self._lists]
        self._store().set(last[self._rank], json.dumps(self._log.by_position()))
        one_of_each = {digest: rank for rank, digest in enumerate(digests)}.values()
        ranks = [*one_of_each, *(rank for rank in range(len(digests)) if rank not in one_of_each)]
        text = "ranks started different operations, too long ago to say which"
        return self._compare(ranks, last) or DivergenceError(text)

    def line_on_a_long_wait(self) -> str | None:
        """Return who waits for whom where this rank has waited for long: on one of those that wait, once a minute."""
        now = time.monotonic()
        if self._stalled_at != self._log.position or now < self._next_line:
            return None
        self._next_line = now + TIMEOUTS.say_every
        mine = json.dumps(self._published).encode()
        there = [self._store().check([place]) and self._store().get(place) == mine for place in self._places]
        waiting = [rank for rank, is_there in enumerate(there) if is_there]
        missing = [rank for rank, is_there in enumerate(there) if not is_there]
        if not missing or self._rank != min(waiting, default=-1):
            return None
        return (
            f"rank(s) {waiting} have waited {now - self._stalled_since:.0f} s for rank(s) {missing}, which are alive "
            f"and have not come to {self._log.last()[-1]}"
        )

    def last_operations(self) -> dict[int, list[str]]:
        """Return the last operations of the ranks that have published theirs: of this one, and of those that wait."""
        self.publish()
        known = [rank for rank, key in enumerate(self._lists) if self._store().check([key])][:_RANKS_SHOWN]
        lists = self._store().multi_get([self._lists[rank] for rank in known])
        return {
            rank: [line for _, line in sorted((int(at), line) for at, line in json.loads(one).items())][-_SHOWN:]
            for rank, one in zip(known, lists, strict=True)
        }

    def publish(self) -> None:
        """Let the other ranks know the operations that this one has started."""
        self._publish(self._log.digests())

    def _publish(self, digests: Mapping[int, str]) -> None:
        place = max(digests.items(), default=(-1, ""))
        if self._published != place:
            self._published = place
            # The list comes first: who sees the place may ask for it.
            self._store().set(self._lists[self._rank], json.dumps(self._log.by_position()))
            self._store().set(self._places[self._rank], json.dumps(place))

    def _compare(self, ranks: Sequence[int], lists: Sequence[str]) -> ZeroError | None:
        ranks = sorted(ranks[:_RANKS_SHOWN])
        published = map(json.loads, self._store().multi_get([lists[rank] for rank in ranks]))
        return difference_of(
            {rank: {int(at): line for at, line in one.items()} for rank, one in zip(ranks, published, strict=True)}
        )


def difference_of(by_rank: Mapping[int, Mapping[int, str]]) -> ZeroError | None:
    """Return an error that says where the ranks' lists of operations part; None if they agree as far as they reach.

    StateError if they part at a call that some ranks did not make and exchange the same, else DivergenceError.

    Args:
        by_rank: Rank -> position -> operation, of the last operations.
    """
    first = _first_difference(by_rank)
    if first is None:
        return None
    only_calls = _only_calls_differ(by_rank, first)
    lines = ["ranks started different collective operations, so that each would get the other's tensors:"]
    if only_calls:
        lines = ["a call that all ranks must make was made on some of them only:"]
    for rank, operations in by_rank.items():
        shown = [operations[at] for at in sorted(operations) if at >= first][:_SHOWN]
        lines.append(f"  rank {rank}: {', then '.join(shown) or 'none of these yet'}")
    if all(of_rank.get(first, "").startswith(_UNIT_OPERATIONS) for of_rank in by_rank.values() if first in of_rank):
        one = next(iter(by_rank.values()))
        before = sorted(at for at in one if at < first)
        if before:
            lines.append(f"All of them had come to: {one[before[-1]]}.")
        lines.append(
            "Under ZeRO stage 3 ranks may use different layers inside the forward of the model, and in its backward. "
            "Where a layer is called without the model, a parameter is read, or text is generated, all ranks must use "
            "the same layers in the same order. At stages 0-2 parameters are unsharded, and ranks may differ."
        )
    else:
        lines.append("Call the same functions of the engine on every rank, in the same order, and step equally often.")
    return (StateError if only_calls else DivergenceError)("\n".join(lines))


def _only_calls_differ(by_rank: Mapping[int, Mapping[int, str]], first: int) -> bool:
    lists = [[line for at, line in sorted(of_rank.items()) if at >= first] for of_rank in by_rank.values()]
    exchanges = [[line for line in lines if not line.startswith(_CALLS)] for lines in lists]
    has_call = any(lines[0].startswith(_CALLS) for lines in lists if lines)
    return has_call and all(len(set(alike)) == 1 for alike in zip(*exchanges, strict=False))


def _first_difference(by_rank: Mapping[int, Mapping[int, str]]) -> int | None:
    known: dict[int, str] = {}
    different = set()
    for operations in by_rank.values():
        for at, operation in operations.items():
            if known.setdefault(at, operation) != operation:
                different.add(at)
    return min(different, default=None)
