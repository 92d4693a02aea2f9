"""The interface of a place where shards live. A new medium is a new class with these methods."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

import torch

from hf_zero.storage.kept_content import KeptContent


@dataclasses.dataclass
class StoreStats:
    """Counters of a store. A read or write is one key; the waits are those of the threads that use the store."""

    reads: int = 0
    writes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    memory_wait_s: float = 0.0  # for staging memory; waits for writes that have it count here too
    memory_allocations: int = 0  # of staging memory, by all stores that share it


class BorrowedTensors:
    """Tensors of a store that may be used until `release` (or the end of the `with` block).

    Invariant: the tensors of a borrow stay valid and at their place until it is released. What is kept of them after
    that may be the content of another key, so a copy to or from a device has to be over. Releasing twice does nothing.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], finish: Callable[[bool], None] | None = None) -> None:
        self.tensors = list(tensors)
        self._finish = finish  # called once at the end, with whether changes are to be kept

    def release(self) -> None:
        self._end(keep=True)

    def _end(self, keep: bool) -> None:
        self.tensors = []
        finish, self._finish = self._finish, None
        if finish is not None:
            finish(keep)

    def __enter__(self) -> BorrowedTensors:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end(keep=kind is None)


class ShardStore(abc.ABC):
    """Keeps 1-D tensors under string keys on one medium.

    Order of calls: `create` once per key, then any number of (`prefetch`, `borrow`, release), `drop` of single keys,
    `close` at the end. Several threads may use one store, but one of them at a time borrows a key. An I/O error
    surfaces at the next `borrow` of the key, and the key stays unusable.
    """

    is_on_device = False  # whether the content is in the memory of the device that computes

    @abc.abstractmethod
    def create(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Make room for `numel` zeros under `key`."""

    @abc.abstractmethod
    def prefetch(self, keys: Sequence[str]) -> None:
        """Start bringing `keys` to where `borrow` hands them out. A hint: it never waits, and may do nothing."""

    @abc.abstractmethod
    def borrow(self, keys: Sequence[str], *, write: bool = False, overwrite: bool = False) -> BorrowedTensors:
        """The tensors of `keys` in memory: of the compute device in DeviceStore, of the host in the others.

        Args:
            write: They will be changed; the changes are kept at release.
            overwrite: With `write`: every element will be set, so the content need not be read and is undefined.
        """

    @abc.abstractmethod
    def drop(self, key: str) -> None:
        """Free the memory of `key`."""

    @abc.abstractmethod
    def usage(self) -> dict[str, int]:
        """Bytes under each key."""

    def stats(self) -> StoreStats:
        """Zeros where a borrow is the content itself."""
        return StoreStats()

    def can_adopt(self, other: ShardStore) -> bool:
        """Whether tensors of `other` are what this store would have allocated."""
        return False

    def close(self) -> None:
        """Give back files and threads; nothing of the store can be used any more. A second call does nothing."""
        return None


class StagingStore(ShardStore):
    """A store that keeps several contents of a key: the next one until it is taken, and earlier ones for readers."""

    @abc.abstractmethod
    def stage(self, keys: Sequence[str], *, overwrite: bool = False) -> BorrowedTensors:
        """The tensors of `keys`, to be changed; reads see the old content until `commit` or `rollback`.

        Args:
            overwrite: Every element will be set, so the content need not be read, and another borrow may read it
                meanwhile.
        """

    @abc.abstractmethod
    def commit(self, keys: Sequence[str]) -> None:
        """Make what was staged the content of `keys`."""

    @abc.abstractmethod
    def rollback(self, keys: Sequence[str]) -> None:
        """Forget what was staged for `keys`."""

    @abc.abstractmethod
    def keep(self, key: str) -> KeptContent:
        """The content of `key` as it is now, which another thread can read until it releases it.

        The key may be written and dropped meanwhile. No borrow of it to `write` may be under way, but staged ones.
        """
