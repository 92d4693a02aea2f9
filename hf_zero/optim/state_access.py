"""One parameter's gradient or optimizer state: assembled from what the ranks own of it, read and set by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from hf_zero.layout import Slice
from hf_zero.sharding.param_index import ParamPlace
from hf_zero.sharding.shard import Shard


def assemble(place: ParamPlace, comm: Comm, read: Callable[[Slice], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the shape of a parameter, on the compute device. All ranks must call.

    Args:
        read: Values of a slice that this rank owns, in its order.
    """
    slot = place.slot
    # One owner gives each element: the sum over ranks adds zeros, which changes no bit. 16 bits travel as 32.
    num_shards = place.flat.layout.world_size
    gives = num_shards == 1 or comm.rank < num_shards  # other ranks may have the same shards
    wide = torch.promote_types(dtype, torch.float32)
    full = torch.zeros(slot.numel, dtype=wide, device=comm.device)
    if gives and (slice_ := place.slice) is not None:
        at, values = 0, read(slice_).reshape(-1)
        for piece in slice_.pieces:
            full[piece.start : piece.end].copy_(values[at : at + piece.numel])
            at += piece.numel
    if num_shards > 1:
        comm.all_reduce(full, f"full {slot.name}").wait()
    return full.to(dtype).view(slot.shape)


# -------------------------------------------------------------------- optimizer state
def full_state(place: ParamPlace, kind: str, comm: Comm, mine: Mapping[str, Any] | None) -> torch.Tensor | None:
    """One kind of state of a parameter; None before the first update. All ranks must call.

    Args:
        mine: This rank's state by kind: a stored shard, a tensor over its run, or a number; None if it owns nothing.
    Raises:
        StateError: There is state, but not of this kind.
    """
    described = _agree_on_kind(place, kind, comm, mine)
    if described is None:
        return None
    if not isinstance(described, torch.dtype):
        return torch.tensor(described, device=comm.device)

    def read(slice_: Slice) -> torch.Tensor:
        assert mine is not None
        return _values(mine[kind], slice_)

    return assemble(place, comm, read, described)


def check_kind(place: ParamPlace, kind: str, comm: Comm, mine: Mapping[str, Any] | None, *, number: bool) -> None:
    """Raise StateError on all ranks unless the parameter has this kind of state, as one number or not.

    All ranks must call.
    """
    slot = place.slot
    described = _agree_on_kind(place, kind, comm, mine)
    if described is None:
        raise StateError(f"{slot.name} has no optimizer state before the first update, so none can be set")
    if slot.shape and number == isinstance(described, torch.dtype):
        wanted = f"a tensor of shape {slot.shape}" if number else "one number"
        raise StateError(f"optimizer state {kind!r} of {slot.name} is {wanted}")


def _agree_on_kind(place: ParamPlace, kind: str, comm: Comm, mine: Mapping[str, Any] | None) -> Any:
    """The type of a state on whichever rank has it, or its number; None before the first update."""
    name = place.slot.name
    facts = None if mine is None else {key: _describe(value) for key, value in mine.items()}
    everyone = [found for found in comm.all_gather_object(facts, f"state of {name}") if found]
    if not everyone:
        return None
    described = next((found[kind] for found in everyone if kind in found), None)
    if described is None:
        raise _unknown_kind(name, kind, {key for found in everyone for key in found})
    return described


def _unknown_kind(name: str, kind: str, kinds: set[str]) -> StateError:
    return StateError(f"{name} has no optimizer state {kind!r}, only {', '.join(sorted(kinds | {'master'}))}")


def _describe(value: Any) -> Any:
    """The type of what is sharded like the parameter, or the number that is the same for all of it."""
    if isinstance(value, Shard):
        return value.dtype
    if isinstance(value, torch.Tensor):
        return value.dtype if value.dim() else value.item()
    return value


def _values(value: Any, slice_: Slice) -> torch.Tensor:
    """One kind of a slice's state, 1-D; 0-dim for a number."""
    if isinstance(value, Shard):
        return value.read_slice(slice_)
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def joined_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of one slice from that of the tensors which the optimizer holds for it: sharded tensors become 1-D."""
    joined: dict[str, Any] = {}
    for kind, first in states[0].items():
        is_sharded = isinstance(first, torch.Tensor) and first.dim() > 0
        joined[kind] = torch.cat([state[kind].reshape(-1) for state in states]) if is_sharded else first
    return joined


def read_state(place: ParamPlace, kind: str, mine: Mapping[str, Any], slice_: Slice) -> torch.Tensor:
    """One kind of what this rank owns of a state, 1-D; 0-dim for a number. Raises StateError for an unknown kind."""
    if kind not in mine:
        raise _unknown_kind(place.slot.name, kind, set(mine))
    return _values(mine[kind], slice_)


def changed_state(mine: Mapping[str, Any], kind: str, slice_: Slice, values: torch.Tensor) -> dict[str, Any]:
    """A slice's state as plain tensors and numbers, one kind of it replaced."""
    state = {key: _values(value, slice_) for key, value in mine.items()}
    state[kind] = values
    return {key: value.item() if value.dim() == 0 else value for key, value in state.items()}


def write_state(states: Sequence[dict[str, Any]], kind: str, values: torch.Tensor) -> None:
    """Set one kind in the state of the tensors that an optimizer holds for a slice; see `joined_state`."""
    if not isinstance(states[0][kind], torch.Tensor):
        for state in states:
            state[kind] = type(state[kind])(values.item())
        return
    if states[0][kind].dim() == 0:
        for state in states:
            state[kind].copy_(values.reshape(()))
        return
    chunks = torch.split(values, [state[kind].numel() for state in states])
    for state, chunk in zip(states, chunks, strict=True):
        state[kind].copy_(chunk.view(state[kind].shape))
