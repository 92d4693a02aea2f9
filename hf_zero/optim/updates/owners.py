"""The ranks that update full parameters, for optimizers that need more of one than a range of elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.layout import Slice, Slot
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.sharding.shard import placeholder, slices_by_name


@dataclass(frozen=True)
class OwnedParam:
    """A parameter that one rank updates in full.

    Invariant: between steps `full` has shape, type and device of the parameter's master, but no memory: it is a
    placeholder.
    """

    acc: GradAccumulator
    index: int  # of the parameter in its flat parameter
    owner: int
    slices: tuple[Slice | None, ...]  # of the master and the gradient, what each of the ranks keeps
    full: torch.Tensor | None  # on the owner: what the user's optimizer holds in its param groups

    @property
    def slot(self) -> Slot:
        return self.acc.flat.layout.slots[self.index]

    @property
    def dtype(self) -> torch.dtype:
        assert self.acc.flat.master is not None
        return self.acc.flat.master.dtype

    def release(self) -> None:
        """Forget the values."""
        if self.full is not None:
            self.full.grad = None
            self.full.data = placeholder(self.slot.shape, self.dtype, self.full.device)


class Owners:
    """Deals full parameters out to `ranks`, the same on all of them.

    Args:
        ranks: Those that have the shards between them, in order.
        wants: Whether the parameters of a param group are needed in full.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], device: torch.device, wants: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        self.wants = wants
        self.params: list[OwnedParam] = []
        self._rank = rank
        self._device = device
        self._loads = dict.fromkeys(ranks, 0)  # elements

    def adopt(self, places: Sequence[tuple[GradAccumulator, int]]) -> list[OwnedParam]:
        """Find an owner for each parameter (accumulator, index), in their order; the largest are dealt out first."""
        sizes = [acc.flat.layout.slots[index].numel for acc, index in places]
        owners = [0] * len(places)
        for place in sorted(range(len(places)), key=lambda place: -sizes[place]):
            owners[place] = min(self._loads, key=lambda rank: self._loads[rank])
            self._loads[owners[place]] += sizes[place]
        kept: dict[GradAccumulator, list[dict[str, Slice]]] = {}  # by rank, by parameter
        for acc in dict.fromkeys(acc for acc, _ in places):
            layout = acc.flat.layout
            kept[acc] = [slices_by_name(layout, rank) for rank in range(layout.world_size)]
        adopted = []
        for (acc, index), owner in zip(places, owners, strict=True):
            slot, master = acc.flat.layout.slots[index], acc.flat.master
            assert master is not None
            slices = tuple(by_name.get(slot.name) for by_name in kept[acc])
            full = placeholder(slot.shape, master.dtype, self._device) if owner == self._rank else None
            adopted.append(OwnedParam(acc, index, owner, slices, full))
        self.params += adopted
        return adopted
