"""Collectives under way, and what is kept of those that were: counts, and the record of the last ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hf_zero.errors import ZeroError

# What is left to do once they are
Finish = Callable[[], object] | None
# What to raise when the operation that is named broke off with the error given
Failure = Callable[[str, BaseException], ZeroError]
_T = TypeVar("_T")


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
    numel: int | None = None  # of the full side; None where ranks may give different numbers
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.what} ({self.numel} x {self.dtype})" if self.numel is not None else self.identity

    @property
    def identity(self) -> str:
        """What is the same on all ranks."""
        return f"{self.op} {self.what}" + ("" if self.numel is None else f" {self.numel} {self.dtype}")


class Done:
    def wait(self) -> None:
        return None


class Begun(Generic[_T]):
    """An operation that a link has begun, and what is left to do once it is over. `wait` may be called again."""

    def __init__(self, under_way: _T, what: str, wait: Callable[[_T], None], fails: Failure, finish: Finish) -> None:
        self._under_way: _T | None = under_way
        self._what = what
        self._wait = wait
        self._fails = fails
        self._finish = finish

    def wait(self) -> None:
        if self._under_way is None:
            return
        try:
            self._wait(self._under_way)
        except RuntimeError as error:
            raise self._fails(self._what, error) from error
        self._under_way = None
        if self._finish is not None:
            self._finish()
            self._finish = None


def wait_all(pending: Sequence[Pending]) -> None:
    for item in pending:
        item.wait()
