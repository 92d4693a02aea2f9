"""What a rank updates of one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.layout import Run
from hf_zero.runtime.grads import GradBuffer
from hf_zero.shards.stored import StoredShard
from hf_zero.shards.tensors import ShardTensor


@dataclass(frozen=True)
class OwnedRun:
    """The elements of one parameter that this rank owns, and what the user's optimizer holds for them.

    Where the native rule updates them, `masters` is one placeholder and `grads` is empty.
    """

    buffer: GradBuffer
    index: int  # of the parameter in the buffer
    run: Run
    masters: list[torch.Tensor]  # views of the master shard: what the user's optimizer holds in its param groups
    grads: list[torch.Tensor]  # views of the gradient shard, as `masters`

    @property
    def native(self) -> bool:
        return self.buffer.flat.home.native


def own_run(buffer: GradBuffer, index: int, run: Run) -> OwnedRun:
    """What the optimizer is to hold for `run` of the buffer's parameter `index`."""
    master = buffer.flat.master
    if isinstance(master, StoredShard):
        # One element of its own, expanded, as a sharded parameter is: shape, type and numel are true, values are not.
        shape = run.shape if run.is_whole else (run.numel,)
        return OwnedRun(buffer, index, run, [torch.full((1,), torch.nan, dtype=master.dtype).expand(shape)], [])
    assert isinstance(master, ShardTensor)
    masters, grads = _same_cut(master.run_tensors(run), buffer.shard.run_tensors(run))
    return OwnedRun(buffer, index, run, masters, grads)


def _same_cut(a: list[torch.Tensor], b: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two lists that tile one run, one of them perhaps in one piece, cut at the same places."""
    if len(a) == len(b):
        return a, b
    if len(a) == 1:
        return list(torch.split(a[0].view(-1), [tensor.numel() for tensor in b])), b
    if len(b) == 1:
        return a, list(torch.split(b[0].view(-1), [tensor.numel() for tensor in a]))
    raise AssertionError(f"a run cut into {len(a)} and {len(b)} tensors")


def cut_state(state: dict[str, Any], owned: OwnedRun) -> dict[torch.Tensor, dict[str, Any]]:
    """State that the optimizer had for a whole parameter, for the tensors that this rank updates of it."""
    numel = owned.buffer.flat.layout.slots[owned.index].numel
    cut: dict[torch.Tensor, dict[str, Any]] = {master: {} for master in owned.masters}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() == numel:
            flat = value.detach().reshape(-1)
            mine = torch.cat([flat[piece.start : piece.end] for piece in owned.run.pieces])
            chunks = torch.split(mine, [master.numel() for master in owned.masters])
            for master, chunk in zip(owned.masters, chunks, strict=True):
                cut[master][key] = chunk.clone().view(master.shape)
        else:
            for master in owned.masters:
                cut[master][key] = value.clone() if isinstance(value, torch.Tensor) else value
    return cut
