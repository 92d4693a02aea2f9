"""Where the parameters of units are, found by the parameter itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hf_zero.layout import Slot
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.unit import ShardUnit


@dataclass(frozen=True)
class ParamPlace:
    """One parameter's place."""

    unit: ShardUnit
    flat: FlatParam
    index: int  # in the flat parameter

    @property
    def slot(self) -> Slot:
        return self.flat.layout.slots[self.index]


class ParamIndex:
    """The places of all parameters of some units, as these are now.

    The flat parameters keep the parameters alive, so an id belongs to one parameter as long as the units live.
    """

    def __init__(self, units: Iterable[ShardUnit]) -> None:
        self._places = {
            id(param): ParamPlace(unit, flat, index)
            for unit in units
            for flat in unit.buffers
            for index, param in enumerate(flat.params)
        }

    def get(self, param: object) -> ParamPlace | None:
        return self._places.get(id(param))

    def __getitem__(self, param: object) -> ParamPlace:
        return self._places[id(param)]

    def __contains__(self, param: object) -> bool:
        return id(param) in self._places

    def __len__(self) -> int:
        return len(self._places)
