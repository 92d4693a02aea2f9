"""One parameter's whole gradient or optimizer state, put together from what the ranks own of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_zero.comm import Comm
from hf_zero.errors import StateError
from hf_zero.layout import Run
from hf_zero.shards.buffer import FlatBuffer
from hf_zero.shards.stored import StoredShard
from hf_zero.shards.tensors import ShardTensor


def assemble(
    flat: FlatBuffer, index: int, comm: Comm, read: Callable[[Run], torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of the shape of the buffer's parameter `index`, on the compute device. All ranks must call.

    Args:
        read: Values of a run that this rank owns, in its order.
    """
    slot = flat.layout.slots[index]
    # Every element has one owner: the sum over ranks adds zeros to it, which changes no bit. 16 bits travel as 32.
    wide = torch.promote_types(dtype, torch.float32)
    whole = torch.zeros(slot.numel, dtype=wide, device=comm.device)
    for run in flat.layout.runs(flat.rank):
        if run.name == slot.name:
            at, values = 0, read(run).reshape(-1)
            for piece in run.pieces:
                whole[piece.start : piece.end].copy_(values[at : at + piece.numel])
                at += piece.numel
    if flat.layout.world_size > 1:
        comm.all_reduce(whole, f"whole {slot.name}").wait()
    return whole.to(dtype).view(slot.shape)


def whole_state(
    flat: FlatBuffer, index: int, kind: str, comm: Comm, mine: Mapping[str, Any] | None
) -> torch.Tensor | None:
    """One kind of state of a parameter; None before the first update. All ranks must call.

    Args:
        mine: This rank's state by kind: a stored shard, a tensor over its run, or a number; None if it owns nothing.
    Raises:
        StateError: There is state, but not of this kind.
    """
    name = flat.layout.slots[index].name
    facts = None if mine is None else {key: _describe(value) for key, value in mine.items()}
    everyone = [found for found in comm.all_gather_object(facts, f"state of {name}") if found]
    kinds = sorted({key for found in everyone for key in found})
    if not kinds:
        return None
    if kind not in kinds:
        raise StateError(f"{name} has no optimizer state {kind!r}, only {', '.join(kinds)}")
    described = next(found[kind] for found in everyone if kind in found)
    if not isinstance(described, torch.dtype):
        return torch.tensor(described, device=comm.device)

    def read(run: Run) -> torch.Tensor:
        assert mine is not None
        value = mine[kind]
        if isinstance(value, ShardTensor | StoredShard):
            return value.read_run(run)
        assert isinstance(value, torch.Tensor)
        return value

    return assemble(flat, index, comm, read, described)


def _describe(value: Any) -> Any:
    """The type of what is cut like the parameter, or the number that is the same for all of it."""
    if isinstance(value, ShardTensor | StoredShard):
        return value.dtype
    if isinstance(value, torch.Tensor):
        return value.dtype if value.dim() else value.item()
    return value
