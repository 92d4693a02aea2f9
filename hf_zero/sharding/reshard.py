"""Moves parameters out of the units of former engines into new ones, a flat parameter at a time.

| what changes | the new flat parameter | communication | memory beside the shards |
|---|---|---|---|
| trainability, names | is the old one (`reuse`) | none | none |
| type or medium | takes the values of the old shard (`fill`) | none | its shard and its unsharded form, in turn |
| which elements a rank owns | takes the unsharded values (`fill`) | an all-gather | one unsharded unit |

Where the old engine trained, values come from its master weights, which have more digits than 16-bit parameters.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.distributed.comm import Comm
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.home import FlatParamSpec, Placement
from hf_zero.sharding.unit import ShardUnit, UnitState, gather


@dataclass(frozen=True)
class _Place:
    unit: ShardUnit
    buffer: FlatParam
    index: int


class LayoutChange:
    """Where the values of a model's parameters are while its units change.

    Invariant: an old buffer lives until all its parameters are in new ones, or have been replaced by the user.
    """

    def __init__(self, old: Iterable[ShardUnit], comm: Comm) -> None:
        """`comm`: the group of the new flat parameters."""
        self._comm = comm
        self._places: dict[int, _Place] = {}
        self._left: collections.Counter[FlatParam] = collections.Counter()
        self._masters: dict[FlatParam, torch.Tensor] = {}
        self._gathered: set[FlatParam] = set()
        for unit in old:
            for buffer in unit.buffers:
                self._left[buffer] = 0
                for index, param in enumerate(buffer.params):
                    if buffer.holds(index):  # else it was replaced, by a resize for one
                        self._places[id(param)] = _Place(unit, buffer, index)
                        self._left[buffer] += 1

    def reuse(self, spec: FlatParamSpec, params: Sequence[nn.Parameter], placement: Placement) -> FlatParam | None:
        """The old flat parameter as the new one, where nothing of its memory changes; else None. No communication."""
        place = self._places.get(id(params[0])) if params else None
        if place is None or any(id(param) not in self._places for param in place.buffer.params):
            return None
        source = place.buffer
        if not source.can_become(spec, params, placement, self._comm):
            return None
        source.check_placeholders()
        source.become(spec.layout, placement)
        for param in params:
            del self._places[id(param)]
        del self._left[source]
        return source

    def fill(self, buffer: FlatParam) -> None:
        """Give `buffer` its first values. All ranks must call, in the same order."""
        places = [self._places.get(id(param)) for param in buffer.params]
        source = places[0].buffer if places and places[0] is not None else None
        held = source is not None and all(id(param) in self._places for param in source.params)
        exact = source is None or source.dtype == buffer.dtype or source.master is None or buffer.on_demand
        if source is not None and held and exact and buffer.fits(source, buffer.params):
            source.check_placeholders()
            buffer.fill_from(source, share=True)
        else:
            for place, param in zip(places, buffer.params, strict=True):
                if place is not None:
                    self._unshard(place)
                    if _has_more_digits(place.buffer):
                        self._show_master(place, param)
            buffer.fill_from_params()
        self._moved(buffer.params)

    def _unshard(self, place: _Place) -> None:
        """Gather this flat parameter alone: others of its unit may be in new units already."""
        if not place.buffer.on_demand or place.unit.state is not UnitState.SHARDED or place.buffer in self._gathered:
            return
        self._gathered.add(place.buffer)
        with torch.no_grad():
            gather([place.buffer])

    def _show_master(self, place: _Place, param: nn.Parameter) -> None:
        """Point `param` at its full master weights, which the buffer keeps until all its parameters have moved."""
        if place.buffer not in self._masters:
            self._masters[place.buffer] = place.buffer.full_master()
        slot = place.buffer.layout.slots[place.index]
        param.data = self._masters[place.buffer][slot.offset : slot.end].view(slot.shape)

    def finish(self) -> None:
        """Forget what no new buffer took: parameters that have left the model."""
        for buffer in list(self._left):
            buffer.discard()
        self._left.clear()
        self._masters.clear()
        self._gathered.clear()
        self._places.clear()

    def _moved(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            place = self._places.pop(id(param), None)
            if place is None:
                continue
            self._left[place.buffer] -= 1
            if self._left[place.buffer] == 0:
                del self._left[place.buffer]
                self._masters.pop(place.buffer, None)
                self._gathered.discard(place.buffer)
                place.buffer.discard()


def _has_more_digits(buffer: FlatParam) -> bool:
    return buffer.master is not None and buffer.master.dtype != buffer.dtype
