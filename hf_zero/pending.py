"""Collectives under way, and what is kept of those that were: counts, and the record of the last ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hf_zero.errors import ZeroError

# What to raise when the operation that is named broke off with the error given
Failure = Callable[[str, BaseException], ZeroError]


class Pending(Protocol):
    """A collective under way; `wait` returns when its result may be used on the current stream."""

    def wait(self) -> None: ...


@dataclass
class CommCount:
    calls: int = 0
    numel: int = 0  # elements of the full (unsharded) side
    nbytes: int = 0


@dataclass(frozen=True)
class Operation:
    """One line of the record of last operations."""

    op: str
    what: str
    numel: int
    dtype: str
    at: float

    def __str__(self) -> str:
        return f"{self.op} {self.what} ({self.numel} x {self.dtype})"


class Done:
    def wait(self) -> None:
        return None


class Work:
    """torch's Works, what they are for, and what is left to do once they are over. `wait` may be called again."""

    def __init__(
        self, works: list[Any], what: str, fails: Failure, finish: Callable[[], object] | None = None
    ) -> None:
        self._works = works
        self._what = what
        self._fails = fails
        self._finish = finish

    def wait(self) -> None:
        if not self._works:
            return
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._fails(self._what, error) from error
        self._works = []
        if self._finish is not None:
            self._finish()
            self._finish = None


def wait_all(pending: Sequence[Pending]) -> None:
    for item in pending:
        item.wait()
