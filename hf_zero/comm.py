"""The only module that calls collectives.

Owns the process group of an engine, the choice of primitive per backend, the counters that tests and reports read, and
the record of the last operations that turns a hang into a sentence. All calls come from one thread, in the same order
on every rank: collectives are matched by order, so another order anywhere is a deadlock or a wrong result.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

from hf_zero.errors import DivergenceError, OffloadError, OutOfMemoryError, StateError, ZeroError
from hf_zero.link import Link
from hf_zero.native.peers import Gather, PeerMemory
from hf_zero.pending import Blocking, CommCount, Done, Finish, Operation, Pending, Work
from hf_zero.presence import Presence
from hf_zero.processes import backend_for, default_device, ensure_process_group, leave_cleanly_at_exit
from hf_zero.scratch import Scratch

# Elements per collective on gloo: larger single calls fall out of the cache (scripts/bench_comm.py measures it).
GLOO_BUCKET_NUMEL = 1 << 20
_RING_SIZE = 16
_REASONS: dict[str, type[ZeroError]] = {one.__name__: one for one in (OffloadError, OutOfMemoryError, StateError)}
_T = TypeVar("_T")


class Comm:
    """Collectives of one engine over one process group.

    Args:
        group: Ranks that share the model; None means all of them. A group of its own is made from it, so that the
            engine's collectives never mix with those of a data loader or of accelerate.
        timeout_s: Seconds after which a collective that has not completed raises DivergenceError.
    All ranks must construct it.
    """

    def __init__(self, device: torch.device, *, group: Any = None, timeout_s: float = 600.0) -> None:
        self.device = device
        self.computes_on_host = device.type == "cpu"  # the host's memory is the device's
        self.timeout_s = timeout_s
        self.counts: dict[str, CommCount] = collections.defaultdict(CommCount)
        self._ring: collections.deque[Operation] = collections.deque(maxlen=_RING_SIZE)
        self._presence = Presence()
        self._scratch = Scratch()
        self._at_once: list[Gather] | None = None  # what `at_once` has collected
        self._link: Link | None = None
        self._group: Any = None  # of the link
        self.name = ""  # of the group, on all ranks; the later made, the later in the order of (length, name)
        self._stopped = False  # connections were closed after an error
        self._join(group)

    def _join(self, group: Any) -> None:
        if not dist.is_initialized():
            self.rank, self.world_size, self.backend = 0, 1, "none"
            return
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.world_size = len(self._ranks)
        self.backend = backend_for(self.device) if self.world_size > 1 else "none"
        if self.world_size > 1:
            self._connect()
            leave_cleanly_at_exit()
        self.rank = dist.get_rank(self._group) if self._group is not None else 0

    def _connect(self) -> None:
        self._link = Link(self._ranks, self.backend, self.timeout_s)
        self._group = self._link.group
        self.name = self._group.group_name
        self._link.find_connections(lambda mine: self.all_gather_object(mine, "connections"))

    @classmethod
    def join(cls, device: torch.device | None = None, *, group: Any = None, timeout_s: float = 600.0) -> Comm:
        """For the accelerator of this process, or the CPU, where `device` is None. All ranks must call."""
        device = device or default_device()
        device = torch.device("cpu") if device.type == "cpu" else device  # without the index that "cpu:0" has
        ensure_process_group(device)
        return cls(device, group=group, timeout_s=timeout_s)

    # ---------------------------------------------------------------- what the runtime needs
    @property
    def max_bucket_numel(self) -> int | None:
        """Elements per collective beyond which this backend gets slower; None if it does not."""
        return GLOO_BUCKET_NUMEL if self.backend == "gloo" else None

    def all_gather(self, full: torch.Tensor, part: torch.Tensor, what: str) -> Pending:
        """Start filling `full` (1-D) with the `part` of every rank, in rank order. `part` may lie inside `full`."""
        self._record("all_gather", what, full)
        if self._group is None:
            if full.data_ptr() != part.data_ptr():
                full.copy_(part)
            return Done()
        with record_function(f"hf_zero::gather ({what})"):
            if self._at_once is not None:
                self._at_once.append((full, part))
                return Done()
            if self.backend == "gloo":
                return self._exchange_parts(full, part, what)
            call = functools.partial(dist.all_gather_single, full, part, group=self._group, async_op=True)
            return self._begin([call], f"all-gather of {what}")

    @contextlib.contextmanager
    def at_once(self, what: str) -> Iterator[None]:
        """All-gathers that are started inside the block may be over only at its end, and are faster for that.

        Ranks on the CPU of one host read each other's parts from memory, in half the time that messages take. No part
        may change inside the block, and no other collective run. All ranks must enter.
        """
        peers = self._peers
        if peers is None:
            yield
            return
        self._at_once = []
        try:
            yield
            gathers, self._at_once = self._at_once, None
            if gathers:
                self._read_parts(peers, gathers, f"all-gather of {what}")
        finally:
            self._at_once = None

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, what: str, *, wire_dtype: torch.dtype | None = None
    ) -> Pending:
        """Start summing `full` (1-D) over ranks, rank r keeping the r-th part in `out`, which may lie inside `full`.

        `wire_dtype` is the type that travels; the sum is taken in `out`'s type on gloo, in the wire type on NCCL.
        `full` must not change before `wait` returns.
        """
        wire = self._as_sent(full, wire_dtype)
        self._record("reduce_scatter", what, wire)
        if self._group is None:
            if full.data_ptr() != out.data_ptr():
                out.copy_(full)
            return Done()
        with record_function(f"hf_zero::reduce ({what})"):
            if self.backend == "gloo":
                return self._exchange_and_sum(out, wire, what)
            result = out if wire.dtype == out.dtype else torch.empty_like(out, dtype=wire.dtype)
            call = functools.partial(dist.reduce_scatter_single, result, wire, group=self._group, async_op=True)
            finish = None if result is out else functools.partial(out.copy_, result)
            return self._begin([call], f"reduce-scatter of {what}", finish)

    def all_reduce(self, full: torch.Tensor, what: str, *, wire_dtype: torch.dtype | None = None) -> Pending:
        """Start summing `full` over ranks in place."""
        wire = self._as_sent(full, wire_dtype)
        self._record("all_reduce", what, wire)
        if self._group is None:
            return Done()
        with record_function(f"hf_zero::all_reduce ({what})"):
            call = functools.partial(dist.all_reduce, wire, group=self._group, async_op=True)
            finish = None if wire is full else functools.partial(full.copy_, wire)
            return self._begin([call], f"all-reduce of {what}", finish)

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, what: str, sizes: tuple[list[int], list[int]] | None = None
    ) -> Pending:
        """Start sending the r-th part of `full` (1-D) to rank r, and filling `out` with what the ranks send, in order.

        `sizes`: elements from each rank, and to each rank; None means equal parts.
        """
        self._record("all_to_all", what, full)
        if self._group is None:
            out.copy_(full)
            return Done()
        received, sent = sizes or (None, None)
        with record_function(f"hf_zero::all_to_all ({what})"):
            call = functools.partial(
                dist.all_to_all_single, out, full, received, sent, group=self._group, async_op=True
            )
            return self._begin([call], f"all-to-all of {what}")

    def vote(self, values: torch.Tensor, what: str) -> list[float]:
        """Sum `values` (1-D float64, any device) over ranks and bring the sums to the host."""
        self._record("vote", what, values)
        if self._group is not None:
            values = values.to(self.device)
            call = functools.partial(dist.all_reduce, values, group=self._group, async_op=True)
            self._begin([call], f"vote on {what}").wait()
        return [float(value) for value in values.tolist()]

    def broadcast(self, tensor: torch.Tensor, what: str, *, src: int = 0) -> None:
        """Copy `tensor` of group rank `src` to all ranks, in place."""
        self.broadcast_start(tensor, what, src=src).wait()

    def broadcast_start(self, tensor: torch.Tensor, what: str, *, src: int) -> Pending:
        self._record("broadcast", what, tensor)
        if self._group is None:
            return Done()
        call = functools.partial(dist.broadcast, tensor, group=self._group, group_src=src, async_op=True)
        return self._begin([call], f"broadcast of {what}")

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """`value` of every rank, in rank order. For small control data."""
        self._refuse_if_stopped(what)
        if self._group is None:
            return [value]
        out: list[Any] = [None] * self.world_size
        self._begin([Blocking(functools.partial(dist.all_gather_object, out, value, group=self._group))], what).wait()
        return out

    def barrier(self, what: str) -> None:
        self.all_gather_object(None, what)

    def together(
        self, what: str, work: Callable[[], _T], *, catch: tuple[type[Exception], ...], raise_as: type[ZeroError]
    ) -> list[_T]:
        """Run `work` on every rank; return what each gave, or raise on every rank what went wrong on any.

        For small results, which travel. Errors of other kinds than `catch` leave this rank at once.
        """
        error, results = None, list[_T]()
        try:
            results.append(work())
        except catch as problem:
            error = str(problem)
        outcomes = self.all_gather_object((error, results), what)
        if failed := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text is not None]:
            raise raise_as("\n".join(failed))
        return [value for _, (value,) in outcomes]

    def require_all_ranks(self, name: str, timeout_s: float | None = None) -> None:
        """Return once every rank has called this with the same `name`; raise StateError if some do not come.

        Goes through the key-value store, not through a collective, so a rank that is alone can say so.
        """
        self._refuse_if_stopped(name)
        if self._group is None:
            return
        self._presence.wait(name, self._group.group_name, self.rank, self.world_size, timeout_s)
        # Rank 0 may host the store: it must not leave, and end the process, while another rank is still asking.
        self.barrier(name)

    @contextlib.contextmanager
    def stop_together(self) -> Iterator[None]:
        """An OffloadError of this rank inside the block ends the waiting of the others, who then raise it too.

        The reason goes through the key-value store; then the connections are closed, so that no rank sits in a
        collective until its timeout.
        """
        try:
            yield
        except OffloadError as error:
            text = f"rank {self.rank}: {error}"
            self.abandon(OffloadError(text))
            raise OffloadError(text) from error

    def abandon(self, reason: OffloadError | OutOfMemoryError | StateError) -> None:
        """Close the connections: ranks that wait for this one stop, and raise an error of the kind and text given."""
        if self._group is not None:
            store = dist.distributed_c10d._get_default_store()
            store.set(self._failure_key(), f"{type(reason).__name__}\n{reason}")
            self.disconnect()

    def disconnect(self) -> None:
        """End what this rank waits for, until `reconnect`: pending operations are lost. Any thread may call."""
        link, self._link, self._group = self._link, None, None
        if link is not None:
            self._stopped = True
            link.close()

    def reconnect(self) -> None:
        """Start over after an `abandon` on some rank. All ranks must call; what was pending is lost."""
        self.disconnect()
        self._stopped = False
        if self.world_size > 1:
            self._scratch.clear()
            self._presence.clear()
            self._connect()

    def _failure_key(self) -> str:
        return f"hf_zero/{self.name}/failure"

    def reason_of_another(self) -> ZeroError | None:
        """What another rank said before it closed its connections."""
        if self.world_size < 2:
            return None
        store = dist.distributed_c10d._get_default_store()
        try:
            said = store.get(self._failure_key()).decode() if store.check([self._failure_key()]) else None
        except RuntimeError:  # the store has gone with the process that held it
            return None
        kind, _, text = (said or "").partition("\n")
        return _REASONS[kind](text) if said is not None else None

    def reset_counts(self) -> None:
        self.counts.clear()

    def last_operations(self) -> list[str]:
        """The last operations this rank started, oldest first."""
        return [str(operation) for operation in self._ring]

    # ---------------------------------------------------------------- inside
    def _refuse_if_stopped(self, what: str) -> None:
        if self._stopped:
            text = f"rank {self.rank}: {what}: this engine stopped after an error; start the run again"
            raise self.reason_of_another() or StateError(text)

    def _record(self, op: str, what: str, full: torch.Tensor) -> None:
        self._refuse_if_stopped(what)
        count = self.counts[op]
        count.calls += 1
        count.numel += full.numel()
        count.nbytes += full.numel() * full.element_size()
        self._ring.append(Operation(op, what, full.numel(), str(full.dtype)[6:], time.time()))

    def _begin(self, calls: Sequence[Callable[[], Any]], what: str, finish: Finish = None) -> Work:
        """Start operations that are over together; `finish` runs after them, when they are waited for."""
        try:
            works = [call() for call in calls]
        except RuntimeError as error:
            raise self.failure(what, error) from error
        return Work(works, what, self._wait, self.failure, finish)

    def _wait(self, works: list[Any]) -> None:
        if self._link is None:
            raise RuntimeError("its connections were closed")
        self._link.wait(works, lambda: self.reason_of_another() is not None)

    def failure(self, what: str, error: BaseException) -> ZeroError:
        """What to raise when a collective broke off: the other rank's reason where it gave one."""
        reason = self.reason_of_another()
        self.disconnect()  # a third rank may wait for this one, in another operation than that which broke off
        if reason is not None:
            return type(reason)(f"{reason}\nrank {self.rank} was in {what} and stops too.")
        last = "\n".join(f"  {line}" for line in self.last_operations()[-6:])
        return DivergenceError(
            f"rank {self.rank} of {self.world_size}: {what} did not complete: {str(error).splitlines()[0][:200]}\n"
            f"Another rank has stopped, or runs other code than this one (desync_timeout is {self.timeout_s:.0f} s). "
            f"The last operations of this rank, to compare with the other ranks' message:\n{last}"
        )

    def _as_sent(self, full: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return full if self._group is None or dtype is None else full.to(dtype)

    def _exchange_parts(self, full: torch.Tensor, part: torch.Tensor, what: str) -> Pending:
        """All-gather by sending `part` to every rank, straight into its place in their `full`.

        gloo's own all-gather fills a buffer of its own and copies: half as fast (scripts/bench_comm.py measures it).
        """
        places = full.chunk(self.world_size)
        if places[self.rank].data_ptr() != part.data_ptr():
            places[self.rank].copy_(part)
        calls: list[Callable[[], Any]] = []
        for step in range(1, self.world_size):
            to, origin = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
            calls.append(functools.partial(dist.isend, part, group=self._group, group_dst=to))
            calls.append(functools.partial(dist.irecv, places[origin], group=self._group, group_src=origin))
        return self._begin(calls, f"all-gather of {what}")

    @functools.cached_property
    def _peers(self) -> PeerMemory | None:
        """Where every rank can read the memory of every other: that. All ranks must ask; they talk the first time."""
        if self.world_size < 2 or not self.computes_on_host:
            return None
        peers = PeerMemory()
        met = peers.meet(self.all_gather_object(peers.card(), "memory of the ranks"))
        return peers if all(self.all_gather_object(met, "memory of the ranks")) else None

    def _read_parts(self, peers: PeerMemory, gathers: Sequence[Gather], what: str) -> None:
        """All-gather by reading the parts of the other ranks. All ranks must call."""
        mine = torch.tensor([part.data_ptr() for _, part in gathers])
        addresses = torch.empty(self.world_size * len(gathers), dtype=mine.dtype)
        # Over when every rank's parts are there to be read
        call = functools.partial(dist.all_gather_single, addresses, mine, group=self._group, async_op=True)
        self._begin([call], what).wait()
        try:
            peers.fill(gathers, addresses.view(self.world_size, -1).tolist(), self.rank)
        except OSError as error:
            raise self.failure(what, error) from error
        # Parts may change once every rank has read them.
        self._begin([functools.partial(dist.barrier, group=self._group, async_op=True)], what).wait()

    def _exchange_and_sum(self, out: torch.Tensor, wire: torch.Tensor, what: str) -> Pending:
        """Reduce-scatter by all-to-all and a local sum in rank order.

        gloo's own reduce-scatter takes two to four times as long and rounds in the wire type at every hop.
        """
        received = self._scratch.take(wire)
        call = functools.partial(dist.all_to_all_single, received, wire, group=self._group, async_op=True)

        def finish() -> None:
            parts = received.view(self.world_size, -1)
            if self.world_size == 2 and received.dtype == out.dtype:
                torch.add(parts[0], parts[1], out=out)
            else:
                torch.sum(parts, 0, dtype=out.dtype, out=out)
            self._scratch.give_back(received)

        return self._begin([call], f"reduce-scatter of {what}", finish)
