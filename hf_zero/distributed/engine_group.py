"""The processes of one engine: their connections, the operations they have started, and how they stop together."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.failure_monitor import FailureMonitor, watch_for
from hf_zero.distributed.gloo_connections import limit_silence_of_store
from hf_zero.distributed.operation_log import OperationCheck, OperationLog
from hf_zero.distributed.process_end import tell_others_of_errors
from hf_zero.distributed.process_group import Link
from hf_zero.distributed.processes import call_site
from hf_zero.distributed.store_protocol import ENDED, LostRankError, publish_reason, published_reason
from hf_zero.distributed.torch_calls import TorchCallCheck
from hf_zero.errors import DivergenceError, StateError, ZeroError

logger = logging.getLogger(__name__)

_SHOWN = 5  # operations, in a message
_GLOO_TIMEOUT = "Timed out waiting"  # of the text of gloo's error


class EngineGroup:
    """A process group of the engine's own, and what all ranks know of each other over it.

    Args:
        groups: The world's ranks, split into those that share a model: two or more each.
        backend: Of the collectives. What the host waits for (votes, objects) goes over gloo beside it.
        hosts: The names of the hosts of all ranks of the world, for messages; [] where there is one.
    All ranks of the world must construct it, alike.
    """

    def __init__(
        self, groups: Sequence[Sequence[int]], backend: str, timeout_s: float, hosts: Sequence[str] = ()
    ) -> None:
        self.groups = groups
        self._hosts = hosts
        self._backend = backend
        self._timeout_s = timeout_s
        self.number = next(number for number, ranks in enumerate(groups) if dist.get_rank() in ranks)
        self._members = groups[self.number]
        self._splits: list[tuple[int, ...]] = []  # see `split`
        self.world_size = len(self._members)
        self.log = OperationLog()
        self._connect()
        tell_others_of_errors(self)

    def _connect(self) -> None:
        self._disconnected = threading.Event()
        self._ended: list[int] = []  # when this rank closed its own
        self._lost: str | None = None  # that it was another rank, which gave no reason
        self.log.clear()
        self.link: Link | None = Link(self, self.groups, self._backend, self._timeout_s)
        # The link itself where that is gloo
        is_gloo = self._backend == "gloo"
        self.control: Link | None = self.link if is_gloo else Link(self, self.groups, "gloo", self._timeout_s)
        self._more_links: list[Link] = []
        self._levels: list[tuple[Link, Link]] = []  # for each of `_splits`
        for sizes in self._splits:
            self._link_parts(sizes)
        self.name: str = self.link.group.group_name
        self.rank = dist.get_rank(self.link.group)
        self.run_rank = dist.get_rank()  # what messages name
        store = dist.distributed_c10d._get_default_store
        limit_silence_of_store(store())
        self.check = OperationCheck(self.log, store, f"hf_zero/{self.name}", self.rank, self.world_size)
        self.torch_calls = TorchCallCheck(self.log, store, f"hf_zero/{self.name}")
        self._monitor = None if is_gloo else FailureMonitor(self.control.connections, self.name)
        watch_for(self._look, self._disconnected)

    def add_gloo_link(self) -> Link:
        """Connections beside those of the collectives, which end with them. All ranks must call."""
        self._more_links.append(Link(self, self.groups, "gloo", self._timeout_s))
        return self._more_links[-1]

    def split(self, sizes: Sequence[int]) -> None:
        """Link the ranks of parts of each group, and those at the same place in them. All ranks must call, alike.

        `sizes`: By group, the number of consecutive ranks that are a part.
        """
        if tuple(sizes) not in self._splits:
            self._splits.append(tuple(sizes))
            self._link_parts(sizes)

    def _link_parts(self, sizes: Sequence[int]) -> None:
        pairs = list(zip(self.groups, sizes, strict=True))
        inside = [ranks[at : at + size] for ranks, size in pairs for at in range(0, len(ranks), size)]
        across = [ranks[place::size] for ranks, size in pairs for place in range(size)]
        links = [Link(self, groups, self._backend, self._timeout_s) for groups in (inside, across)]
        self._levels.append((links[0], links[1]))

    def levels(self, size: int) -> tuple[Any, Any]:
        """Return torch's groups that `split` has made for parts of `size` ranks: inside of this rank's part, and
        across the parts."""
        made = zip(self._splits, self._levels, strict=True)
        inside, across = next(links for sizes, links in made if sizes[self.number] == size)
        return inside.group, across.group

    @property
    def stopped(self) -> bool:
        """Whether the connections were closed: by this rank, or after an error."""
        return self._disconnected.is_set()

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

    def look_for_difference(self) -> None:
        """Raise RuntimeError, and stop all ranks, where a wait has no end because another rank runs other code."""
        self._compare(lambda: self.check.difference_now() or self.torch_calls.deadlock())

    def look_while_alone(self) -> None:
        """Raise LostRankError, and stop all ranks, where others do not come because they run other code.

        A rank that waits in a collective of torch is not looked for: the caller names those that do not come, and
        says what to do about it.
        """
        try:
            self._compare(self.check.difference_now)
        except RuntimeError as error:
            raise LostRankError(str(error)) from error

    def _compare(self, difference: Callable[[], ZeroError | None]) -> None:
        if self.check.is_time_to_compare() and (error := difference()) is not None:
            self.abandon(error)
            raise RuntimeError("ranks started different operations")
        if line := self.check.line_on_a_long_wait():
            logger.warning(line)

    def take_back(self) -> None:
        """Undo the last `add_to_log`: the others did not come, and this rank goes on without the call."""
        self.log.take_back()
        self.check.publish()

    def expect_equal(self, digests: Sequence[float], what: str) -> None:
        """`digests`: of the operations of every rank up to `what`, in rank order. All ranks must call."""
        if len(set(digests)) > 1:
            error = self.check.difference(digests)
            self.abandon(error)
            raise self.failure(what, error)

    # ---------------------------------------------------------------- the end
    def ended_ranks(self) -> list[int]:
        """Return the ranks that have died, or closed their connections to this one, before this one did."""
        return self._ended if self.control is None else self.control.ended_ranks()

    def abandon(self, reason: ZeroError) -> None:
        """Close the connections: ranks that wait for this one stop, and raise an error of the kind and text given."""
        if not self.stopped:
            publish_reason(self.name, reason)
            self.disconnect()

    def disconnect(self) -> None:
        """End what this rank waits for, until `reconnect`: pending operations are lost. Any thread may call."""
        self._ended = self.ended_ranks()
        for link in self._take_links():
            link.close()

    def _look(self) -> None:
        """Called by the watching thread: stop where the others have ended, or run another program.

        A rank whose device waits starts nothing more: its last operations are compared then, whatever its host does.
        Without a device the thread that waits does this itself.
        """
        try:
            self.torch_calls.look()
            if self._monitor is not None and self._monitor.look():
                self.look_for_difference()
        except RuntimeError:
            if not self.stopped:
                self._lost = "another rank closed its connections"
                self.disconnect()

    def end(self) -> None:
        """Give groups, sockets and threads back. All ranks must call, when nobody has more to begin here."""
        for link in self._take_links():
            link.end()

    def _take_links(self) -> list[Link]:
        self._disconnected.set()
        links = [self.link, self.control if self.control is not self.link else None, *self._more_links]
        links += itertools.chain.from_iterable(self._levels)
        self.link = self.control = None
        self._more_links, self._levels = [], []
        return [link for link in links if link is not None]

    def reconnect(self) -> None:
        """Start over after an `abandon` on some rank. All ranks must call; what was pending is lost."""
        self.disconnect()
        self._connect()

    def ended(self, what: str) -> ZeroError:
        """Return the error to raise where `what` is to start after the connections were closed."""
        text = f"rank {self.run_rank}: {what}: this engine was torn down, or stopped after an error; make another one"
        if reason := published_reason(self.name):
            return reason
        return StateError(text) if self._lost is None else self.failure(what, RuntimeError(self._lost))

    def failure(self, what: str, error: BaseException) -> ZeroError:
        """Return the error to raise when a collective broke off: the other rank's reason where it gave one."""
        # In this order: a rank publishes before it closes its connections. After a timeout gloo itself has closed all.
        ended = [] if _GLOO_TIMEOUT in str(error) else [self._members[rank] for rank in self.ended_ranks()]
        reason = published_reason(self.name)
        if reason is not None:
            self.disconnect()  # a third rank may wait for this one, in another operation than that which broke off
            return type(reason)(
                f"{reason}\nrank {self.run_rank} was in {what} and stops too. Called from: {call_site()}"
            )
        if ended:
            why = (
                f"rank(s) {ended}{self._on_hosts(ended)} have ended, or closed their connections after an error, or "
                "their hosts are cut off: see what they said last, and whether they were killed, as the system does "
                "where memory is short."
            )
            if not isinstance(error, LostRankError):  # which says no more than this
                why += f" ({_gist(error)})"
        else:
            why = (
                f"{_gist(error)}\nAnother rank has stopped, or runs other code than this one (desync_timeout is "
                f"{self._timeout_s:.0f} s). Forwards, saves and reads of sharded values need all ranks: call them on "
                "each, not on one alone."
            )
        reason = DivergenceError(
            f"rank {self.run_rank} of {dist.get_world_size()}: {what} did not complete: {why}\n"
            f"The last operations, where known:\n{self._last_operations()}\nCalled from: {call_site()}"
        )
        publish_reason(self.name, reason)
        self.disconnect()
        return reason

    def _on_hosts(self, ranks: Sequence[int]) -> str:
        names = dict.fromkeys(self._hosts[rank] for rank in ranks) if self._hosts else ()
        return f" on {', '.join(names)}" if names else ""

    def lost_ranks(self, what: str, error: BaseException) -> ZeroError | None:
        """Return the `failure` to raise instead of an error of torch, where other ranks have ended; None if not."""
        if self.stopped or self.ended_ranks() or published_reason(self.name) is not None:
            return self.failure(what, error)
        return None

    def tell_of_error(self, error: BaseException) -> None:
        """Tell the others that `error` ends this process. They read it when the process has ended, and not before."""
        if self.stopped:
            return
        if (reason := published_reason(self.name)) is not None:
            # An operation of torch's own says of the other rank only that its connection was closed.
            logger.error("rank %d: another rank had stopped before:\n%s", self.run_rank, reason)
        else:
            text = (
                f"rank {self.run_rank} of {dist.get_world_size()} ended by {type(error).__name__}: {_gist(error)}\n"
                f"Raised at: {call_site(error)}\nThe last operations, where known:\n{self._last_operations()}"
            )
            publish_reason(self.name, DivergenceError(text), ENDED)

    def _last_operations(self) -> str:
        """Return those of this rank, and of the others that wait."""
        try:
            known = self.check.last_operations()
        except (RuntimeError, ValueError):  # the store has gone; or another thread adds an operation
            known = {self.rank: self.log.last()[-_SHOWN:]}
        return "\n".join(f"  rank {self._members[rank]}: {', then '.join(lines)}" for rank, lines in known.items())


def _gist(error: BaseException) -> str:
    """Return the first line, which says what happened, and the last two before torch's stack: NCCL says why there."""
    text = str(error).partition("\nException raised from ")[0].partition(" This is typically caused by ")[0]
    lines = [line.strip()[:200] for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return " ".join([*lines[:1], *lines[1:][-2:]])
