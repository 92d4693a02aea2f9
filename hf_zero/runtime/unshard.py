"""Decides when the parameters of a unit are unsharded and resharded."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Set as AbstractSet

import torch
from torch import nn

from hf_zero.native.block_pool import Demand
from hf_zero.runtime.backward_watch import in_backward
from hf_zero.runtime.prefetch import GatheredAhead, PrefetchLimits
from hf_zero.runtime.step_events import StepEvents
from hf_zero.runtime.unit_pass import Ask, Phase, UnitPass
from hf_zero.runtime.use_order import Mark, UseOrder
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.unit import ShardUnit, UnitKind, UnitState

logger = logging.getLogger(__name__)

# A shard on a slow medium is read further ahead, into staging memory; the pool says how far that goes.
_MAX_READS_AHEAD = 4


class LiveUnits:
    """The units that are unsharded on demand, or will be: their elements and bytes, and the most there were.

    A unit is idle while it is UNSHARDING or KEPT: nobody uses it.
    """

    def __init__(self) -> None:
        # The sizes are those of the gather: a unit may be resharded differently.
        self._units: dict[int, tuple[int, int]] = {}  # elements and bytes
        self._idle: dict[int, ShardUnit] = {}  # in the order in which they became idle
        self.numel = self.peak_numel = 0
        self.nbytes = self.peak_bytes = 0
        self.idle_numel = 0
        self.demand = Demand()  # for memory of unsharded parameters
        self.observers: list[Callable[[], None]] = []  # called when bytes were added or removed

    def add(self, unit: ShardUnit) -> None:
        """Its gather has started."""
        self._units[id(unit)] = unit.numel, unit.full_bytes
        self.demand.add(unit.full_bytes)
        self.numel += unit.numel
        self.nbytes += unit.full_bytes
        self.peak_numel = max(self.peak_numel, self.numel)
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        self.set_idle(unit)
        for observer in self.observers:
            observer()

    def set_idle(self, unit: ShardUnit) -> None:
        self._idle[id(unit)] = unit
        self.idle_numel += self._units[id(unit)][0]

    def set_used(self, unit: ShardUnit) -> None:
        if self._idle.pop(id(unit), None) is not None:
            self.idle_numel -= self._units[id(unit)][0]

    def remove(self, unit: ShardUnit) -> None:
        self.set_used(unit)
        numel, nbytes = self._units.pop(id(unit), (0, 0))
        if nbytes:
            self.demand.remove(nbytes)
        self.numel -= numel
        self.nbytes -= nbytes
        for observer in self.observers:
            observer()

    @property
    def kept(self) -> list[ShardUnit]:
        """The KEPT ones, the longest kept first."""
        return [unit for unit in self._idle.values() if unit.state is UnitState.KEPT]

    def clear(self) -> None:
        for _, nbytes in self._units.values():
            self.demand.remove(nbytes)
        self._units.clear()
        self._idle.clear()
        self.numel = self.nbytes = self.idle_numel = 0


class OnDemandParams:
    """Gathers a unit before its use, reshards it after, and starts on the next one meanwhile.

    Invariants:
      - A unit is UNSHARDED from `before_use` to `after_use`, recomputation included; a held unit stays UNSHARDED until
        `reshard_all`, a pinned one until the end of the block that pinned it, or a step, which changes its values.
      - What is unsharded and not in use (prefetched or kept) stays within `stage3_max_live_parameters`, but for the
        next unit where the limits admit it.
      - What is gathered, kept and resharded when depends on nothing but an order of uses that is that of all ranks:
        [Note: Ranks that use different units] in unit_pass.py.

    Args:
        ask: Gives the largest numbers of all ranks, see Comm.largest.
    """

    def __init__(
        self,
        units: list[ShardUnit],
        limits: PrefetchLimits,
        events: StepEvents,
        ask: Ask,
    ) -> None:
        self.units = [unit for unit in units if unit.on_demand]
        self._events = events
        self._ask = ask
        self._open_uses: collections.Counter[int] = collections.Counter()  # forward uses that no backward has met
        self._forward_trains = False
        self._last_in_backward: ShardUnit | None = None
        self.orders: dict[Hashable, UseOrder] = {}  # by the kind of pass
        self._trained: Hashable = None  # the module whose forward backward goes through
        self._passes: list[UnitPass] = []  # under way, the innermost last: a backward may run inside a forward
        self._with_layers: dict[nn.Module, bool] = {}  # of the modules whose forwards have begun
        self._has_told = False  # that the ranks differ
        self._forwards_were_even = True  # all ranks used the same units in those that backward goes through
        self._limits = limits
        self._held: set[int] = set()
        self._open_forwards: set[object] = set()  # those with gradients that no backward has come to since the step
        self._keeps_graph = False  # the backward under way may be followed by another one over its graph
        self._in_graphs: dict[int, ShardUnit] = {}  # see `hold_for_backward`
        self._pinned: set[int] = set()
        self._streams = False  # inside `streaming`
        self._window = GatheredAhead()
        self.builds_graph = False  # this backward makes a graph of gradients: [Note: Double backward] in hooks.py
        self._graph_alive = False  # an earlier one did, and its graph may still be walked
        self.live = LiveUnits()
        for unit in self.units:  # by the engine that this one replaces
            if unit.state is not UnitState.SHARDED:
                self.live.add(unit)
            if unit.state is UnitState.UNSHARDED:
                self.live.set_used(unit)

    def before_use(self, unit: ShardUnit, phase: Phase) -> None:
        """Unshard `unit`. All ranks must call, in the same order; a forward of what is SAVING is one rank's own."""
        if not unit.on_demand or unit.state is UnitState.SAVING:
            return
        # Hooks of a backward run without gradients too.
        trains = phase is Phase.BACKWARD or torch.is_grad_enabled()
        if not trains and self._stays_unsharded(unit):
            return
        with torch.no_grad():
            if unit.kind is not UnitKind.LAYER or not self._passes:
                self.unshard(unit)
                return
            under_way = self._passes[-1]
            under_way.before_use(unit)
            order = under_way.order
            if not order.is_used_again(unit):
                order.note(Mark.USED, unit)
            left = self._note(unit, under_way)
            self.unshard(unit)
            if under_way.follows_order:
                self._prefetch(unit, order)
            else:
                under_way.gather_ahead(self._admits_next)
            if left is not None:
                order.note(Mark.REDUCED, left)
                if under_way.follows_order:
                    self.reduce(left)

    def read(self, unit: ShardUnit) -> None:
        """Unshard a unit of which something is read outside of its module's calls. All ranks must call, inside a pass
        those that read it."""
        if self._passes:
            self.before_use(unit, self._passes[-1].phase)
        else:
            if unit.state is UnitState.SHARDED:
                # The gather of a rank that reads alone would meet another one on a backend that matches by order.
                self._ask([0.0], f"a read of {unit.name}")
            with torch.no_grad():
                self.unshard(unit, exact=unit.state is UnitState.SHARDED)

    def follow(self, unit: ShardUnit) -> None:
        """See UnitActions."""
        order = self._passes[-1].order
        order.advance(unit)
        self.unshard(unit)
        self._prefetch(unit, order)

    def reduce(self, unit: ShardUnit) -> None:
        """See UnitActions."""
        self._events.unit_left(unit)

    def has_open_use(self, unit: ShardUnit) -> bool:
        """See UnitActions."""
        return self._open_uses[id(unit)] > 0

    @property
    def flats(self) -> list[FlatParam]:
        """The flat parameters that are sharded between uses."""
        return [flat for unit in self.units for flat in unit.flats if flat.on_demand]

    @property
    def all_pinned(self) -> bool:
        """Whether nothing will be gathered or resharded before a block ends that keeps everything unsharded."""
        return all(self._stays_unsharded(unit) for unit in self.units)

    def _stays_unsharded(self, unit: ShardUnit) -> bool:
        return unit.state is UnitState.UNSHARDED and id(unit) in self._pinned

    def _note(self, unit: ShardUnit, under_way: UnitPass) -> ShardUnit | None:
        """Record the use; return the unit that backward has left for good with it, if any."""
        if not under_way.order.advance(unit):
            return None
        if under_way.phase is Phase.FORWARD:
            self._open_uses[id(unit)] += self._forward_trains
            return None
        self._open_uses[id(unit)] -= 1
        before, self._last_in_backward = self._last_in_backward, unit
        return before if before is not None and not self.has_open_use(before) else None

    def unshard(self, unit: ShardUnit, *, wait: bool = True, exact: bool = False) -> None:
        """Unshard `unit`, or start to. All ranks must call, in the same order.

        `exact`: Not for a forward or a backward, whose values may be those of 8-bit messages.
        """
        if exact and not unit.is_exact:
            if unit.state is UnitState.UNSHARDED:
                unit.make_exact()
            else:
                self.reshard(unit)
        if unit.state is UnitState.SHARDED:
            unit.unshard(may_quantize=not exact)
            self.live.add(unit)
        if not wait:
            return
        if unit.state is UnitState.UNSHARDING:
            unit.wait_for_unshard()
            self.live.set_used(unit)
        elif unit.state is UnitState.KEPT:
            unit.use_again()
            self.live.set_used(unit)

    def gather_ahead(self, units: Iterable[ShardUnit]) -> None:
        """Start exact gathers of those of `units` that wait for nothing but the other ranks. All ranks must call."""
        with torch.no_grad():
            for unit in units:
                if unit.state is UnitState.SHARDED and not unit.is_offloaded:
                    self.unshard(unit, wait=False, exact=True)

    @contextlib.contextmanager
    def pinned(self, units: Iterable[ShardUnit]) -> Iterator[None]:
        """Keep `units` unsharded (exactly) inside the block: forwards there communicate nothing. All ranks must call.

        A step inside reshards them, because it changes their values.
        """
        mine = [unit for unit in units if unit.state is not UnitState.UNSHARDED]
        self._pinned.update(id(unit) for unit in mine)
        try:
            with torch.no_grad():
                for unit, after in itertools.zip_longest(mine, mine[1:]):
                    for one in (unit, after):  # one ahead, as in a forward
                        if one is not None and one.state is UnitState.SHARDED:
                            self.unshard(one, wait=False, exact=True)
                    self.unshard(unit, exact=True)
            yield
        finally:
            self._pinned.difference_update(id(unit) for unit in mine)
            for unit in mine:
                self.reshard(unit)

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """Forwards without gradients, many in a row: one gathers the first layer of the next. All ranks must call.

        Units that do not belong to a layer (embeddings, head) stay unsharded from the first forward to the end of the
        block. That is no more memory than one forward needs, which holds them while its layers come and go; it is left
        where `stage3_max_live_parameters` admits nothing ahead.
        """
        whole = {id(unit) for unit in self.units if unit.state is UnitState.UNSHARDED}
        roots = [unit for unit in self.units if unit.kind is not UnitKind.LAYER and id(unit) not in whole]
        layers = [unit.numel for unit in self.units if unit.kind is UnitKind.LAYER]
        if not self._limits.admits_next(max(layers, default=0)):
            roots = []
        self._pinned.update(id(unit) for unit in roots)
        self._streams = True
        try:
            yield
        finally:
            self._streams = False
            self._pinned.difference_update(id(unit) for unit in roots)
            for unit in self.units:
                if id(unit) not in whole:
                    self.reshard(unit)

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward of a training forward is still to come."""
        return bool(self._held)

    def stays_for_backward(self, unit: ShardUnit) -> bool:
        """Whether `unit` is unsharded until the end of backward, or of a block around it."""
        return id(unit) in self._held or id(unit) in self._pinned

    def hold(self, unit: ShardUnit) -> None:
        """Keep `unit` unsharded until `reshard_all` (the root unit: from forward to the end of backward)."""
        self._held.add(id(unit))

    def end_of_forward(self) -> Callable[[torch.Tensor], None]:
        """A forward has ended whose backward is to come; returns the hook of what it returned."""
        forward = object()
        self._open_forwards.add(forward)
        return lambda grad: self._open_forwards.discard(forward)

    def hold_for_backward(self, unit: ShardUnit) -> None:
        """Hold a unit that autograd reads without a hook that gathers it: in every backward up to the next step.

        More than one may come: a graph that is retained, or those of several forwards.
        """
        self.hold(unit)
        self._in_graphs[id(unit)] = unit

    def enter(self, unit: ShardUnit) -> None:
        """Unshard a unit that autograd will read, and hold it for backward. All ranks must call."""
        with torch.no_grad():
            self.unshard(unit)
        self.hold_for_backward(unit)

    def after_use(self, unit: ShardUnit) -> None:
        if unit.state is UnitState.SAVING:
            return
        if self.stays_for_backward(unit) or self.builds_graph or self._graph_alive or unit.state is UnitState.KEPT:
            return
        under_way = self._passes[-1] if self._passes else None
        if under_way is not None and unit.kind is UnitKind.LAYER and under_way.order.is_in_use(unit):
            under_way.order.note(Mark.LEFT, unit)
        if unit.on_demand and unit.state is UnitState.UNSHARDED:
            self._events.unit_used(unit, late=under_way is not None and under_way.phase is Phase.BACKWARD)
        room = unit.state is UnitState.UNSHARDED and self.live.idle_numel + unit.numel <= self._limits.live
        if room and self._is_needed_soon(unit):
            unit.keep()
            self.live.set_idle(unit)
        else:
            self.reshard(unit)

    def _is_needed_soon(self, unit: ShardUnit) -> bool:
        """Whether the next use of `unit` in this forward and backward is within `stage3_max_reuse_distance`."""
        if not self._limits.reuse:
            return False
        passed = 0
        for other in self._still_to_come():
            if other is unit:
                return True
            passed += other.numel
            if passed >= self._limits.reuse:
                return False
        return False

    def _still_to_come(self) -> Iterator[ShardUnit]:
        """The uses that follow, along the shared orders, up to the end of backward."""
        if not self._passes or not self._passes[-1].follows_order:
            return
        under_way = self._passes[-1]
        last = None
        for unit in under_way.order.upcoming():
            yield unit
            last = unit
        trains = under_way.phase is Phase.FORWARD and self._forward_trains
        if trains and under_way.order.reaches_its_end(last):
            yield from self._order(Phase.BACKWARD, self._trained).whole_pass()

    def _holds_layers(self, module: nn.Module | None) -> bool:
        """Whether a forward of `module` may use layers (None: the model's). One rank may call another part alone."""
        if module is not None and module not in self._with_layers:
            inside = set(module.modules())
            layers = (unit for unit in self.units if unit.kind is UnitKind.LAYER)
            self._with_layers[module] = any(unit.module in inside for unit in layers)
        return module is None or self._with_layers[module]

    def _order(self, *kind: Hashable) -> UseOrder:
        if kind not in self.orders:
            self.orders[kind] = UseOrder(self.units)
        return self.orders[kind]

    def _begin(self, phase: Phase, *kind: Hashable) -> None:
        """A pass begins, unless everything is unsharded to the end of a block: then no rank needs another."""
        if not self.all_pinned:
            order, even = self._order(phase, *kind), self._forwards_were_even
            self._passes.append(UnitPass(phase, order, self.units, self, self._ask, is_like_the_last=even))

    def begin_forward(self, module: nn.Module | None = None) -> None:
        """A forward of `module` begins, which no other one contains. All ranks must call."""
        self._passes.clear()  # of a forward that was left by an exception
        trains = torch.is_grad_enabled()
        self._window.clear()
        for unit in self.live.kept:  # of a forward whose backward has not come yet, and may never
            self.reshard(unit)
        self._forward_trains = trains
        if trains:
            self._trained = module
        if self._holds_layers(module):
            self._begin(Phase.FORWARD, module, trains)

    def end_forward(self) -> None:
        """The forward that has begun is over. Ranks whose forward needs other units are waited for. All ranks must
        call."""
        order = self._passes[-1].order if self._passes else None
        if not self._end_pass(Phase.FORWARD):
            self._forwards_were_even = False
            self._tell_once()
            for unit in self.live.kept:  # on this rank: another one may have others
                self.reshard(unit)
        elif self._streams and order is not None and not self._forward_trains:
            with torch.no_grad():
                self._prefetch_first(order)

    def _tell_once(self) -> None:
        if not self._has_told and self.flats[0].comm.run_rank == 0:
            logger.warning("ranks used different layers in a forward: from the next one on they agree on each gather")
        self._has_told = True

    def _end_pass(self, phase: Phase) -> bool:
        """Whether all ranks used the same units in the pass."""
        if not self._passes or self._passes[-1].phase is not phase:
            return True
        with torch.no_grad():
            even = self._passes[-1].end()
        self._passes.pop()
        return even

    def begin_backward(self) -> None:
        """All ranks must call. The root unit may have been resharded by the end of another backward."""
        self._all_used(late=False)
        self._keeps_graph = in_backward() and torch._C._autograd._get_current_graph_task_keep_graph()
        self._passes = [one for one in self._passes if one.phase is Phase.FORWARD]  # the last one may have failed
        self._begin(Phase.BACKWARD, self._trained)
        self._window.clear()
        self.builds_graph = False
        self._last_in_backward = None
        roots = [unit for unit in self.units if unit.kind is UnitKind.ROOT]
        for unit in (*roots, *self._in_graphs.values()):
            if unit.state is UnitState.SHARDED:
                self.before_use(unit, Phase.BACKWARD)
            self.hold(unit)

    def end_gathers(self) -> None:
        """Backward needs no unit any more on this rank. All ranks must call, before the last reduces."""
        self._end_pass(Phase.BACKWARD)

    def end_backward(self) -> None:
        self._forwards_were_even = True
        self._graph_alive = self.builds_graph
        if not self.builds_graph:
            self._all_used(late=True)
            # Another backward may begin with nodes of a loss that reads a weight of these, before any hook of ours.
            held = set(self._held) if self._open_forwards or self._keeps_graph else set[int]()
            self._reshard_all_but(self._pinned | held)
            self._held = held

    def _all_used(self, *, late: bool) -> None:
        for unit in self.units:
            if unit.state is UnitState.UNSHARDED and id(unit) not in self._pinned:
                self._events.unit_used(unit, late=late)

    def end_step(self) -> None:
        """A forward whose backward never came is forgotten."""
        self._open_uses.clear()
        self._open_forwards.clear()
        self._in_graphs.clear()
        self.reshard_all()

    def reshard_all(self) -> None:
        """Reshard everything at the end of a step, or of all: nothing is in use any more."""
        self._passes.clear()
        self._reshard_all_but(frozenset())

    def _reshard_all_but(self, kept: AbstractSet[int]) -> None:
        self._held.clear()
        self.builds_graph = self._graph_alive = False
        for unit in self.units:
            if id(unit) not in kept:
                self.reshard(unit)

    def forget(self) -> None:
        """A pass was broken off on all ranks, and its connections are closed: everything is in shards again."""
        self._held.clear()
        self._open_forwards.clear()
        self._in_graphs.clear()
        self._open_uses.clear()
        self._passes.clear()
        self._forwards_were_even = True
        self._streams = False
        self._last_in_backward = None
        self.builds_graph = self._graph_alive = False
        for order in self.orders.values():
            order.forget()
        for unit in self.units:
            unit.forget()
        self.live.clear()
        self._window.clear()

    def reshard_idle(self) -> None:
        """Reshard, at the end of a forward, what was gathered ahead and not used."""
        if self._streams and not torch.is_grad_enabled():
            return  # it was gathered for the next forward
        idle = {UnitState.UNSHARDING} if self._forward_trains else {UnitState.UNSHARDING, UnitState.KEPT}
        for unit in self.units:
            if unit.state in idle:
                self.reshard(unit)

    def reshard(self, unit: ShardUnit) -> None:
        """Reshard `unit` whatever its state."""
        if not unit.on_demand or unit.state is UnitState.SHARDED:
            return
        if unit.state is UnitState.UNSHARDING:
            unit.wait_for_unshard()
        unit.reshard()
        self.live.remove(unit)
        if unit in self._window.units:
            self._window.clear()

    def _make_room(self, following: ShardUnit) -> bool:
        """Reshard kept units that are used after `following` until it may be unsharded; return whether it may.

        The longest kept goes first: backward comes to it last.
        """
        room = self._limits.live - following.numel
        if self.live.idle_numel > room:
            for unit in self.live.kept:
                if unit not in self._window.units and self.live.idle_numel > room:
                    self.reshard(unit)
        return self.live.idle_numel <= room

    def _prefetch(self, unit: ShardUnit, order: UseOrder) -> None:
        """Start the gathers of what follows the use of `unit` along `order`."""
        if not self._limits.ahead:
            return
        self._read_ahead(itertools.islice(order.upcoming(), 1, _MAX_READS_AHEAD))
        window = self._window
        window.move_to(unit, order)
        while (following := window.following) is not None:
            is_next = not window.units
            # Many small forwards leave room for no more than hides a gather: the rest is for caches.
            if not is_next and (self._streams or window.numel + following.numel > self._limits.ahead):
                return
            if following.state is UnitState.SHARDED and not self._gather_if_admitted(following, is_next):
                return
            window.take()

    def _prefetch_first(self, order: UseOrder) -> None:
        """Start the gather of the first layer of the next forward along `order`, if all ranks share it."""
        first = next(order.whole_pass(), None)
        if first is not None and first.state is UnitState.SHARDED and self._limits.ahead:
            self._read_ahead(itertools.islice(order.whole_pass(), 1, _MAX_READS_AHEAD))
            self._gather_if_admitted(first, is_next=True)

    def _read_ahead(self, units: Iterable[ShardUnit]) -> None:
        for unit in units:
            if unit.state is UnitState.SHARDED:
                unit.prefetch()

    def _admits_next(self, unit: ShardUnit) -> bool:
        return bool(self._limits.ahead) and self._limits.admits_next(unit.numel)

    def _gather_if_admitted(self, unit: ShardUnit, is_next: bool) -> bool:
        # To start the gather of a unit that is updated or read first is to wait for that.
        if unit.is_offloaded and not is_next:
            return False
        if not self._make_room(unit) and not (is_next and self._limits.admits_next(unit.numel)):
            return False
        self.unshard(unit, wait=False)
        return True
