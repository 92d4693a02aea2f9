"""The collectives of an engine: how each is started, per backend, and how it is waited for.

All calls come from one thread, in the same order on every rank; where that does not hold, all ranks raise
DivergenceError: see [Note: Matching] in operation_log.py.

[Note: Messages instead of gloo's collectives]
Between CPU ranks an all-gather, a reduce-scatter and an all-to-all are messages between pairs of ranks. gloo's own
all-gather fills a buffer of its own and copies, half as fast; its reduce-scatter takes two to four times as long and
rounds in the type that travels at every hop.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pickle
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

from hf_zero.distributed.backend_calls import COALESCED, combine, exchange, gather_rows
from hf_zero.distributed.block_quantization import message_bytes, sum_messages
from hf_zero.distributed.coalesced import Coalesced
from hf_zero.distributed.engine_group import EngineGroup
from hf_zero.distributed.group_work import CLOSED, DeviceWork, HostWork
from hf_zero.distributed.messages import Messages
from hf_zero.distributed.operation_log import CALL
from hf_zero.distributed.peer_memory import Gather, PeerMemory, find_peers
from hf_zero.distributed.process_end import leave_cleanly_at_exit
from hf_zero.distributed.processes import (
    agreed,
    all_ranks_give,
    attempt,
    backend_for,
    default_device,
    ensure_process_group,
    refuse_shared_device,
)
from hf_zero.distributed.rank_groups import KEY, RankGroups, group_size, host_name, ranks_per_host
from hf_zero.distributed.store_protocol import LostRankError, MessageBox, Presence
from hf_zero.distributed.torch_names import all_gather_single, reduce_scatter_single
from hf_zero.distributed.two_steps import DeviceSteps, MessageSteps
from hf_zero.distributed.work import CommCount, Done, Finish, JoinBlock, Observer, Pending, SharedCall, VoteItem
from hf_zero.errors import ConfigError, OffloadError, StateError, ZeroError
from hf_zero.native.block_pool import BlockPool

# Elements per collective on gloo: larger single calls fall out of the cache.
_GLOO_BUCKET_NUMEL = 1 << 20
# The first message of an object: its length, and as many bytes of it as fit.
_LENGTH_BYTES = 8
_FIRST_BYTES = 504
_FEW_RANKS = 8  # so many send small messages to each other at once; more pass them on, in fewer messages
_OBJECTS_TAG = 0  # of all objects: ranks that gather different ones meet, and their digests differ
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever device is the default at the import
_T = TypeVar("_T")
Quantized = Literal["weights", "gradients"]


class Comm:
    """Collectives of one engine over one process group.

    Args:
        groups: The world's ranks, split into those that share a model; this rank's group is the one that it is in.
            None means that all share it. A group of torch's is made for each, so that the engine's collectives never
            mix with those of a data loader or of accelerate.
        timeout_s: Seconds after which a collective that has not completed raises DivergenceError.
    All ranks of the world must construct it, with the same groups.
    """

    def __init__(
        self, device: torch.device, *, groups: Sequence[Sequence[int]] | None = None, timeout_s: float = 600.0
    ) -> None:
        self.device = device
        self.computes_on_host = device.type == "cpu"  # the host's memory is the device's
        self.timeout_s = timeout_s
        # Operations as the backend sees them: coalesced collectives are one.
        self.counts: dict[str, CommCount] = collections.defaultdict(CommCount)
        self.coalesces = False  # several tensors can travel in one operation
        self.groups: RankGroups | None = None  # shards are in groups of ranks: see shard_in_groups
        self.routes: RankGroups | None = None  # gathers and reduce-scatters take two steps: [Note: Two steps]
        self.quantizes = frozenset[Quantized]()  # see quantize
        self._hosts: list[str] = []  # of the run's ranks
        self._per_host = 1  # the ranks of this one's group on each host; 1 where these are not the same number
        self.observers: list[Observer] = []
        self.join_block: JoinBlock | None = None  # while ranks without data follow the others
        self._starting: Callable[[Pending], None] | None = None  # tells the observers of the operation that starts
        self._presence = Presence()
        self._received = BlockPool(device)  # what gloo receives in a reduce
        self._block: Coalesced | None = None  # what `coalesced` has collected
        self._beside: torch.Stream | None = None  # between the steps of a collective in two
        self._vote_items: list[VoteItem] = []
        self._num_message_boxes = 0
        self._processes: EngineGroup | None = None  # None where this rank is the only one
        self._join(groups)

    def _join(self, groups: Sequence[Sequence[int]] | None) -> None:
        self.rank, self.world_size, self.backend = 0, 1, "none"
        self.run_rank = 0  # among all processes of the run: what messages name
        if not dist.is_initialized():
            return
        self.run_rank = dist.get_rank()
        groups = [range(dist.get_world_size())] if groups is None else groups
        if all(len(ranks) == 1 for ranks in groups):
            return
        given = all_ranks_give((host_name(), socket.gethostname()), "making an engine", self.timeout_s)
        self._hosts = [host for host, _ in given]
        names = [name for _, name in given] if len(set(self._hosts)) > 1 else []
        self.backend = backend_for(self.device)
        self._processes = EngineGroup(groups, self.backend, self.timeout_s, names)
        self.rank, self.world_size = self._processes.rank, self._processes.world_size
        assert self._processes.link is not None
        self.coalesces = self._processes.link.coalesces(self.device)
        self._find_connections(self._processes)
        self._per_host = ranks_per_host([self._hosts[rank] for rank in groups[self._processes.number]]) or 1
        if self.backend == "gloo" and 1 < self._per_host < self.world_size:
            self.routes = RankGroups.of(self.rank, self.world_size, self._per_host)
        leave_cleanly_at_exit()

    def _find_connections(self, group: EngineGroup) -> None:
        assert group.control is not None
        group.control.find_connections(lambda mine: self.all_gather_object(mine, "connections"))

    @property
    def name(self) -> str:
        """The name of the process group, equal on all ranks. Sorting by (length, name) gives the order of creation."""
        return self._processes.name if self._processes is not None else ""

    @classmethod
    def join(
        cls,
        device: torch.device | None = None,
        *,
        groups: Sequence[Sequence[int]] | None = None,
        timeout_s: float = 600.0,
    ) -> Comm:
        """Join the other processes. All ranks must call.

        Args:
            device: None takes the accelerator of this process, or the CPU.
        """
        device = device or default_device()
        device = torch.device("cpu") if device.type == "cpu" else device  # without the index that "cpu:0" has
        ensure_process_group(device)
        refuse_shared_device(device)
        return cls(device, groups=groups, timeout_s=timeout_s)

    # ---------------------------------------------------------------- what the runtime needs
    @property
    def max_bucket_numel(self) -> int | None:
        """The number of elements of a collective beyond which this backend gets slower; None if it does not."""
        return _GLOO_BUCKET_NUMEL if self.backend == "gloo" else None

    @property
    def num_shards(self) -> int:
        """The number of ranks that have the shards of a flat parameter between them: all, or those of a group."""
        return self.world_size if self.groups is None or not self.groups.replicates else self.groups.size

    @property
    def holders(self) -> Sequence[int]:
        """The ranks that have this rank's shards of a flat parameter and the others between them, in order."""
        first = self.rank - self.rank % self.num_shards
        return range(first, first + self.num_shards)

    def shard_in_groups(self, wanted: str | int, *, replicates: bool = False) -> None:
        """Let gathers and reduce-scatters from now on take two steps: inside of groups of ranks, and across them.

        Over gloo they do so between hosts in any case, and here `groups` says besides that shards are kept in groups.
        All ranks of the world must call.

        Args:
            wanted: "all": one group; "host": the ranks of each host; a number: so many consecutive ranks.
            replicates: Each group has all shards, and not all ranks together.
        Raises:
            ConfigError: On all ranks, if the ranks do not form such groups.
        """
        group = self._processes
        if group is None:
            return
        self.groups = None
        if wanted == "all":
            return
        sizes = [group_size(wanted, [self._hosts[rank] for rank in ranks]) for ranks in group.groups]
        if not self.computes_on_host:
            if not self.coalesces:
                raise ConfigError(f'{KEY} = {wanted}: {self.backend} cannot do that.\nWrite "all".')
            group.split(sizes)
        if (size := sizes[group.number]) < self.world_size:
            self.routes = RankGroups.of(self.rank, self.world_size, size)
            self.groups = dataclasses.replace(self.routes, replicates=replicates)

    def quantize(self, kinds: Collection[Quantized]) -> bool:
        """Let messages of these kinds be 8-bit blocks from now on where they leave a group, or else a host; over gloo
        between hosts alone, where hosts have several groups.

        Returns whether any leaves one; if none does nothing changes. After `shard_in_groups`. All ranks of the world
        must call.
        """
        group = self._processes
        if group is not None and kinds and self.routes is None and (self.computes_on_host or self.coalesces):
            sizes = [ranks_per_host([self._hosts[rank] for rank in ranks]) for ranks in group.groups]
            known = [size for size in sizes if size is not None]
            if len(known) == len(sizes) and known[group.number] < self.world_size:
                if not self.computes_on_host:
                    group.split(known)
                self.routes = RankGroups.of(self.rank, self.world_size, known[group.number])
        self.quantizes = frozenset(kinds) if self.routes is not None else frozenset()
        return bool(self.quantizes)

    def all_gather(self, full: torch.Tensor, part: torch.Tensor, what: str, *, may_quantize: bool = False) -> Pending:
        """Start filling `full` (1-D) with the `part` of every rank, in rank order. `part` may lie inside `full`.

        Where `full` has fewer parts than there are ranks, they are those of this rank's group.
        `may_quantize`: It is about weights, and `quantize` is obeyed.
        """
        quantized = may_quantize and "weights" in self.quantizes
        self._record("all_gather", f"{what} in 8 bits" if quantized else what, full)
        if self._processes is None:
            if full.data_ptr() != part.data_ptr():
                full.copy_(part)
            return Done()
        if (groups := self._replicating(full, part)) is not None:
            return self._gather_in_steps(groups, full, part, None, what, quantized=False)
        if self.routes is not None:
            return self._gather_in_steps(self.routes, full, None, part, what, quantized=quantized)
        if self._block is not None:
            return self._block.add("all_gather", full, part)
        title = f"all-gather of {what}"
        with _profiled(f"hf_zero::gather ({what})"):
            if self.backend == "gloo":
                return self._exchange(full.chunk(self.world_size), [part] * self.world_size, title)
            return self._begin(functools.partial(all_gather_single, full, part), title)

    def all_gather_in_group(
        self,
        full: torch.Tensor,
        row: torch.Tensor,
        part: torch.Tensor | None,
        what: str,
        *,
        may_quantize: bool = False,
    ) -> Pending:
        """Start filling `full` (1-D) from the `row` of every rank of this one's group, as `all_gather` fills it.

        `part`: This rank's part; `row` is filled from those across the groups before. None: it has been before. There
        must be `groups`. `may_quantize`: as for `all_gather`.
        """
        quantized = may_quantize and part is not None and "weights" in self.quantizes
        crossing = f"{what} of all groups in 8 bits" if quantized else f"{what} of all groups"
        self._record("all_gather", what if part is None else crossing, full)
        assert self.groups is not None
        return self._gather_in_steps(self.groups, full, row, part, what, quantized=quantized)

    def coalesced(self, what: str, *, in_background: bool = False) -> contextlib.AbstractContextManager[None]:
        """Make one operation of the all-gathers that are started inside the block, and of the reduce-scatters, and of
        the all-reduces of a type, where this backend can (`coalesces`).

        They start at the end of the outermost block, or when one of them is waited for, and wait for what is on the
        stream that is current then: until then nothing that they read may change. Between CPU ranks of one host
        all-gathers are over at the end of the block, and no other collective may run inside: ranks read each other's
        parts from memory, in half the time that messages take. `in_background`: there they are messages, that run on.
        All ranks must enter.
        """
        may_collect = self.coalesces or (not in_background and self.routes is None and self._peers is not None)
        if self._block is not None or not may_collect:
            return contextlib.nullcontext()
        return self._collecting(what)

    @contextlib.contextmanager
    def _collecting(self, what: str) -> Iterator[None]:
        self._block = block = Coalesced(functools.partial(self._begin_coalesced, what))
        try:
            yield
            block.start()
        finally:
            self._block = self._starting = None
            block.drop()

    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        what: str,
        *,
        wire_dtype: torch.dtype | None = None,
        may_quantize: bool = False,
    ) -> Pending:
        """Start summing `full` (1-D) over ranks, rank r keeping the r-th part in `out`, which may lie inside `full`.

        Where `full` has fewer parts than there are ranks, the ranks at the same place in their groups keep the same.
        `wire_dtype` is the type that travels; the sum is taken in `out`'s type on gloo, in the wire type on NCCL.
        `full` must not change before `wait` returns. `may_quantize`: It is about gradients, and `quantize` is obeyed.
        """
        quantized = may_quantize and "gradients" in self.quantizes
        wire = full if self._processes is None or wire_dtype is None else full.to(wire_dtype)
        self._record("reduce_scatter", f"{what} in 8 bits" if quantized else what, wire)
        if self._processes is None:
            if full.data_ptr() != out.data_ptr():
                out.copy_(full)
            return Done()
        if (groups := self._replicating(full, out) or self.routes) is not None:
            return self._reduce_in_steps(groups, out, wire, what, quantized=quantized)
        title = f"reduce-scatter of {what}"
        with _profiled(f"hf_zero::reduce ({what})"):
            if self.backend == "gloo":
                return self._exchange_and_sum(out, wire, title)
            result = out if wire.dtype == out.dtype else torch.empty_like(out, dtype=wire.dtype)
            finish = None if result is out else functools.partial(out.copy_, result)
            if self._block is not None:
                return self._block.add("reduce_scatter", result, wire, finish)
            return self._begin(functools.partial(reduce_scatter_single, result, wire), title, finish)

    def reduce_scatter_in_group(
        self, row: torch.Tensor, full: torch.Tensor, what: str, *, wire_dtype: torch.dtype | None = None
    ) -> Pending:
        """Start summing `full` (1-D) over this rank's group: `row` becomes the sums for the ranks at this one's place.

        There must be `groups`. `wire_dtype`, and `full`, as for `reduce_scatter`.
        """
        wire = full if wire_dtype is None else full.to(wire_dtype)
        self._record("reduce_scatter", f"{what} in a group", wire)
        assert self.groups is not None
        with _profiled(f"hf_zero::reduce ({what})"):
            return self._reduce_inside(self.groups, row, wire, what)

    def all_reduce(self, full: torch.Tensor, what: str, *, wire_dtype: torch.dtype | None = None) -> Pending:
        """Start summing `full` over ranks in place."""
        wire = full if self._processes is None or wire_dtype is None else full.to(wire_dtype)
        self._record("all_reduce", what, wire)
        if self._processes is None:
            return Done()
        with _profiled(f"hf_zero::all_reduce ({what})"):
            finish = None if wire is full else functools.partial(full.copy_, wire)
            if self._block is not None and self.coalesces:
                return self._block.add("all_reduce", wire, wire, finish)
            return self._begin(functools.partial(dist.all_reduce, wire), f"all-reduce of {what}", finish)

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, what: str, sizes: tuple[list[int], list[int]] | None = None
    ) -> Pending:
        """Start sending the r-th part of `full` (1-D) to rank r, and filling `out` with what the ranks send, in order.

        `sizes`: elements from each rank, and to each rank; None means equal parts.
        """
        self._record("all_to_all", what, full, equal_sizes=sizes is None)
        if self._processes is None:
            out.copy_(full)
            return Done()
        received, sent = sizes or (None, None)
        title = f"all-to-all of {what}"
        with _profiled(f"hf_zero::all_to_all ({what})"):
            if self.backend == "gloo":
                places = out.split(received) if received else out.chunk(self.world_size)
                parts = full.split(sent) if sent else full.chunk(self.world_size)
                return self._exchange(places, parts, title)
            return self._begin(functools.partial(dist.all_to_all_single, out, full, received, sent), title)

    def vote(self, values: torch.Tensor, what: str, *, largest: int = 0) -> torch.Tensor:
        """The sums over ranks of `values` (1-D float64, any device), of the last `largest` the maxima: on the host.

        They are the same on all ranks, to the bit. All ranks must call.
        """
        self._record("vote", what, values)
        items = torch.tensor([item.own_value() for item in self._vote_items], dtype=torch.float64, device="cpu")
        combined = torch.cat([items, values.cpu()])
        self._combine(combined, largest, f"vote on {what}")
        for item, total in zip(self._vote_items, combined.tolist(), strict=False):
            item.on_vote(total)
        return combined[len(items) :]

    def add_vote_item(self, item: VoteItem) -> None:
        """Let a number of this rank travel with every vote from now on. All ranks must call, in the same order."""
        self._vote_items.append(item)

    def remove_vote_item(self, item: VoteItem) -> None:
        """Undo `add_vote_item`. All ranks must call."""
        self._vote_items.remove(item)

    def message_box(self) -> MessageBox | None:
        """Return a box for a thread of each rank, beside the collectives; None where this rank is alone.

        All ranks must call.
        """
        group = self._processes
        if group is None:
            return None
        self._num_message_boxes += 1
        return MessageBox(f"{group.name}/messages/{self._num_message_boxes}", group.ended_ranks, lambda: group.stopped)

    def messages(self) -> Messages | None:
        """Return messages between ranks, beside the collectives; None if this rank is alone. All ranks must call."""
        if self._processes is None:
            return None
        link = self._processes.add_gloo_link()
        link.find_connections(lambda mine: self.all_gather_object(mine, "connections of messages"))
        return Messages(self._processes, link, self.device)

    def largest(self, values: Sequence[float], what: str) -> list[float]:
        """The largest of each of `values` over all ranks. All ranks must call."""
        if self._processes is not None:
            self._processes.add_to_log("agree", what)
        combined = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._combine(combined, len(values), what)
        found: list[float] = combined.tolist()
        return found

    def all_gather_numbers(self, values: Sequence[float], what: str) -> list[list[float]]:
        """`values` of every rank, in rank order. All ranks must call."""
        if self._processes is None:
            return [list(values)]
        self._processes.add_to_log("agree", what)
        everyone = torch.empty((self.world_size, len(values)), dtype=torch.float64, device="cpu")
        everyone[self.rank] = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._gather_rows(everyone, what)
        rows: list[list[float]] = everyone.tolist()
        return rows

    def shared_call(self, call: SharedCall, value: float = 0.0) -> contextlib.AbstractContextManager[None]:
        """Return a block around a call that all ranks must make; ranks that have no data left hear of it."""
        return contextlib.nullcontext() if self.join_block is None else self.join_block.tell(call, value)

    def note_call(self, what: str) -> None:
        """This rank makes a call that exchanges nothing. All ranks must call.

        Where one does not, the next exchange raises StateError on all of them: [Note: Matching] in operation_log.py.
        """
        if self._processes is not None and not self._processes.stopped:
            self._processes.add_to_log(CALL, what)

    def broadcast(self, tensor: torch.Tensor, what: str, *, src: int = 0) -> None:
        """Copy `tensor` of group rank `src` to all ranks, in place."""
        self.broadcast_start(tensor, what, src=src).wait()

    def broadcast_start(self, tensor: torch.Tensor, what: str, *, src: int) -> Pending:
        self._record("broadcast", what, tensor)
        if self._processes is None:
            return Done()
        return self._begin(functools.partial(dist.broadcast, tensor, group_src=src), f"broadcast of {what}")

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """`value` of every rank, in rank order. For small control data, which goes over gloo on every backend."""
        group = self._processes
        if group is None:
            return [value]
        group.add_to_log("objects", what)
        out = [pickle.loads(data) for data in self._all_gather_bytes(pickle.dumps((group.log.digest, value)), what)]
        group.expect_equal([digest for digest, _ in out], what)
        return [given for _, given in out]

    def gather_object(self, value: Any, what: str) -> list[Any]:
        """`value` of every rank, in rank order, on group rank 0; nothing on the others. All ranks must call."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(length) for (length,) in self.all_gather_numbers([len(mine)], f"sizes of {what}")]
        if self.rank != 0:
            lengths = [0] * self.world_size
        given = self.exchange_bytes([mine, *[_NO_BYTES] * (self.world_size - 1)], lengths, what)
        return [pickle.loads(data.numpy().tobytes()) for data in given] if self.rank == 0 else []

    def exchange_bytes(self, parts: Sequence[torch.Tensor], sizes: Sequence[int], what: str) -> list[torch.Tensor]:
        """Send `parts[r]` to rank r and return what every rank sends, `sizes[r]` bytes of rank r. All ranks must call.

        Bytes are 1-D uint8 on the host, and go over gloo on every backend. Nothing goes from a rank to itself.
        """
        group = self._processes
        if group is None:
            return list(parts)
        group.add_to_log("bytes", what)
        places = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        self._exchange(places, parts, what).wait()
        return places

    def barrier(self, what: str) -> None:
        self.all_gather_object(None, what)

    def agree(
        self,
        what: str,
        work: Callable[[], _T] | None,
        raise_as: type[ZeroError],
        *,
        catch: type[Exception] = Exception,
    ) -> list[_T]:
        """Run `work` on every rank; return the results in rank order, or raise an error of any rank on every rank.

        All ranks must call. Results travel, so they have to be small. `processes.agree` is the same before there is
        an engine.

        Args:
            work: None on a rank that has nothing to do; its result is None.
            raise_as: What every rank raises; the text names the ranks that failed and their reasons.
            catch: The errors that travel. Other ones leave this rank at once.
        """
        error, mine = attempt(work, catch)
        if error is not None and self.world_size > 1 and not self.is_connected:
            raise error  # it says why the connections ended, and no other rank can be told
        return agreed(self.all_gather_object(mine, what), raise_as, error)

    def require_all_ranks(self, name: str, timeout_s: float | None = None) -> None:
        """Return once every rank has called this with the same `name`; raise StateError if some do not come,
        DivergenceError if some have ended.

        The calls meet in the key-value store, not in a collective, so a rank that is alone can say so.
        """
        if self._processes is None:
            return
        if self._processes.stopped:
            raise self._processes.ended(name)
        group = self._processes
        group.add_to_log(CALL, name)
        try:
            ended, look = group.ended_ranks, group.look_while_alone
            self._presence.wait(name, self.name, self.rank, self.world_size, timeout_s, ended, look)
        except LostRankError as error:
            raise group.failure(name, error) from error
        except StateError:
            group.take_back()
            raise
        self.barrier(name)  # rank 0 may hold the store: its process must not end while another rank still asks

    @contextlib.contextmanager
    def stop_together(self) -> Iterator[None]:
        """An OffloadError of this rank inside the block ends the others' waiting (see abandon): they raise it too."""
        try:
            yield
        except OffloadError as error:
            text = f"rank {self.run_rank}: {error}"
            self.abandon(OffloadError(text))
            raise OffloadError(text) from error

    @contextlib.contextmanager
    def naming_lost_ranks(self, what: str) -> Iterator[None]:
        """Say why a collective of other libraries inside the block has failed, where ranks have ended."""
        try:
            yield
        except (ZeroError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            lost = None if self._processes is None else self._processes.lost_ranks(what, error)
            if lost is None:
                raise
            raise lost from error

    def abandon(self, reason: ZeroError) -> None:
        """Close the connections: ranks that wait for this one stop, and raise an error of the kind and text given."""
        if self._processes is not None:
            self._processes.abandon(reason)

    def end(self, *, is_shared: bool) -> None:
        """Give group, sockets and threads back, unless `is_shared` is true on some rank. All ranks must call."""
        if self.is_connected and not any(self.all_gather_object(is_shared, "end")):
            assert self._processes is not None
            self._processes.end()

    @property
    def is_connected(self) -> bool:
        return self._processes is not None and not self._processes.stopped

    def disconnect(self) -> None:
        """End what this rank waits for, until `reconnect`: pending operations are lost. Any thread may call."""
        if self._processes is not None:
            self._processes.disconnect()

    def reconnect(self) -> None:
        """Start over after an `abandon` on some rank. All ranks must call; what was pending is lost."""
        if self._processes is not None:
            # The memory that lost operations were to fill goes with the old pool.
            allocations, self._received = self._received.allocations, BlockPool(self.device)
            self._received.allocations = allocations
            self._presence.clear()
            self._processes.reconnect()
            self._find_connections(self._processes)

    @property
    def receive_allocations(self) -> int:
        """The number of allocations for what gloo receives in a reduce, so far."""
        return self._received.allocations

    # ---------------------------------------------------------------- inside
    def _begin(self, call: Callable[..., Any], what: str, finish: Finish = None) -> Pending:
        """Start one of torch's collectives, which are matched by their order.

        Args:
            call: Takes `group` and `async_op`, and returns torch's Work.
            finish: Runs after it, when it is waited for.
        """
        group = self._processes
        assert group is not None
        try:
            link = group.link
            if link is None:  # another thread has closed it
                raise RuntimeError(CLOSED)
            work = call(group=link.group, async_op=True)
        except torch.OutOfMemoryError:  # NCCL allocates when it connects
            raise
        except RuntimeError as error:
            raise group.failure(what, error) from error
        pending: Pending
        if link.is_gloo:
            pending = HostWork(group, lambda gloo: work.wait(), what, finish)
        else:
            pending = DeviceWork(group, link, work, what, finish)
        if self._starting is not None:
            self._starting(pending)
        return pending

    def _begin_coalesced(
        self, what: str, kind: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Pending:
        """Start what a block has collected of a kind."""
        title = f"{kind.replace('_', '-')} of {what}"
        if self.observers:
            self._observe(kind, what, sum(one.nbytes for one in (outputs if kind == "all_gather" else inputs)))
        with _profiled(f"hf_zero::{'gather' if kind == 'all_gather' else 'reduce'} ({what})"):
            if self.coalesces:
                return self._begin(functools.partial(COALESCED[kind], outputs, inputs), title)
            assert self._peers is not None and kind == "all_gather"
            tell, self._starting = self._starting, None
            self._read_parts(self._peers, list(zip(outputs, inputs, strict=True)), title)
            if tell is not None:
                tell(Done())
            return Done()

    def _exchange(
        self,
        places: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        what: str,
        finish: Finish = None,
        tag: int | None = None,
    ) -> Pending:
        """Start sending `parts[r]` to rank r, and filling `places[r]` with what that one sends, over gloo.

        Messages carry the tag of the operation that was logged last, unless another is given: see [Note: Matching] in
        operation_log.py.
        """
        group = self._processes
        assert group is not None
        place, part = places[self.rank], parts[self.rank]
        if place.data_ptr() != part.data_ptr():
            place.copy_(part)
        tag = group.log.tag if tag is None else tag
        pending = HostWork(group, functools.partial(exchange, places, parts, self.rank, tag), what, finish)
        if self._starting is not None:
            self._starting(pending)
        return pending

    def _all_gather_bytes(self, mine: bytes, what: str) -> list[bytes]:
        """One message to each rank where no rank has more than fits; torch's way takes five times the processor."""
        heads = torch.zeros((self.world_size, _LENGTH_BYTES + _FIRST_BYTES), dtype=torch.uint8, device="cpu")
        head = bytearray(len(mine).to_bytes(_LENGTH_BYTES, "little") + mine[:_FIRST_BYTES])
        heads[self.rank, : len(head)] = torch.frombuffer(head, dtype=torch.uint8)
        self._gather_rows(heads, what, tag=_OBJECTS_TAG)
        given = [bytes(row) for row in heads.numpy()]
        lengths = [int.from_bytes(data[:_LENGTH_BYTES], "little") for data in given]
        left = [max(0, length - _FIRST_BYTES) for length in lengths]
        tails = self._exchange_bytes(mine[_FIRST_BYTES:], left, what) if any(left) else [b""] * self.world_size
        return [
            (head[_LENGTH_BYTES:] + tail)[:length] for head, tail, length in zip(given, tails, lengths, strict=True)
        ]

    def _exchange_bytes(self, mine: bytes, sizes: Sequence[int], what: str) -> list[bytes]:
        """`mine` of every rank, of which rank r has `sizes[r]`. Matched by order alone."""
        received = [bytearray(size) for size in sizes]
        places = [torch.frombuffer(data, dtype=torch.uint8) if data else _NO_BYTES for data in received]
        part = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else _NO_BYTES
        self._exchange(places, [part] * self.world_size, what, tag=_OBJECTS_TAG).wait()
        return [bytes(data) for data in received]

    def _gather_rows(self, rows: torch.Tensor, what: str, tag: int | None = None) -> None:
        """Fill `rows` [world size, n] from the row that each rank has in it: small messages, and few of them."""
        if self.world_size <= _FEW_RANKS:
            self._exchange(rows.unbind(), [rows[self.rank]] * self.world_size, what, tag=tag).wait()
            return
        assert self._processes is not None
        tag = self._processes.log.tag if tag is None else tag
        self._on_host(functools.partial(gather_rows, rows, self.rank, tag), what).wait()

    def _exchange_and_sum(self, out: torch.Tensor, sent: torch.Tensor, what: str) -> Pending:
        """Reduce-scatter by all-to-all and a local sum in rank order."""
        memory, received = self._acquire(sent.numel(), sent.dtype)

        def finish() -> None:
            parts = received.view(self.world_size, -1)
            if self.world_size == 2 and received.dtype == out.dtype:
                torch.add(parts[0], parts[1], out=out)
            else:
                torch.sum(parts, 0, dtype=out.dtype, out=out)
            self._release(memory)

        return self._exchange(received.chunk(self.world_size), sent.chunk(self.world_size), what, finish)

    def _replicating(self, full: torch.Tensor, part: torch.Tensor) -> RankGroups | None:
        """Return the groups that have all parts of `full` each, None where its parts are those of all ranks."""
        if full.numel() == self.world_size * part.numel():
            return None
        if self.groups is not None and full.numel() == self.num_shards * part.numel():
            return self.groups
        # Shards that another engine had in other groups.
        return RankGroups.of(self.rank, self.world_size, full.numel() // part.numel(), replicates=True)

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
        """`row`: memory for what the ranks at this one's place own; None: nobody needs it afterwards."""
        with _profiled(f"hf_zero::gather ({what})"):
            if self.backend == "gloo":
                parts = full.chunk(groups.size * groups.number)
                places = [parts[shard] for shard in groups.row] if row is None else row.chunk(groups.number)
                steps = self._message_steps(groups, quantized=quantized)
                return self._on_host(functools.partial(steps.gather, parts, places, part), f"all-gather of {what}")
            row = full.new_empty(full.numel() // groups.size) if row is None else row
            call = functools.partial(self._device_steps(groups, quantized=quantized).gather, full, row, part)
            return self._begin(call, f"all-gather of {what}")

    def _reduce_in_steps(
        self, groups: RankGroups, out: torch.Tensor, wire: torch.Tensor, what: str, *, quantized: bool
    ) -> Pending:
        numel = wire.numel() // groups.size
        title = f"reduce-scatter of {what}"
        with _profiled(f"hf_zero::reduce ({what})"):
            if self.backend == "gloo":
                piece, received = self._acquire(wire.numel(), wire.dtype)
                other, sums = self._acquire(numel, out.dtype)
                steps = self._message_steps(groups, quantized=quantized)
                send = functools.partial(steps.reduce, out, wire, received, sums)
                return self._on_host(send, title, functools.partial(self._release, piece, other))
            if quantized:
                shape = groups.number, message_bytes(out.numel())
                received, sent = (torch.empty(shape, dtype=torch.uint8, device=out.device) for _ in range(2))
                start, sums = self._device_steps(groups).reduce_to_messages, wire.new_empty(numel)
                call = functools.partial(start, received, wire, sums, sent)
                return self._begin(call, title, functools.partial(sum_messages, out, received))
            result = out if wire.dtype == out.dtype else torch.empty_like(out, dtype=wire.dtype)
            sums = result if groups.replicates else wire.new_empty(numel)
            call = functools.partial(self._device_steps(groups).reduce, result, wire, sums)
            return self._begin(call, title, None if result is out else functools.partial(out.copy_, result))

    def _reduce_inside(self, groups: RankGroups, row: torch.Tensor, wire: torch.Tensor, what: str) -> Pending:
        title = f"reduce-scatter of {what} in a group"
        if self.backend == "gloo":
            piece, received = self._acquire(wire.numel(), wire.dtype)
            send = functools.partial(self._message_steps(groups).reduce_inside, row, wire, received)
            return self._on_host(send, title, functools.partial(self._release, piece))
        result = row if wire.dtype == row.dtype else torch.empty_like(row, dtype=wire.dtype)
        call = functools.partial(self._device_steps(groups).reduce_inside, result, wire)
        return self._begin(call, title, None if result is row else functools.partial(row.copy_, result))

    def _on_host(self, call: Callable[[Any], object], what: str, finish: Finish = None) -> Pending:
        """Start what a thread does over gloo; `call` takes torch's group."""
        assert self._processes is not None

        def in_thread(group: Any) -> None:
            # A thread starts without this mode, in which tensors that were made in it may be changed, and others too.
            with torch.inference_mode():
                call(group)

        pending = HostWork(self._processes, in_thread, what, finish)
        if self._starting is not None:
            self._starting(pending)
        return pending

    def _message_steps(self, groups: RankGroups, *, quantized: bool = False) -> MessageSteps:
        assert self._processes is not None
        return MessageSteps(groups, self.rank, self._processes.log.tag, self._per_host, quantized)

    def _device_steps(self, groups: RankGroups, *, quantized: bool = False) -> DeviceSteps:
        assert self._processes is not None
        if self._beside is None:
            self._beside = torch.Stream(self.device)
        return DeviceSteps(groups, self._beside, *self._processes.levels(groups.size), quantized)

    def _acquire(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a piece of the pool, and a tensor in it."""
        piece = self._received.acquire(numel * dtype.itemsize)
        return piece, piece[: numel * dtype.itemsize].view(dtype)

    def _release(self, *pieces: torch.Tensor) -> None:
        for piece in pieces:
            self._received.release(piece)

    def _read_parts(self, peers: PeerMemory, gathers: Sequence[Gather], what: str) -> None:
        """All-gathers by reading the parts of the other ranks from their memory. All ranks must call."""
        mine = torch.tensor([part.data_ptr() for _, part in gathers])
        addresses = torch.empty((self.world_size, len(gathers)), dtype=mine.dtype)
        # Over when every rank's parts are there to be read
        self._exchange(addresses.unbind(), [mine] * self.world_size, what).wait()
        try:
            peers.fill(gathers, addresses.tolist(), self.rank)
        except OSError as error:
            assert self._processes is not None
            raise self._processes.failure(what, error) from error
        # Parts may change once every rank has read them.
        self._begin(dist.barrier, what).wait()

    def _combine(self, values: torch.Tensor, largest: int, what: str) -> None:
        """Combine the values of all ranks in place: see `vote`. Logged by the caller."""
        if (group := self._processes) is not None:
            call = functools.partial(combine, values, largest, self.rank, self.world_size, group.log.tag)
            self._on_host(call, what).wait()

    def _record(self, op: str, what: str, full: torch.Tensor, *, equal_sizes: bool = True) -> None:
        if self._processes is not None:
            self._processes.add_to_log(op, what, full if equal_sizes else None)
        count = self.counts[op]
        if not (self.coalesces and self._block is not None and self._block.joins(op, full)):
            count.calls += 1
        count.numel += full.numel()
        count.nbytes += full.numel() * full.element_size()
        if self.observers:
            self._observe(op, what, full.numel() * full.element_size())

    def _observe(self, op: str, what: str, nbytes: int) -> None:
        """Let `observers` hear of the operation that starts next."""
        marks = [(observer, observer.mark()) for observer in self.observers]

        def tell(pending: Pending) -> None:
            self._starting = None
            for observer, begun in marks:
                observer.started(op, what, nbytes, begun, pending)

        self._starting = tell
        if self._processes is None:
            tell(Done())

    @functools.cached_property
    def _peers(self) -> PeerMemory | None:
        """The memory of the other ranks, where every rank can read every other's. All must ask; they talk once."""
        if self.world_size < 2 or not self.computes_on_host:
            return None
        return find_peers(lambda mine: self.all_gather_object(mine, "memory of the ranks"))


def _profiled(name: str) -> contextlib.AbstractContextManager[Any]:
    """Inside, a profiler that runs shows `name`. Without one a name would cost 5 us, and 7 ms the first time."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else contextlib.nullcontext()
