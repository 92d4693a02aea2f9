"""What a DiskStore knows of a key, and of a transfer under way."""

from __future__ import annotations

import dataclasses

import torch

from hf_zero.errors import OffloadError
from hf_zero.storage.staging_pool import StagingBlock
from hf_zero.storage.swap_folder import Region, Transfer


@dataclasses.dataclass(eq=False)
class Entry:
    """One key."""

    key: str
    numel: int
    dtype: torch.dtype
    region: Region
    blank: bool = True  # never written: zeros, whatever the region holds
    borrowed: bool = False
    aside: bool = False  # a borrow writes the staged content without looking at this one
    flight: Flight | None = None  # of the content: read ahead, or being written
    staged: Region | None = None
    staged_flight: Flight | None = None
    failure: str | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def check(self) -> None:
        if self.failure is not None:
            raise OffloadError(self.failure)

    def tensor(self, block: StagingBlock | None) -> torch.Tensor:
        if block is None:
            return torch.empty(0, dtype=self.dtype)
        return block.memory[: self.nbytes].view(self.dtype)


@dataclasses.dataclass(eq=False)
class Flight:
    """A transfer of a key, and the memory it uses."""

    entry: Entry
    block: StagingBlock
    transfer: Transfer
    is_write: bool

    @property
    def borrowed(self) -> bool:
        """A borrow has taken the block over, so it is not to be given back."""
        return self.entry.borrowed and self.entry.flight is self

    def leave(self) -> None:
        """The entry must not find it any more; it may have another one by now."""
        if self.entry.flight is self:
            self.entry.flight = None
        if self.entry.staged_flight is self:
            self.entry.staged_flight = None
