"""The interface of a place where shards live. A new medium is a new class with these methods."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType

import torch


class Lease:
    """Tensors of a store that may be used until `release` (or the end of the `with` block).

    Invariant: the tensors of a lease stay valid and at their place until it is released.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def release(self) -> None:
        self.tensors = []

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class ShardStore(abc.ABC):
    """Keeps 1-D tensors under string keys on one medium.

    Order of calls: `create` once per key, then any number of (`prefetch`, `lease`, release), `flush` before the
    contents are read by somebody else (a checkpoint), `drop` at the end. One writer per key at a time. An I/O error
    surfaces at the next `lease` or `flush` of the key, and the key stays unusable.
    """

    @abc.abstractmethod
    def create(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Make room for `numel` zeros under `key`."""

    @abc.abstractmethod
    def prefetch(self, keys: Sequence[str]) -> None:
        """Start bringing `keys` to the device; `lease` will find them there."""

    @abc.abstractmethod
    def lease(self, keys: Sequence[str], *, write: bool = False) -> Lease:
        """The tensors of `keys` on the compute device; `write` says that they will be changed."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Return when every released write has reached the medium."""

    @abc.abstractmethod
    def drop(self, key: str) -> None:
        """Free the memory of `key`."""

    @abc.abstractmethod
    def usage(self) -> dict[str, int]:
        """Bytes under each key."""
