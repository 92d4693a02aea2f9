"""What a rank updates of one parameter."""

from __future__ import annotations

from dataclasses import dataclass

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
