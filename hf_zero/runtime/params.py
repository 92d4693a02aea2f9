"""When the parameters of a unit are whole."""

from __future__ import annotations

import collections
import contextlib
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from hf_zero.config.resolved import ZeroSection
from hf_zero.runtime.order import UseOrder
from hf_zero.shards.partition import UnitKind
from hf_zero.shards.unit import ShardUnit, UnitState

# One unit ahead hides its gather behind the compute of the unit before; more would only hold memory.
_MAX_UNITS_AHEAD = 1
# A shard on a slow medium is read further ahead, into staging memory; the pool says how far that goes.
_MAX_READS_AHEAD = 4


class Phase(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class PrefetchLimits:
    """How far ahead parameters are gathered, in elements of whole units.

    `ahead` is `stage3_prefetch_bucket_size`: the next unit is gathered ahead whatever its size, further ones while
    their sum stays below (see _MAX_UNITS_AHEAD); 0 turns it off. `live` is `stage3_max_live_parameters`.
    """

    ahead: int
    live: int

    @classmethod
    def of(cls, zero: ZeroSection) -> PrefetchLimits:
        return cls(zero.stage3_prefetch_bucket_size if zero.overlap_comm else 0, zero.stage3_max_live_parameters)


class RepeatedUse:
    """What follows what while one thing is done again and again without gradients: a token for a token.

    Learned from the uses before, so that after the last layer of a token comes the first layer of the next one. No
    vote is needed: every use here is a gather, so ranks whose uses differ would have failed at the gather already.
    """

    def __init__(self) -> None:
        self._units: dict[int, ShardUnit] = {}
        # (unit before, unit) -> unit after, as in UseOrder
        self._next: dict[tuple[int, int], int] = {}
        self._before = self._here = -1

    def note(self, unit: ShardUnit) -> None:
        """`unit` is used now."""
        self._units[id(unit)] = unit
        self._next[(self._before, self._here)] = id(unit)
        self._before, self._here = self._here, id(unit)

    def upcoming(self) -> Iterator[ShardUnit]:
        """Units that followed the last times, nearest first."""
        before, here = self._before, self._here
        for _ in range(len(self._units)):
            after = self._next.get((before, here))
            if after is None:
                return
            yield self._units[after]
            before, here = here, after


class OnDemandParams:
    """Gathers a unit before its use, releases it after, and starts on the next one meanwhile.

    Invariant: a unit is FULL from `before_use` to `after_use`, recomputation included; a held unit stays FULL until
    `release_all`, a pinned one until the end of the block that pinned it, or a step, which changes its values.
    """

    def __init__(
        self, units: list[ShardUnit], limits: PrefetchLimits, on_left: Callable[[ShardUnit], None] = lambda unit: None
    ) -> None:
        """`on_left(unit)` is called in backward, at the same point on all ranks, when `unit` has had its last use."""
        self.units = [unit for unit in units if unit.on_demand]
        self._on_left = on_left
        self._open_uses: collections.Counter[int] = collections.Counter()  # forward uses that no backward has met
        self._forward_trains = False
        self._last_in_backward: ShardUnit | None = None
        self.orders = {phase: UseOrder(self.units) for phase in Phase}
        self._limits = limits
        self._held: set[int] = set()
        self._pinned: set[int] = set()
        self._stream: RepeatedUse | None = None  # inside `streaming`
        self.builds_graph = False  # this backward makes a graph of gradients: [Note: Double backward] in hooks.py
        self._graph_alive = False  # an earlier one did, and its graph may still be walked
        self.live_numel = 0
        self.live_bytes = 0
        self.peak_live_bytes = 0

    def before_use(self, unit: ShardUnit, phase: Phase) -> None:
        """Make `unit` whole. All ranks must call, in the same order."""
        if not unit.on_demand:
            return
        # Hooks of a backward run without gradients too.
        trains = phase is Phase.BACKWARD or torch.is_grad_enabled()
        if not trains and (self._stream is not None or self._stays_whole(unit)):
            self._use_again(unit)
            return
        layer = unit.kind is UnitKind.LAYER
        left = self._note(unit, phase) if layer else None
        with torch.no_grad():
            self.make_full(unit)
            if layer:
                self._prefetch(self.orders[phase].upcoming)
            if left is not None:
                self._on_left(left)

    def _stays_whole(self, unit: ShardUnit) -> bool:
        return unit.state is UnitState.FULL and id(unit) in self._pinned

    def _use_again(self, unit: ShardUnit) -> None:
        """A use that belongs to no training pass, and is not recorded in the order of one."""
        if unit.kind is not UnitKind.LAYER or self._stream is None:
            self.make_full(unit)
            return
        expected = next(self._stream.upcoming(), None)
        self._stream.note(unit)
        if expected is not None and expected is not unit and expected.state is UnitState.GATHERING:
            self._release(expected)  # another branch was taken
        self.make_full(unit)
        self._prefetch(self._stream.upcoming)

    def _note(self, unit: ShardUnit, phase: Phase) -> ShardUnit | None:
        """Record the use; return the unit that backward has left for good with it, if any."""
        if not self.orders[phase].note(unit):
            return None
        if phase is Phase.FORWARD:
            self._open_uses[id(unit)] += self._forward_trains
            return None
        self._open_uses[id(unit)] -= 1
        before, self._last_in_backward = self._last_in_backward, unit
        return before if before is not None and self._open_uses[id(before)] <= 0 else None

    def make_full(self, unit: ShardUnit) -> None:
        """Make `unit` whole outside of forward and backward. All ranks must call."""
        if unit.state is UnitState.SHARDED:
            self._start(unit)
        if unit.state is UnitState.GATHERING:
            unit.gather_finish()

    def make_sharded(self, unit: ShardUnit) -> None:
        """Release `unit` whatever its state."""
        self._release(unit)

    @contextlib.contextmanager
    def pinned(self, units: Iterable[ShardUnit]) -> Iterator[None]:
        """Keep `units` whole inside the block: forwards there need no communication. All ranks must call.

        A step inside releases them, because it changes their values.
        """
        mine = [unit for unit in units if unit.state is not UnitState.FULL]
        self._pinned.update(id(unit) for unit in mine)
        try:
            with torch.no_grad():
                for unit, after in itertools.zip_longest(mine, mine[1:]):
                    for one in (unit, after):  # one ahead, as in a forward
                        if one is not None and one.state is UnitState.SHARDED:
                            self._start(one)
                    self.make_full(unit)
            yield
        finally:
            self._pinned.difference_update(id(unit) for unit in mine)
            for unit in mine:
                self._release(unit)

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """Forwards without gradients, many in a row: prefetch goes on from one to the next. All ranks must call.

        Units that do not belong to a layer (embeddings, head) stay whole from the first forward to the end of the
        block. That is no more memory than one forward needs, which holds them while its layers come and go; it is left
        where they and two layers exceed `stage3_max_live_parameters`.
        """
        whole = {id(unit) for unit in self.units if unit.state is UnitState.FULL}
        roots = [unit for unit in self.units if unit.kind is not UnitKind.LAYER and id(unit) not in whole]
        layers = [unit.numel for unit in self.units if unit.kind is UnitKind.LAYER]
        if sum(unit.numel for unit in roots) + 2 * max(layers, default=0) > self._limits.live:
            roots = []
        self._pinned.update(id(unit) for unit in roots)
        self._stream = RepeatedUse()
        try:
            yield
        finally:
            self._stream = None
            self._pinned.difference_update(id(unit) for unit in roots)
            for unit in self.units:
                if id(unit) not in whole:
                    self._release(unit)

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward of a training forward is still to come."""
        return bool(self._held)

    def hold(self, unit: ShardUnit) -> None:
        """Keep `unit` whole until `release_all` (the root unit: from forward to the end of backward)."""
        self._held.add(id(unit))

    def after_use(self, unit: ShardUnit) -> None:
        kept = id(unit) in self._held or id(unit) in self._pinned
        if not kept and not self.builds_graph and not self._graph_alive:
            self._release(unit)

    def begin_forward(self) -> None:
        if self._stream is not None and not torch.is_grad_enabled():
            return  # a step votes on the order of the training's forwards
        self.orders[Phase.FORWARD].begin()
        self._forward_trains = torch.is_grad_enabled()

    def begin_backward(self) -> None:
        """All ranks must call. The root unit may have been released by the end of another backward."""
        self.orders[Phase.BACKWARD].begin()
        self.builds_graph = False
        self._last_in_backward = None
        for unit in self.units:
            if unit.kind is UnitKind.ROOT:
                with torch.no_grad():
                    self.make_full(unit)
                self.hold(unit)

    def end_backward(self) -> None:
        self._graph_alive = self.builds_graph
        if not self.builds_graph:
            self._release_all_but(self._pinned)

    def end_step(self) -> None:
        """A forward whose backward never came is forgotten."""
        self._open_uses.clear()
        self.release_all()

    def release_all(self) -> None:
        """End of a step, or of all: nothing is in use any more."""
        self._release_all_but(frozenset())

    def _release_all_but(self, kept: AbstractSet[int]) -> None:
        self._held.clear()
        self.builds_graph = self._graph_alive = False
        for unit in self.units:
            if id(unit) not in kept:
                self._release(unit)

    def forget(self) -> None:
        """A pass was broken off on all ranks, and its connections are closed: everything is in shards again."""
        self._held.clear()
        self._open_uses.clear()
        self._stream = self._last_in_backward = None
        self.builds_graph = self._graph_alive = False
        for order in self.orders.values():
            order.forget()
        for unit in self.units:
            unit.forget()
        self.live_numel = self.live_bytes = 0

    def release_idle(self) -> None:
        """End of a forward: give back what was gathered ahead and not used."""
        if self._stream is not None and not torch.is_grad_enabled():
            return  # it was gathered for the next forward
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                self._release(unit)

    def _start(self, unit: ShardUnit) -> None:
        unit.gather_start()
        self.live_numel += unit.numel
        self.live_bytes += unit.full_bytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)

    def _release(self, unit: ShardUnit) -> None:
        if not unit.on_demand or unit.state is UnitState.SHARDED:
            return
        if unit.state is UnitState.GATHERING:
            unit.gather_finish()
        unit.release()
        self.live_numel -= unit.numel
        self.live_bytes -= unit.full_bytes

    def _prefetch(self, upcoming: Callable[[], Iterator[ShardUnit]]) -> None:
        if not self._limits.ahead:
            return
        for unit in itertools.islice(upcoming(), _MAX_UNITS_AHEAD, _MAX_READS_AHEAD):
            if unit.state is UnitState.SHARDED:
                unit.prefetch()
        ahead = 0
        for unit in itertools.islice(upcoming(), _MAX_UNITS_AHEAD):
            ahead += unit.numel
            if ahead > max(self._limits.ahead, unit.numel) or self.live_numel + unit.numel > self._limits.live:
                return
            if unit.state is UnitState.SHARDED:
                self._start(unit)
