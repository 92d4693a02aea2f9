"""Bytes that a rank gets from others in each pass of a training step, counted as the engine's operations begin."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_zero.distributed.rank_groups import RankGroups


@dataclass
class Traffic:
    """Operations of one rank, and the bytes that it gets from others by them."""

    operations: int = 0
    inside: float = 0.0  # bytes from the ranks of its own host
    across: float = 0.0  # bytes from those of other hosts
    decoded: float = 0.0  # bytes of the values that it makes of 8-bit messages


@dataclass(frozen=True)
class Pass:
    """A pass of a step, which is made `times` times: by as many micro-batches, or once."""

    name: str  # forward, backward or update
    times: int
    traffic: Traffic


@dataclass
class TrafficCounter:
    """The traffic of rank `rank` of `world_size`, by pass.

    Args:
        per_host: The ranks of each host, which are consecutive.
        direct: Ranks send to each other, as over gloo, but for its all-reduce. Else they form a ring, as over NCCL.
    """

    rank: int
    world_size: int
    per_host: int
    direct: bool
    passes: list[Pass] = field(default_factory=list)
    _now: Traffic = field(default_factory=Traffic)

    def begin_step(self) -> None:
        """Forget the passes before."""
        self.passes.clear()

    def begin(self, name: str, times: int = 1) -> None:
        """Count from now on what another pass sends; see Pass."""
        self._now = Traffic()
        self.passes.append(Pass(name, times, self._now))

    def operation(self) -> None:
        """Count the start of an operation."""
        self._now.operations += 1

    def among_all(self, op: str, nbytes: int) -> None:
        """Count an operation of all ranks on `nbytes`, the whole tensor's, in one step."""
        share = (2 if op == "all_reduce" else 1) * nbytes / self.world_size
        others = self.world_size - 1
        away: float = self.world_size - self.per_host
        if op == "all_reduce" or not self.direct:
            # A ring enters a host once, and leads from rank to rank there.
            away = others / self.per_host if away else 0
        self._now.inside += share * (others - away)
        self._now.across += share * away

    def among(self, ranks: tuple[int, ...], nbytes: float, *, message: float = 0.0, values: float = 0.0) -> int:
        """Count an exchange in which each of `ranks`, one of which is this one, gives `nbytes` to each other one.

        Returns the number of 8-bit messages that this rank would hold, its own among them.

        Args:
            message: The bytes of the 8-bit message that is sent instead; 0: there is none. Where hosts have several of
                the ranks, and they send to each other, it crosses between hosts only.
            values: The bytes of the values in it.
        """
        own = sum(rank // self.per_host == self.rank // self.per_host for rank in ranks)
        others, away, number = len(ranks) - 1, float(len(ranks) - own), len(ranks)
        inside = across = message or nbytes
        if not self.direct:
            away = others / own if away else 0.0
        elif (hosts := RankGroups.of_hosts(ranks, self.rank, self.per_host)) is not None:
            away, number, inside = hosts.number - 1.0, hosts.number, nbytes
        self._now.inside += inside * (others - away)
        self._now.across += across * away
        self._now.decoded += values * number
        return number
