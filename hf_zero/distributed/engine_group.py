"""The processes of one engine: their connections, the operations they have started, and how they stop together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.failure_reason import publish_reason, published_reason
from hf_zero.distributed.gloo_messages import Message, gather_messages, message_calls
from hf_zero.distributed.operation_log import OperationCheck, OperationLog
from hf_zero.distributed.process_group import Link, UnderWay
from hf_zero.distributed.work import Begun, Finish, Operation, Pending
from hf_zero.errors import DivergenceError, StateError, ZeroError


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
        self._check = OperationCheck(self.log, store, f"hf_zero/{self.name}", self.rank, self.world_size)
        self.control.find_connections(lambda mine: self.all_gather_object(mine, "connections"))

    # ---------------------------------------------------------------- operations
    def add_to_log(self, op: str, what: str, full: torch.Tensor | None = None) -> None:
        """An operation starts. `full`: the unsharded tensor, where it has the same size on all ranks.

        Raises what ended the connections, if something has.
        """
        self.refuse_if_stopped(what)
        size = (None, "") if full is None else (full.numel(), str(full.dtype)[6:])
        self.log.add(Operation(op, what, *size))

    def begin(self, calls: Sequence[Callable[[], Any]], what: str, finish: Finish = None) -> Pending:
        """Start collectives that are over together; `finish` runs after them, when they are waited for."""
        return self._begun(self.link, lambda link: link.begin(calls), what, finish)

    def begin_messages(self, messages: Sequence[Message], what: str, finish: Finish = None) -> Pending:
        """The same for messages of the operation that was logged last, over gloo."""
        tag = self.log.tag
        return self._begun(
            self.control, lambda link: link.begin_messages(message_calls(messages, link.group, tag)), what, finish
        )

    def _begun(
        self, link: Link | None, begin: Callable[[Link], UnderWay], what: str, finish: Finish = None
    ) -> Begun[UnderWay]:
        try:
            if link is None:  # another thread has closed it
                raise RuntimeError("its connections were closed")
            under_way = begin(link)
        except RuntimeError as error:
            raise self.failure(what, error) from error
        return Begun(under_way, what, functools.partial(self._wait, link), self.failure, finish)

    def _wait(self, link: Link, under_way: UnderWay) -> None:
        if self.stopped:
            raise RuntimeError("its connections were closed")
        self._check.begin_wait()
        link.wait(under_way, lambda: self.reason_of_another() is not None, self._look_for_difference)

    def _look_for_difference(self) -> None:
        if text := self._check.difference_after_a_stall():
            self.abandon(DivergenceError(text))
            raise RuntimeError("ranks started different operations")

    def _expect_equal(self, digests: Sequence[float]) -> None:
        """`digests`: of the operations of every rank, in rank order. All ranks must call."""
        if len(set(digests)) > 1:
            error = DivergenceError(self._check.difference())
            self.abandon(error)
            raise error

    # ---------------------------------------------------------------- what the host waits for
    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """`value` of every rank, in rank order, from ranks that started the same operations before."""
        self.add_to_log("objects", what)
        out: list[Any] = [None] * self.world_size
        mine = (self.log.digest, value)
        call = dist.all_gather_object
        self._begun(
            self.control, lambda link: link.begin_apart(functools.partial(call, out, mine, group=link.group)), what
        ).wait()
        self._expect_equal([digest for digest, _ in out])
        return [given for _, given in out]

    def all_gather_numbers(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """`values` (1-D float64 on the host) of every rank, [world size, numel], as above. Logged by the caller."""
        mine = torch.cat([torch.tensor([self.log.digest], dtype=torch.float64), values])
        everyone = torch.empty(self.world_size * mine.numel(), dtype=torch.float64)
        self.begin_messages(gather_messages(everyone, mine, self.rank, self.world_size), what).wait()
        by_rank = everyone.view(self.world_size, -1)
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

    def refuse_if_stopped(self, what: str) -> None:
        if self.stopped:
            text = f"rank {self.rank}: {what}: this engine was torn down, or stopped after an error; make another one"
            raise self.reason_of_another() or StateError(text)

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
