"""Moves parameters out of the units of former engines into new ones, a flat parameter at a time.

| what changes | the new flat parameter | communication | memory beside the shards |
|---|---|---|---|
| trainability, names | is the old one (`reuse`) | none | none |
| type or medium | takes the old shard (`initialize`) | none | its shard and its unsharded form, in turn |
| which elements a rank owns | takes unsharded values (`initialize`) | an all-gather | unsharded units in part moved |

An old flat parameter stays unsharded until the last of its parameters has moved. Small ones move last, into the unit
of what is never resharded.

Where the old engine trained, values come from its master weights, which have more digits than 16-bit parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hf_zero.distributed.comm import Comm
from hf_zero.native.host_memory import return_freed_memory
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.param_index import ParamIndex, ParamPlace
from hf_zero.sharding.placement import FlatParamSpec, Placement
from hf_zero.sharding.unit import ShardUnit, UnitState, gather


class LayoutChange:
    """The holder of the values of a model's parameters while its units change.

    Invariant: an old flat parameter lives until all its parameters are in new ones, or have been replaced by the user.
    """

    def __init__(self, old: Iterable[ShardUnit], comm: Comm) -> None:
        """`comm`: the group of the new flat parameters."""
        self._comm = comm
        units = list(old)
        self._places = ParamIndex(units, held_only=True)  # of the parameters that are in no new flat parameter yet
        self._left = dict.fromkeys(flat for unit in units for flat in unit.flats)
        self._masters: dict[FlatParam, torch.Tensor] = {}
        self._gathered: set[FlatParam] = set()

    def reuse(self, spec: FlatParamSpec, params: Sequence[nn.Parameter], placement: Placement) -> FlatParam | None:
        """The old flat parameter as the new one, where nothing of its memory changes; else None. No communication."""
        source = self._source_of(params)
        if source is None or not source.can_become(spec, params, placement, self._comm):
            return None
        source.become(spec.layout, placement)
        for param in params:
            self._places.pop(param)
        del self._left[source]
        return source

    def initialize(self, flat: FlatParam) -> None:
        """Give `flat` its first values. All ranks must call, in the same order."""
        source = self._source_of(flat.params)
        exact = source is None or source.dtype == flat.dtype or source.master is None or flat.on_demand
        if source is not None and exact and flat.fits(source, flat.params):
            flat.initialize_from(source, share=True)
        else:
            for param in flat.params:
                if (place := self._places.get(param)) is not None:
                    self._unshard(place)
                    if place.flat.master is not None and place.flat.master.dtype != place.flat.dtype:
                        self._show_master(place, param)  # it has more digits
            flat.initialize_from_params()
        self._moved(flat.params)

    def _source_of(self, params: Sequence[nn.Parameter]) -> FlatParam | None:
        """The old flat parameter of the first of `params`, if nothing of it has moved."""
        place = self._places.get(params[0]) if params else None
        return place.flat if place is not None and all(param in self._places for param in place.flat.params) else None

    def _unshard(self, place: ParamPlace) -> None:
        """Gather this flat parameter alone: others of its unit may be in new units already."""
        is_there = place.unit.state is not UnitState.SHARDED and place.unit.is_exact
        if not place.flat.on_demand or is_there or place.flat in self._gathered:
            return
        self._gathered.add(place.flat)
        with torch.no_grad():
            gather([place.flat])

    def _show_master(self, place: ParamPlace, param: nn.Parameter) -> None:
        """Point `param` at its full master weights, which are kept until all of the flat parameter has moved."""
        if place.flat not in self._masters:
            self._masters[place.flat] = place.flat.full_master()
        slot = place.slot
        param.data = self._masters[place.flat][slot.offset : slot.end].view(slot.shape)

    def finish(self) -> None:
        """Forget what no new flat parameter took: parameters that have left the model."""
        for flat in list(self._left):
            self._discard(flat)
        self._places = ParamIndex()

    def _moved(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            place = self._places.pop(param)
            if place is not None and not any(other in self._places for other in place.flat.params):
                self._discard(place.flat)

    def _discard(self, flat: FlatParam) -> None:
        del self._left[flat]
        self._masters.pop(flat, None)
        self._gathered.discard(flat)
        nbytes = flat.full_bytes
        flat.discard()
        return_freed_memory(nbytes)
