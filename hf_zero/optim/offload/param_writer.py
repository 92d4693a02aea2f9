"""The writers by which an update on the host puts down new parameters, for gathers to see at the right time.

An update is made of `open` and `close` on the thread that updates, then `publish` or `discard` on the thread that
trains. Between them nobody sees the new values, unless the writer is direct.
"""

from __future__ import annotations

import abc

import torch

from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.shard import MemoryShard, Shard, ShardTensor, StagedShard
from hf_zero.storage import HostStore
from hf_zero.storage.base import BorrowedTensors


class ParamWriter(abc.ABC):
    """Takes the updated parameters of one flat parameter."""

    in_full = False  # whether what `open` gives is indexed by places in the flat parameter, not in the shard

    @abc.abstractmethod
    def open(self) -> torch.Tensor:
        """Host memory, 1-D, for the new values of all parameters."""

    def close(self) -> None:
        """Everything has been written."""
        return None

    def publish(self) -> None:
        """Let gathers see the new values from here on."""
        return None

    def discard(self) -> None:
        """The new values are not wanted."""
        return None

    def close_for_good(self) -> None:
        """There will be no other update."""
        return None


class ShardWriter(ParamWriter):
    """The update writes into the shard itself: host memory that nobody reads meanwhile, which a store may lend."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._borrowed: BorrowedTensors | None = None
        self.in_full = shard.in_full

    def open(self) -> torch.Tensor:
        self._borrowed = self._borrow()
        return self._borrowed.tensors[0]

    def _borrow(self) -> BorrowedTensors:
        return self._shard.borrow_to_write()

    def close(self) -> None:
        if self._borrowed is not None:
            self._borrowed.release()
            self._borrowed = None


class StagedShardWriter(ShardWriter):
    """The store of the shard keeps the new values aside until `publish` or `discard`."""

    _shard: StagedShard

    def _borrow(self) -> BorrowedTensors:
        return self._shard.stage()

    def publish(self) -> None:
        self._shard.commit()

    def discard(self) -> None:
        self._shard.rollback()


class StagedWriter(ParamWriter):
    """The update writes into host memory of its own, from which the shard is set at `publish`.

    For a shard on another device, and for an update that runs while the old parameters are in use.
    """

    def __init__(self, shard: ShardTensor, host: HostStore) -> None:
        self._shard = shard
        self._staged = MemoryShard(shard.layout, shard.rank, host, "staged", shard.dtype)

    def open(self) -> torch.Tensor:
        self._staged.wait_for_readers()  # the last publication
        return self._staged.memory

    def publish(self) -> None:
        self._shard.wait_for_readers()
        self._staged.copy_parts_to(self._shard.parts)

    def close_for_good(self) -> None:
        self._staged.drop()


def must_stage(flat: FlatParam) -> bool:
    """Whether the host cannot write into the shard of `flat` directly."""
    return flat.shard.in_memory is not None and not flat.shard_is_on_host


def make_writer(flat: FlatParam, host: HostStore, *, staged: bool) -> ParamWriter:
    """The writer for the parameters of `flat`.

    Args:
        staged: The update may run while its old parameters are in use, or be undone.
    """
    if not staged:
        return ShardWriter(flat.shard)
    if (shard := flat.shard.in_memory) is not None:
        return StagedWriter(shard, host)
    return StagedShardWriter(flat.shard)
