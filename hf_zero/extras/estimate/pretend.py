"""Stand-ins under which an engine's own code runs for its sizes alone: a rank of no group, stores without memory.

Everything is on the meta device, so nothing is allocated, sent or written; what the code would keep can be counted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_zero.distributed.block_quantization import message_bytes
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.engine_group import EngineGroup
from hf_zero.distributed.operation_log import OperationLog
from hf_zero.distributed.rank_groups import RankGroups
from hf_zero.distributed.work import Finish, Pending
from hf_zero.extras.estimate.traffic import TrafficCounter
from hf_zero.native.host_memory import page_rounded
from hf_zero.sharding.placement import Placements
from hf_zero.storage import HostStore, StagingStore
from hf_zero.storage.base import BorrowedTensors
from hf_zero.storage.copy_stream import CopyStreams
from hf_zero.storage.kept_content import KeptContent

META = torch.device("meta")


class PretendedComm(Comm):
    """Rank `rank` of `world_size` ranks that are not there: collectives end at once, with the memory they take.

    Args:
        on_host: The ranks would compute on the CPU, over gloo; else on GPUs, over NCCL.
        per_host: The ranks of each host, which divide `world_size`; None: all ranks are on one.
    """

    def __init__(self, rank: int, world_size: int, *, on_host: bool, per_host: int | None = None) -> None:
        self.traffic = TrafficCounter(rank, world_size, per_host or world_size, direct=on_host)
        super().__init__(META)
        self.computes_on_host = on_host

    def _join(self, group: Any) -> None:
        self.rank, self.world_size, size = self.traffic.rank, self.traffic.world_size, self.traffic.per_host
        self.backend = "gloo" if self.traffic.direct else "nccl"
        self.coalesces = self.backend == "nccl"
        self._hosts = [f"host {rank // size}" for rank in range(self.world_size)]
        self._processes = _PretendedGroup(self.world_size) if self.world_size > 1 else None
        if self.backend == "gloo" and 1 < size < self.world_size:
            self.routes = RankGroups.of(self.rank, self.world_size, size)

    def all_gather(self, full: torch.Tensor, part: torch.Tensor, what: str, *, may_quantize: bool = False) -> Pending:
        """See Comm. Over gloo the parts travel straight to their places, which takes no memory."""
        if self.backend == "gloo" and self.world_size > 1 and self.routes is None:
            self._record("all_gather", what, full)
            return Ended(None)
        return super().all_gather(full, part, what, may_quantize=may_quantize)

    def _gather_in_steps(
        self,
        groups: RankGroups,
        full: torch.Tensor,
        row: torch.Tensor | None,
        part: torch.Tensor | None,
        what: str,
        *,
        quantized: bool,
    ) -> Pending:
        """See Comm. Over a device, memory for a row until the gather is over, where none is kept."""
        held = []
        if part is not None:
            held = self._send_across(groups, part.numel(), part.nbytes, quantized=quantized, alike=True)
        self.traffic.among(groups.inside, full.nbytes / groups.size)
        if row is None and self.backend != "gloo":
            held.append(full.new_empty(full.numel() // groups.size))
        return Ended(held.clear)

    def _reduce_in_steps(
        self, groups: RankGroups, out: torch.Tensor, wire: torch.Tensor, what: str, *, quantized: bool
    ) -> Pending:
        """See Comm. The memory of both steps is held until the sum would be there."""
        numel = wire.numel() // groups.size
        self.traffic.among(groups.inside, wire.nbytes / groups.size)
        share = wire.nbytes / groups.size / len(groups.across)
        held = self._send_across(groups, out.numel(), share, quantized=quantized, alike=False)
        if groups.replicates:
            self.traffic.among(groups.across, out.nbytes / len(groups.across))
        pieces = []
        if self.backend == "gloo":
            pieces = [self._acquire(wire.numel(), wire.dtype)[0], self._acquire(numel, out.dtype)[0]]
        elif not groups.replicates:
            held.append(wire.new_empty(numel))

        def finish() -> None:
            held.clear()
            self._release(*pieces)

        return Ended(finish)

    def _send_across(
        self, groups: RankGroups, numel: int, nbytes: float, *, quantized: bool, alike: bool
    ) -> list[torch.Tensor]:
        """Count what the groups send each other, and return the memory of 8-bit messages and of their answers.

        Args:
            numel, nbytes: The size of what goes to one group, without messages.
            alike: All groups get the same.
        """
        if not quantized:
            self.traffic.among(groups.across, nbytes)
            return []
        size = message_bytes(numel)
        number = self.traffic.among(groups.across, nbytes, message=size, values=4 * numel)
        return [torch.empty(rows * size, dtype=torch.uint8, device=META) for rows in (1 if alike else number, number)]

    def _reduce_inside(self, groups: RankGroups, row: torch.Tensor, wire: torch.Tensor, what: str) -> Pending:
        """See Comm."""
        self.traffic.among(groups.inside, wire.nbytes / groups.size)
        if self.backend == "gloo":
            return Ended(functools.partial(self._release, self._acquire(wire.numel(), wire.dtype)[0]))
        return Ended(None)

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        return [value] * self.world_size

    def largest(self, values: Sequence[float], what: str) -> list[float]:
        return list(values)

    def _begin(self, call: Callable[..., Any], what: str, finish: Finish = None) -> Pending:
        return Ended(finish)

    def _exchange(
        self,
        places: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        what: str,
        finish: Finish = None,
        tag: int | None = None,
    ) -> Pending:
        return Ended(finish)

    def _exchange_and_sum(self, out: torch.Tensor, sent: torch.Tensor, what: str) -> Pending:
        """Hold the memory for what other ranks send until the sum, which takes none, would be there."""
        memory = self._received.acquire(sent.nbytes)
        return Ended(functools.partial(self._received.release, memory))

    def _record(self, op: str, what: str, full: torch.Tensor, *, equal_sizes: bool = True) -> None:
        """Count what the operation would send; no rank compares what was started."""
        if self.world_size == 1:
            return
        if not (self.coalesces and self._block is not None and self._block.joins(op, full)):
            self.traffic.operation()
        if self.routes is None or op not in ("all_gather", "reduce_scatter"):  # else the steps are counted
            self.traffic.among_all(op, full.nbytes)


class _PretendedGroup(EngineGroup):
    """Ranks that are not there."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.groups, self.number = [range(world_size)], 0
        self.name = ""
        self.log = OperationLog()
        self._disconnected = threading.Event()

    def split(self, sizes: Sequence[int]) -> None:
        """See EngineGroup."""


class Ended:
    """An operation that is over; `finish` runs at the first wait."""

    def __init__(self, finish: Finish) -> None:
        self._finish = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class PretendedHost(HostStore):
    """Whole pages of nothing."""

    def _allocate(self, key: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        rounded = page_rounded(numel * dtype.itemsize) // dtype.itemsize
        self._blocks[key] = block = torch.empty(rounded, dtype=dtype, device=META)
        return block if rounded == numel else block[:numel]


class PretendedDisk(StagingStore):
    """Knows the sizes of its keys.

    Args:
        pool_bytes: Of the staging memory through which they would be read and written.
        pinned: All of the staging memory is taken at once.
    """

    def __init__(self, pool_bytes: int, *, pinned: bool) -> None:
        self._pool_bytes = pool_bytes
        self._pinned = pinned
        self._sizes: dict[str, tuple[int, torch.dtype]] = {}

    @property
    def staging_bytes(self) -> int:
        """The bytes that the pool would hold: at most its budget and, unless it is pinned, what there is to stage."""
        if self._pinned:
            return page_rounded(self._pool_bytes)
        return min(self._pool_bytes, sum(map(page_rounded, self.usage().values())))

    def create(self, key: str, numel: int, dtype: torch.dtype) -> None:
        if key in self._sizes:
            raise AssertionError(f"{key} exists already")
        self._sizes[key] = (numel, dtype)

    def prefetch(self, keys: Sequence[str]) -> None:
        return None

    def borrow(self, keys: Sequence[str], *, write: bool = False, overwrite: bool = False) -> BorrowedTensors:
        sizes = [self._sizes[key] for key in keys]
        return BorrowedTensors([torch.empty(numel, dtype=dtype, device=META) for numel, dtype in sizes])

    def stage(self, keys: Sequence[str], *, overwrite: bool = False) -> BorrowedTensors:
        return self.borrow(keys)

    def commit(self, keys: Sequence[str]) -> None:
        return None

    def rollback(self, keys: Sequence[str]) -> None:
        return None

    def keep(self, key: str) -> KeptContent:
        raise AssertionError("a plan saves no checkpoint")

    def drop(self, key: str) -> None:
        del self._sizes[key]

    def usage(self) -> dict[str, int]:
        return {key: numel * dtype.itemsize for key, (numel, dtype) in self._sizes.items()}


class PretendedPlacements(Placements):
    """Placements whose stores have sizes only: no memory, no folder, no file."""

    def _make_copies(self) -> CopyStreams:
        return CopyStreams(torch.device("cpu"))  # without a stream

    def _make_host(self, *, pin: bool) -> HostStore:
        return PretendedHost(META, pin=False)

    def _make_disk(self, path: str | None, name: str, pool_bytes: int, *, pin: bool, **options: bool) -> StagingStore:
        return PretendedDisk(pool_bytes, pinned=pin and not self._comm.computes_on_host)

    @property
    def staging_bytes(self) -> int:
        """Host memory of the pools between disk and its users."""
        return sum(disk.staging_bytes for disk in self.disks.values() if isinstance(disk, PretendedDisk))
