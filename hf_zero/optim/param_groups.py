"""The slices of parameters that a rank updates, instead of parameters in an optimizer's param groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.errors import ConfigError
from hf_zero.layout import Slice
from hf_zero.optim.registry import check_unsharded_types
from hf_zero.optim.updates.owners import OwnedParam, Owners
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.sharding.param_index import ParamPlace
from hf_zero.sharding.shard import slice_of


@dataclass(frozen=True)
class OwnedSlice:
    """The elements of one parameter that this rank owns, and what the user's optimizer holds for them.

    Where a rule of hf_zero's own updates them, `masters` is one placeholder.
    """

    acc: GradAccumulator
    index: int  # of the parameter in its flat parameter
    slice: Slice
    masters: list[torch.Tensor]  # views of the master shard: what the user's optimizer holds in its param groups
    grads: list[torch.Tensor]  # views of the gradient shard, as `masters`; none where it is no memory of their type

    def is_at(self, place: ParamPlace) -> bool:
        return self.acc.flat is place.flat and self.index == place.index

    @property
    def native(self) -> bool:
        return self.acc.flat.placement.native

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of `masters`, in their type; none where a rule of hf_zero's own updates them."""
        if self.native:
            return []
        if not self.acc.flat.scaled:
            return [grad.to(master.dtype) for master, grad in zip(self.masters, self.grads, strict=True)]
        values = self.acc.read_slice(self.slice).split([master.numel() for master in self.masters])
        return [grad.view_as(master) for master, grad in zip(self.masters, values, strict=True)]


def own_slice(acc: GradAccumulator, index: int, slice_: Slice) -> OwnedSlice:
    """The tensors that the optimizer is to hold for `slice_` of the flat parameter's parameter `index`."""
    assert acc.flat.master is not None
    masters = acc.flat.master.slice_tensors(slice_)
    if acc.flat.placement.native or acc.flat.scaled:
        return OwnedSlice(acc, index, slice_, masters, [])
    return OwnedSlice(acc, index, slice_, *_split_alike(masters, acc.shard.slice_tensors(slice_)))


def _split_alike(a: list[torch.Tensor], b: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two lists that tile one slice, one of them perhaps in one tensor, split at the same places."""
    if len(a) == len(b):
        return a, b
    if len(a) == 1:
        return list(torch.split(a[0].view(-1), [tensor.numel() for tensor in b])), b
    if len(b) == 1:
        return a, list(torch.split(b[0].view(-1), [tensor.numel() for tensor in a]))
    raise AssertionError(f"a run split into {len(a)} and {len(b)} tensors")


def shard_state(state: dict[str, Any], owned: OwnedSlice) -> dict[torch.Tensor, dict[str, Any]]:
    """Cut the state that the optimizer had for an unsharded parameter to the tensors that this rank updates of it."""
    numel = owned.acc.flat.layout.slots[owned.index].numel
    sharded: dict[torch.Tensor, dict[str, Any]] = {master: {} for master in owned.masters}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() == numel:
            mine = slice_of(value.detach(), owned.slice)
            if owned.acc.flat.placement.masters_as_params:  # it may have been made before the parameter was cast
                mine = mine.to(owned.acc.flat.dtype)
            chunks = torch.split(mine, [master.numel() for master in owned.masters])
            for master, chunk in zip(owned.masters, chunks, strict=True):
                sharded[master][key] = chunk.clone().view(master.shape)
        else:
            for master in owned.masters:
                sharded[master][key] = value.clone() if isinstance(value, torch.Tensor) else value
    return sharded


class ShardedGroups:
    """Puts the elements that this rank updates into an optimizer's param groups, instead of unsharded parameters.

    Parameters without masters wait, with their group, until `take` gets a gradient accumulator for them.
    """

    native_state: list[
        tuple[OwnedSlice, dict[str, Any]]
    ]  # what the optimizer had for natively updated slices taken last

    def __init__(self, optimizer: torch.optim.Optimizer, owners: Owners | None = None) -> None:
        """`owners` deals out the parameters that the optimizer needs in full."""
        self._owners = owners
        self._optimizer = optimizer
        self._unsharded_types: dict[int, set[torch.dtype]] = {}  # of what each group, by id, holds unsharded
        self._state = dict(optimizer.state)
        self._live_state = optimizer.state
        self._live_state.clear()
        self._waiting: list[tuple[dict[str, Any], torch.Tensor]] = []
        self.native_state = []
        for group in optimizer.param_groups:
            self.wait_for(group, list(group["params"]))
            group["params"].clear()  # the list itself, which an optimizer may have kept (LBFGS)

    def wait_for(self, group: dict[str, Any], params: Iterable[torch.Tensor]) -> None:
        self._waiting.extend((group, param) for param in params)

    def take(self, accumulators: Sequence[GradAccumulator]) -> list[OwnedSlice]:
        """Take the waiting parameters whose gradients are in `accumulators`; return what this rank updates of them."""
        places: dict[torch.Tensor, tuple[GradAccumulator, int]]
        places = {p: (acc, i) for acc in accumulators for i, p in enumerate(acc.flat.params)}
        taken: list[OwnedSlice] = []
        left = []
        self.native_state = []
        adopted = self._adopt(places)
        for group, param in self._waiting:
            if param not in places:
                left.append((group, param))
                continue
            acc, index = places[param]
            slice_ = acc.flat.slice_of(index)
            owned = own_slice(acc, index, slice_) if slice_ is not None else None
            taken += [owned] if owned is not None else []
            if param in adopted:
                self._hold_unsharded(group, param, adopted[param])
                continue
            if owned is None:
                continue  # other ranks own all of it
            group["params"].extend(owned.masters)
            self._move_state(param, owned)
        self._waiting = left
        return taken

    def _adopt(self, places: Mapping[torch.Tensor, tuple[GradAccumulator, int]]) -> dict[torch.Tensor, OwnedParam]:
        """The owners of the waiting parameters that are needed unsharded, by parameter."""
        if self._owners is None:
            return {}
        wanted = [(group, param) for group, param in self._waiting if param in places and self._owners.wants(group)]
        adopted = self._owners.adopt([places[param] for _, param in wanted])
        for (group, _), one in zip(wanted, adopted, strict=True):
            types = self._unsharded_types.setdefault(id(group), set())
            types.add(one.dtype)
            check_unsharded_types(self._optimizer, group, types)
        return {param: one for (_, param), one in zip(wanted, adopted, strict=True)}

    def _hold_unsharded(self, group: dict[str, Any], param: torch.Tensor, adopted: OwnedParam) -> None:
        state = self._state.pop(param, None)
        if adopted.full is not None:
            group["params"].append(adopted.full)
            if state is not None:
                self._live_state[adopted.full] = state

    def _move_state(self, param: torch.Tensor, owned: OwnedSlice) -> None:
        if param not in self._state:
            return
        sharded = shard_state(self._state.pop(param), owned)
        if owned.native:
            self.native_state.append((owned, sharded[owned.masters[0]]))
        else:
            self._live_state.update(sharded)

    def refuse_strangers(self) -> None:
        """Raise ConfigError if a trainable parameter is no parameter of the model."""
        for _, param in self._waiting:
            if param.requires_grad:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not a trainable "
                    "parameter of the model given to hf_zero.\nBuild the optimizer over model.parameters()."
                )
