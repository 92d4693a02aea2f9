"""The update of optimizers that need full parameters, on shards: by ownership.

[Note: Ownership]
Every parameter has one owner (owners.py), whose optimizer object holds it and its state. At a step the ranks send the
owner what they keep of gradient and master, the owner's optimizer runs on full tensors, and sends the masters back.
That is three all-to-alls per batch of parameters: each element travels three times, beside the reduce of gradients and
the gather of parameters that other optimizers have too. Between steps an owner has no more than the state; during a
step it also holds gradient and master of what it owns, as much again as its own shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from hf_zero.layout import Piece
from hf_zero.optim.optimizers.lamb import Lamb
from hf_zero.optim.optimizers.onebit import OneBitAdam
from hf_zero.optim.param_groups import OwnedSlice
from hf_zero.optim.registry import needs_unsharded
from hf_zero.optim.updates.elementwise import (
    FileState,
    HasGrad,
    LambUpdate,
    OneBitUpdate,
    StatePlace,
    StateReader,
    TorchUpdate,
    drop_gradients,
    give_gradients,
)
from hf_zero.optim.updates.owners import OwnedParam, Owners
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.sharding.param_index import ParamPlace

# Elements that one exchange moves over all ranks together: what bounds the messages' memory.
_BATCH_NUMEL = 1 << 26


_Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class _Move:
    """One tensor of a parameter's shape: in full on the owner, what each rank owns of it there."""

    param: OwnedParam
    dtype: torch.dtype  # what travels
    full: torch.Tensor | None  # on the owner: 1-D
    mine: Sequence[torch.Tensor]  # what this rank keeps, in order


class OwnershipUpdate(TorchUpdate):
    """See [Note: Ownership]."""

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: GradReducer, comm: Comm, owners: Owners) -> None:
        super().__init__(optimizer, reducer, comm)
        self._owners = owners

    def update(self, owned: Sequence[OwnedSlice], has_grad: HasGrad) -> None:
        kept = {(one.acc, one.index): one for one in owned}
        adopted = [param for param in self._owners.params if has_grad[param.acc][param.index]]
        plain = self.elementwise(owned)
        give_gradients([one for one in plain if has_grad[one.acc][one.index]])
        for one in adopted:
            if one.full is not None:
                one.full.grad = torch.empty(one.slot.shape, dtype=one.dtype, device=one.full.device)
                one.full.data = torch.empty_like(one.full.grad)

        def moves(of_full: Callable[[torch.Tensor], Any], of_run: Callable[[OwnedSlice], Any]) -> list[_Move]:
            result = []
            for param in adopted:
                slice_ = kept.get((param.acc, param.index))
                full = None if param.full is None else of_full(param.full).view(-1)
                result.append(_Move(param, param.dtype, full, [] if slice_ is None else of_run(slice_)))
            return result

        masters = moves(lambda full: full.data, lambda slice_: slice_.masters)
        self._bring(moves(lambda full: full.grad, lambda slice_: slice_.gradients()), "gradients of owned parameters")
        self._bring(masters, "masters of owned parameters")
        self.call(plain)
        self._spread(masters, "updated masters")
        for one in adopted:
            one.release()
        drop_gradients(plain)

    def elementwise(self, owned: Sequence[OwnedSlice]) -> list[OwnedSlice]:
        """The slices of `owned` that are updated where they are."""
        adopted = {(param.acc, param.index) for param in self._owners.params}
        return [one for one in owned if (one.acc, one.index) not in adopted]

    # ---------------------------------------------------------------- moving
    def _bring(self, moves: Sequence[_Move], what: str) -> None:
        """Fill `full` on the owners with the slices of all ranks. All ranks must call."""
        for dtype, batch in _batches(moves):
            self._exchange(self._kept_by_owner(batch), self._owned_by_rank(batch), dtype, what)

    def _spread(self, moves: Sequence[_Move], what: str) -> None:
        """Fill the slices of all ranks from `full` on the owners. All ranks must call."""
        for dtype, batch in _batches(moves):
            self._exchange(self._owned_by_rank(batch), self._kept_by_owner(batch), dtype, what)

    def _exchange(
        self, sources: Sequence[_Tensors], targets: Sequence[_Tensors], dtype: torch.dtype, what: str
    ) -> None:
        """One all-to-all: `sources[rank]` to each rank, one behind the other, and `targets[rank]` from it."""
        sizes = [[sum(tensor.numel() for tensor in tensors) for tensors in side] for side in (targets, sources)]
        empty = torch.empty(0, dtype=dtype, device=self.comm.device)
        sent = torch.cat([empty, *(source.reshape(-1).to(empty) for tensors in sources for source in tensors)])
        received = empty.new_empty(sum(sizes[0]))
        self.comm.all_to_all(received, sent, what, (sizes[0], sizes[1])).wait()
        at = 0
        for target in (target for tensors in targets for target in tensors):
            target.view(-1).copy_(received[at : at + target.numel()])
            at += target.numel()

    def _kept_by_owner(self, batch: Sequence[_Move]) -> list[_Tensors]:
        ranks = range(self.comm.world_size)
        return [[part for move in batch if move.param.owner == owner for part in move.mine] for owner in ranks]

    def _owned_by_rank(self, batch: Sequence[_Move]) -> list[_Tensors]:
        """The slices of what this rank owns, by the rank that keeps them."""
        owned: list[_Tensors] = [[] for _ in range(self.comm.world_size)]
        for move in batch:
            for rank, slice_ in zip(self.comm.holders, move.param.slices, strict=True):
                if slice_ is not None and move.full is not None:
                    owned[rank] += [move.full[piece.start : piece.end] for piece in slice_.pieces]
        return owned

    # ---------------------------------------------------------------- state
    def places(self, owned: Sequence[OwnedSlice]) -> Iterator[StatePlace]:
        yield from super().places(self.elementwise(owned))
        for param in self._owners.params:
            if param.full is not None:
                yield param.slot.name, [Piece(param.slot.name, 0, param.slot.numel, 0, 0)], [param.full]

    def reader_of(self, place: ParamPlace) -> StateReader | None:
        owned = self._owners.params
        param = next((one for one in owned if one.acc.flat is place.flat and one.index == place.index), None)
        return None if param is None else functools.partial(self._read, param)

    def _read(self, param: OwnedParam, kind: str) -> torch.Tensor | None:
        """The full state, on the compute device of every rank. All ranks must call."""
        name = param.slot.name
        mine = self.optimizer.state.get(param.full, {}) if param.full is not None else {}
        facts = {key: (tuple(one.shape), one.dtype) if _is_shaped(one) else _on_host(one) for key, one in mine.items()}
        known = self.comm.all_gather_object(facts, f"state of {name}")[param.owner]
        if not known:
            return None
        if kind not in known:
            raise StateError(f"{name} has no optimizer state {kind!r}, only {', '.join(sorted({*known, 'master'}))}")
        if not isinstance(known[kind], tuple):
            return torch.as_tensor(known[kind], device=self.comm.device)
        shape, dtype = known[kind]
        full = mine[kind].contiguous() if mine else torch.empty(shape, dtype=dtype, device=self.comm.device)
        # Other groups of ranks that have all shards have the same.
        self.comm.broadcast(full, f"state of {name}", src=param.owner % self.comm.num_shards)
        return full.clone() if mine else full

    def file_state(self, owned: Sequence[OwnedSlice]) -> FileState:
        states = {
            param.slot.name: self.optimizer.state.get(param.full, {})
            for param in self._owners.params
            if param.full is not None
        }
        shapes = {param.slot.name: param.slot.shape for param in self._owners.params}
        facts = {
            name: {kind: _fact(value, shapes[name]) for kind, value in state.items()} for name, state in states.items()
        }
        known: dict[str, dict[str, Any]] = {}
        for theirs in self.comm.all_gather_object(facts, "state of owned parameters"):
            known.update(theirs)
        kept = {one.slice.name: one for one in owned if one.slice.name in shapes}
        parts: dict[str, list[dict[str, Any]]] = {name: [{} for _ in one.masters] for name, one in kept.items()}
        odd: dict[tuple[str, str], torch.Tensor] = {}
        moves = []
        for param in self._owners.params:
            name = param.slot.name
            for kind, value in known.get(name, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    odd[name, kind] = value
                    continue
                for part, master in zip(parts.get(name, []), kept[name].masters if name in kept else [], strict=True):
                    sharded = isinstance(value, torch.dtype)
                    part[kind] = torch.empty_like(master, dtype=value, device=self.comm.device) if sharded else value
                if isinstance(value, torch.dtype):
                    full = states[name][kind].reshape(-1) if param.full is not None else None
                    moves.append(_Move(param, value, full, [part[kind] for part in parts.get(name, [])]))
        self._spread(moves, "state of owned parameters")
        return FileState(parts, odd)


def _is_shaped(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _fact(value: Any, shape: tuple[int, ...]) -> Any:
    """The fact that all ranks need of a state: its type if it is sharded like the parameter, else the value itself."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype if value.dim() and tuple(value.shape) == shape else value.cpu()


def _batches(moves: Sequence[_Move]) -> Iterator[tuple[torch.dtype, list[_Move]]]:
    """Yield the moves of one type that go together, in an order that is the same on all ranks."""
    batch: list[_Move] = []
    numel = 0
    for move in sorted(moves, key=lambda move: str(move.dtype)):
        if batch and (batch[0].dtype != move.dtype or numel + move.param.slot.numel > _BATCH_NUMEL):
            yield batch[0].dtype, batch
            batch, numel = [], 0
        batch.append(move)
        numel += move.param.slot.numel
    if batch:
        yield batch[0].dtype, batch


# -------------------------------------------------------------------- which update an optimizer gets
_SPECIAL: dict[type, type[TorchUpdate]] = {Lamb: LambUpdate, OneBitAdam: OneBitUpdate}


def make_owners(optimizer: torch.optim.Optimizer, comm: Comm, *, sharded: bool) -> Owners | None:
    """Deals out the parameters that `optimizer` needs in full; None where it needs none, or has all of them."""
    wants = needs_unsharded(optimizer)
    return Owners(comm.rank, comm.holders, comm.device, wants) if sharded and wants is not None else None


def make_update(
    optimizer: torch.optim.Optimizer, reducer: GradReducer, comm: Comm, owners: Owners | None
) -> TorchUpdate:
    """The strategy for `optimizer`."""
    if owners is not None:
        return OwnershipUpdate(optimizer, reducer, comm, owners)
    kind = next((update for known, update in _SPECIAL.items() if isinstance(optimizer, known)), TorchUpdate)
    return kind(optimizer, reducer, comm)
