"""The processes of one engine: their connections, the operations they have started, and how they stop together."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.operation_log import OperationCheck, OperationLog
from hf_zero.distributed.process_group import Link
from hf_zero.distributed.store_protocol import publish_reason, published_reason
from hf_zero.distributed.work import Finish, Pending
from hf_zero.errors import DivergenceError, StateError, ZeroError

# Seconds until a wait looks for the first time whether it is in vain, and at most between two looks.
_FIRST_LOOK_S = 0.05
_LOOK_EVERY_S = 0.5
# Seconds for what others have on their way to each other when a rank leaves: it may have been the last they had to do.
_GRACE_S = 5.0
_CLOSED = "its connections were closed"


class EngineGroup:
    """A process group of the engine's own, and what all ranks know of each other over it.

    Args:
        ranks: Of the world, those that share the model; two or more.
        backend: Of the collectives. What the host waits for (votes, objects) goes over gloo beside it.
    All ranks of the world must construct it, alike.
    """

    def __init__(self, ranks: Sequence[int], backend: str, timeout_s: float) -> None:
        self._ranks = ranks
        self._backend = backend
        self._timeout_s = timeout_s
        self.world_size = len(ranks)
        self.log = OperationLog()
        self._connect()

    def _connect(self) -> None:
        self.stopped = False  # connections were closed after an error
        self.log.clear()
        self.link: Link | None = Link(self, self._ranks, self._backend, self._timeout_s)
        # The link itself where that is gloo
        is_gloo = self._backend == "gloo"
        self.control: Link | None = self.link if is_gloo else Link(self, self._ranks, "gloo", self._timeout_s)
        self.name: str = self.link.group.group_name
        self.rank = dist.get_rank(self.link.group)
        store = dist.distributed_c10d._get_default_store
        self.check = OperationCheck(self.log, store, f"hf_zero/{self.name}", self.rank, self.world_size)
        self.control.find_connections(lambda mine: self.all_gather_object(mine, "connections"))

    # ---------------------------------------------------------------- operations
    def add_to_log(self, op: str, what: str, full: torch.Tensor | None = None) -> None:
        """An operation starts. `full`: the unsharded tensor, where it has the same size on all ranks.

        Raises what ended the connections, if something has.
        """
        if self.stopped:
            raise self.ended(what)
        if full is None:
            self.log.add(op, what)
        else:
            self.log.add(op, what, full.numel(), str(full.dtype)[6:])

    def begin(self, call: Callable[..., Any], what: str, finish: Finish = None) -> Pending:
        """Start one of torch's collectives, which are matched by their order.

        Args:
            call: Takes `group` and `async_op`, and returns torch's Work.
            finish: Runs after it, when it is waited for.
        """
        try:
            link = self.link
            if link is None:  # another thread has closed it
                raise RuntimeError(_CLOSED)
            work = call(group=link.group, async_op=True)
        except RuntimeError as error:
            raise self.failure(what, error) from error
        if link.is_gloo:
            return HostWork(self, lambda group: work.wait(), what, finish)
        return DeviceWork(self, link, work, what, finish)

    def exchange(
        self, places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], what: str, finish: Finish = None
    ) -> Pending:
        """Start sending `parts[r]` to rank r, and filling `places[r]` with what that one sends, over gloo.

        As messages between pairs of ranks: gloo's own all-gather fills a buffer of its own and copies, half as fast
        (scripts/bench_comm.py measures it). Messages carry the tag of the operation that was logged last: see
        [Note: Matching] in operation_log.py.
        """
        place, part = places[self.rank], parts[self.rank]
        if place.data_ptr() != part.data_ptr():
            place.copy_(part)
        return HostWork(self, functools.partial(_exchange, places, parts, self.rank, self.log.tag), what, finish)

    def look_for_difference(self) -> None:
        """Raise RuntimeError, and stop all ranks, where a wait has no end because another rank runs other code."""
        if text := self.check.difference_after_a_stall():
            self.abandon(DivergenceError(text))
            raise RuntimeError("ranks started different operations")

    def _expect_equal(self, digests: Sequence[float]) -> None:
        """`digests`: of the operations of every rank, in rank order. All ranks must call."""
        if len(set(digests)) > 1:
            error = DivergenceError(self.check.difference())
            self.abandon(error)
            raise error

    # ---------------------------------------------------------------- what the host waits for
    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """`value` of every rank, in rank order, from ranks that started the same operations before."""
        self.add_to_log("objects", what)
        out: list[Any] = [None] * self.world_size
        mine = (self.log.digest, value)
        HostWork(self, lambda group: dist.all_gather_object(out, mine, group=group), what).wait()
        self._expect_equal([digest for digest, _ in out])
        return [given for _, given in out]

    def all_gather_numbers(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """`values` (1-D float64 on the host) of every rank, [world size, numel], as above. Logged by the caller."""
        mine = torch.cat([torch.tensor([self.log.digest], dtype=torch.float64), values])
        everyone = torch.empty(self.world_size * mine.numel(), dtype=torch.float64)
        by_rank = everyone.view(self.world_size, -1)
        self.exchange(by_rank.unbind(), [mine] * self.world_size, what).wait()
        self._expect_equal(by_rank[:, 0].tolist())
        return by_rank[:, 1:]

    # ---------------------------------------------------------------- the end
    def ended_ranks(self) -> list[int]:
        """Ranks that have died, or closed their connections to this one."""
        return [] if self.control is None else self.control.ended_ranks()

    def abandon(self, reason: ZeroError) -> None:
        """Close the connections: ranks that wait for this one stop, and raise an error of the kind and text given."""
        if not self.stopped:
            publish_reason(self.name, reason)
            self.disconnect()

    def disconnect(self) -> None:
        """End what this rank waits for, until `reconnect`: pending operations are lost. Any thread may call."""
        for link in self._take_links():
            link.close()

    def end(self) -> None:
        """Give groups, sockets and threads back. All ranks must call, when nobody has more to begin here."""
        for link in self._take_links():
            link.end()

    def _take_links(self) -> list[Link]:
        self.stopped = True
        links = [self.link, self.control if self.control is not self.link else None]
        self.link = self.control = None
        return [link for link in links if link is not None]

    def reconnect(self) -> None:
        """Start over after an `abandon` on some rank. All ranks must call; what was pending is lost."""
        self.disconnect()
        self._connect()

    def reason_of_another(self) -> ZeroError | None:
        """What another rank said before it closed its connections."""
        return published_reason(self.name)

    def ended(self, what: str) -> ZeroError:
        """What to raise where `what` is to start after the connections were closed."""
        text = f"rank {self.rank}: {what}: this engine was torn down, or stopped after an error; make another one"
        return self.reason_of_another() or StateError(text)

    def failure(self, what: str, error: BaseException) -> ZeroError:
        """What to raise when a collective broke off: the other rank's reason where it gave one."""
        reason = self.reason_of_another()
        self.disconnect()  # a third rank may wait for this one, in another operation than that which broke off
        if reason is not None:
            return type(reason)(f"{reason}\nrank {self.rank} was in {what} and stops too.")
        last = "\n".join(f"  {line}" for line in self.log.last()[-6:])
        return DivergenceError(
            f"rank {self.rank} of {self.world_size}: {what} did not complete: {str(error).splitlines()[0][:200]}\n"
            f"Another rank has stopped, or runs other code than this one (desync_timeout is {self._timeout_s:.0f} s). "
            f"The last operations of this rank, to compare with the other ranks' message:\n{last}"
        )


class GroupWork:
    """An operation of a group that has started, and what is left to do once it is over. `wait` may be called again."""

    def __init__(self, group: EngineGroup, what: str, finish: Finish) -> None:
        self._group = group
        self._what = what
        self._finish = finish
        self._is_over = False

    def wait(self) -> None:
        if self._is_over:
            return
        try:
            if self._group.stopped:
                raise RuntimeError(_CLOSED)
            self._until_over()
        except RuntimeError as error:
            raise self._group.failure(self._what, error) from error
        self._is_over = True
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _until_over(self) -> None:
        raise NotImplementedError


class DeviceWork(GroupWork):
    """torch's Work for which a stream of the device waits, and not the host."""

    def __init__(self, group: EngineGroup, link: Link, work: Any, what: str, finish: Finish = None) -> None:
        super().__init__(group, what, finish)
        self._work = work
        link.note(self, work)

    def _until_over(self) -> None:
        self._work.wait()


class HostWork(GroupWork):
    """A call over gloo that a thread makes, and leaving off where the wait for it would be in vain.

    When a connection ends, gloo fails the operations that have not begun to use it; one whose bytes were on their way
    waits on, until the group's timeout, and cannot be called back. So another thread waits, and may be left behind.

    Args:
        call: Takes torch's group, and returns when all is over.
    """

    def __init__(self, group: EngineGroup, call: Callable[[Any], object], what: str, finish: Finish = None) -> None:
        super().__init__(group, what, finish)
        link = group.control
        if link is None:  # another thread has closed it
            raise group.failure(what, RuntimeError(_CLOSED))
        self._link = link
        self._call: Callable[[], object] | None = functools.partial(call, link.group)
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()
        link.jobs.put(self.perform)

    def perform(self) -> None:
        """Called in a thread, once."""
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._call = None  # the operations are not kept until the next job
        self._running.release()

    def _until_over(self) -> None:
        if not self._running.acquire(timeout=_FIRST_LOOK_S):
            self._wait_and_look()
        self._running.release()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: no cycle, which would keep the operations

    def _wait_and_look(self) -> None:
        """Go on waiting; RuntimeError if a connection ended, or other ranks started other operations."""
        self._group.check.begin_wait()
        broken_at: float | None = None
        pause = _FIRST_LOOK_S
        while True:
            pause = min(2 * pause, _LOOK_EVERY_S)
            if not self._link.connections.has_ended():
                self._group.look_for_difference()
            else:
                broken_at = broken_at or time.monotonic()
                if self._group.reason_of_another() is not None or time.monotonic() > broken_at + _GRACE_S:
                    raise RuntimeError("another rank closed its connections")
            if self._running.acquire(timeout=pause):
                return


def _exchange(places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], rank: int, tag: int, group: Any) -> None:
    """See EngineGroup.exchange; returns when all of it is over."""
    works: list[Any] = []
    world_size = len(places)
    for step in range(1, world_size):  # an order in which no two ranks begin with the same one
        to, origin = (rank + step) % world_size, (rank - step) % world_size
        if parts[to].numel():
            works.append(dist.isend(parts[to], group=group, group_dst=to, tag=tag))
        if places[origin].numel():
            works.append(dist.irecv(places[origin], group=group, group_src=origin, tag=tag))
    for work in works:
        work.wait()
