"""Collectives under way, and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# What is left to do once they are over
Finish = Callable[[], object] | None


class Pending(Protocol):
    """A collective under way; `wait` returns when its result may be used on the current stream."""

    def wait(self) -> None: ...


@dataclass
class CommCount:
    calls: int = 0
    numel: int = 0  # elements of the full (unsharded) side
    nbytes: int = 0


class Done:
    def wait(self) -> None:
        return None


class Rider(Protocol):
    """What has something to agree on now and then, and no collective of its own."""

    def note(self) -> float:
        """This rank's number, for the vote that begins."""

    def hear(self, notes: list[float]) -> None:
        """Those of all ranks, in rank order."""
