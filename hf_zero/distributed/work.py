"""Collectives under way, the counts of them, and what travels with their votes."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

# The function that is called once a collective is over
Finish = Callable[[], object] | None


class Pending(Protocol):
    """A collective under way; `wait` returns when its result may be used on the current stream."""

    def wait(self) -> None: ...


@dataclass
class CommCount:
    calls: int = 0
    numel: int = 0  # elements of the full (unsharded) side
    nbytes: int = 0


class SharedCall(enum.IntEnum):
    """The calls of an engine that all ranks make in a training loop, and that exchange something."""

    FORWARD = 0  # of the model, with gradients
    EVALUATION = 1  # a forward without
    BACKWARD = 2  # its value: whether it is the last before an update
    STEP = 3  # of the engine
    UPDATE = 4  # a step of the optimizer
    CLIP = 5  # its value: the norm
    DROP = 6  # of the gradients


class JoinBlock(Protocol):
    """A block inside which ranks that have no data left follow the others: engine/joining.py."""

    def tell(self, call: SharedCall, value: float) -> contextlib.AbstractContextManager[None]:
        """Return a block around a call that the ranks with data make."""

    def end(self) -> None:
        """Let nobody be told any more."""


class Done:
    def wait(self) -> None:
        return None


class Observer(Protocol):
    """Something that `Comm.observers` tells of every operation that starts, on the thread that starts it."""

    def mark(self) -> Any:
        """Return the point in time at which an operation is about to start."""

    def started(self, op: str, what: str, nbytes: int, begun: Any, pending: Pending) -> None:
        """Take note of the operation `op` of Comm on `nbytes`, the whole tensor's; `begun` is what `mark` returned."""


class VoteItem(Protocol):
    """A number of each rank that travels with every vote, for one who has no collective of his own."""

    def own_value(self) -> float:
        """Return this rank's number for the vote that begins."""

    def on_vote(self, total: float) -> None:
        """Receive the sum of the numbers of all ranks."""
