"""Finds the place of a parameter in the units, by the parameter itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from hf_zero.layout import Slice, Slot
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

    @property
    def slice(self) -> Slice | None:
        """The slice of it that this rank owns; None if it owns nothing."""
        return self.flat.slice_of(self.index)


class ParamIndex:
    """The places of all parameters of some units, as these were when they were added.

    The flat parameters keep the parameters alive, so an id belongs to one parameter as long as the units live.

    Args:
        held_only: Leave out what is no longer what its flat parameter made it: replaced by a resize, for one.
    """

    def __init__(self, units: Iterable[ShardUnit] = (), *, held_only: bool = False) -> None:
        self._places: dict[int, ParamPlace] = {}
        for unit in units:
            self.add(unit, held_only=held_only)

    def add(self, unit: ShardUnit, *, held_only: bool = False) -> None:
        for flat in unit.flats:
            for index, param in enumerate(flat.params):
                if not held_only or flat.holds(index):
                    self._places[id(param)] = ParamPlace(unit, flat, index)

    def pop(self, param: nn.Parameter) -> ParamPlace | None:
        """Forget a parameter; its place, if it had one."""
        return self._places.pop(id(param), None)

    @property
    def units(self) -> list[ShardUnit]:
        """The units of the parameters, in the order in which they were added."""
        return list(dict.fromkeys(place.unit for place in self._places.values()))

    def units_of(self, params: Iterable[nn.Parameter]) -> list[ShardUnit]:
        """The units that hold some of these parameters, in the order in which they were added."""
        found = {place.unit for param in params if (place := self.get(param)) is not None}
        return [unit for unit in self.units if unit in found]

    def get(self, param: object) -> ParamPlace | None:
        return self._places.get(id(param))

    def __getitem__(self, param: object) -> ParamPlace:
        return self._places[id(param)]

    def __contains__(self, param: object) -> bool:
        return id(param) in self._places
