"""One flat buffer: parameters of one type and one fate, whole or as this rank's shard.

[Note: Views outlive a release]
Autograd keeps views of a gathered weight (the transpose that a matrix product saves) until backward. So the full
buffer is one tensor for the whole run whose storage is resized to 0 at a release and refilled at the next gather: a
view saved in forward sees the data again once the unit is gathered in backward. The parameters themselves are pointed
at placeholders before the memory goes, so that reading a released parameter gives NaN, not freed memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hf_zero.comm import Comm, Pending, wait_all
from hf_zero.errors import StateError
from hf_zero.layout import UnitLayout
from hf_zero.shard.tensors import ShardTensor
from hf_zero.store.base import Lease, ShardStore


class FlatBuffer:
    """Parameters of one unit with one type that are all trainable or all frozen.

    Invariants:
      - Gathered parameters are views of `full`; a gather needs no copy-out.
      - A released parameter keeps its identity, shape, type and device; its data is one NaN element of its own,
        expanded with stride 0, and must still be NaN at the next gather.
      - `master` exists for trainable parameters only, and shares memory with `shard` where the types agree.
    """

    full: torch.Tensor  # 1-D [padded_numel], the parameters' type
    shard: ShardTensor  # the parameters' type
    master: ShardTensor | None  # fp32 (fp64 for fp64 parameters)

    def __init__(
        self,
        layout: UnitLayout,
        params: Sequence[nn.Parameter],
        comm: Comm,
        store: ShardStore,
        *,
        on_demand: bool,
        dtype: torch.dtype,
    ) -> None:
        """Take over whole parameters. All ranks must call; rank 0's values win."""
        self.layout = layout
        self.params = list(params)
        self.on_demand = on_demand
        self.dtype = dtype
        self._comm = comm
        self._store = store
        self._rank = comm.rank if layout.world_size > 1 else 0
        self._pending: list[Pending] = []
        self._lease: Lease | None = None
        self._device = comm.device
        self._ghost = torch.full((len(self.params),), torch.nan, dtype=dtype, device=self._device)
        self._placeholders = [self._ghost[i].expand(slot.shape) for i, slot in enumerate(layout.slots)]
        self._take_over()

    # ---------------------------------------------------------------- construction
    def _take_over(self) -> None:
        master_dtype = master_dtype_of(self.dtype) if self.layout.trainable else self.dtype
        whole = torch.zeros(self.layout.padded_numel, dtype=master_dtype, device=self._device)
        with torch.no_grad():
            for param, slot in zip(self.params, self.layout.slots, strict=True):
                whole[slot.offset : slot.end].copy_(param.detach().reshape(-1))
        for start, numel in self.layout.buckets():
            self._comm.broadcast(whole[start : start + numel], f"first weights of {self.layout.name}")
        self.full = whole if master_dtype == self.dtype else whole.to(self.dtype)
        self._views = [self.full[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots]
        self.shard = self._own_shard()
        self.master = self._own_master(whole) if self.layout.trainable else None
        self.bind_views()

    def _own_shard(self) -> ShardTensor:
        in_full = ShardTensor(self.layout, self._rank, self.full, in_full=True)
        if not self.on_demand:
            return in_full
        key = f"{self.layout.name}/param"
        self._store.create(key, self.layout.shard_numel, self.dtype)
        with self._store.lease([key], write=True) as lease:
            shard = ShardTensor(self.layout, self._rank, lease.tensors[0], in_full=False)
            shard.copy_from(in_full)
        return shard

    def _own_master(self, whole: torch.Tensor) -> ShardTensor:
        if whole.dtype == self.dtype:
            return self.shard
        key = f"{self.layout.name}/master"
        self._store.create(key, self.layout.shard_numel, whole.dtype)
        with self._store.lease([key], write=True) as lease:
            master = ShardTensor(self.layout, self._rank, lease.tensors[0], in_full=False)
            master.copy_from(ShardTensor(self.layout, self._rank, whole, in_full=True))
        return master

    # ---------------------------------------------------------------- whole <-> released
    def gather_start(self) -> None:
        """Start making the parameters whole. All ranks must call, in the same order."""
        if self.on_demand:
            self.check_placeholders()
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self._lease = self._store.lease([f"{self.layout.name}/param"])
        for (start, numel), part in zip(self.layout.buckets(), self.shard.parts, strict=True):
            self._pending.append(self._comm.all_gather(self.full[start : start + numel], part, self.layout.name))

    def gather_finish(self) -> None:
        wait_all(self._pending)
        self._pending.clear()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self.on_demand:
            self.bind_views()

    def release(self) -> None:
        """Point the parameters at placeholders and give the memory back. See [Note: Views outlive a release]."""
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            param.data = placeholder
        self.full.untyped_storage().resize_(0)

    def bind_views(self) -> None:
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view

    def check_placeholders(self) -> None:
        """Raise if somebody wrote to a released parameter (`zero_`, `fill_` and a 1-element write do not raise)."""
        untouched = torch.isnan(self._ghost)
        if not untouched.all():
            names = [slot.name for slot, same in zip(self.layout.slots, untouched.tolist(), strict=True) if not same]
            self._ghost.fill_(torch.nan)
            raise StateError(
                f"rank {self._comm.rank}: sharded parameter(s) were written to while no rank held them whole, and the "
                f"write is lost: {', '.join(names)}.\nWrite inside `with hf_zero.gathered_params(model, "
                "write_rank=0):`, or before the model is handed to hf_zero."
            )

    def check_views(self) -> None:
        """Raise if a whole parameter has left the buffer (`.to(dtype)`, `param.data = ...`): updates would miss it."""
        if self.on_demand:
            return  # check_placeholders looks after these
        strays = [
            slot.name
            for slot, param, view in zip(self.layout.slots, self.params, self._views, strict=True)
            if param.data_ptr() != view.data_ptr() or param.dtype != self.dtype
        ]
        if strays:
            raise StateError(
                f"rank {self._comm.rank}: parameter(s) were replaced or cast after hf_zero had taken the model over, "
                f"and updates would not reach them: {', '.join(strays[:5])} ({len(strays)} in all).\nDo not call "
                ".to(dtype) or .half(), nor assign param.data, on a model in training: set the type before, or in the "
                "configuration (bf16.enabled), and edit values in place under torch.no_grad()."
            )

    # ---------------------------------------------------------------- around the optimizer step
    def refresh(self) -> None:
        """Bring the parameters' type up to date with the master weights after an update."""
        if self.master is not None and self.master is not self.shard:
            self.shard.copy_from(self.master)

    def accept_whole(self) -> None:
        """Take edits of the gathered parameters over into shard and master."""
        whole = ShardTensor(self.layout, self._rank, self.full, in_full=True)
        if self.on_demand:
            self.shard.copy_from(whole)
        if self.master is not None and self.master is not self.shard:
            self.master.copy_from(whole)

    @property
    def rank(self) -> int:
        """The rank whose shard this process holds; 0 where every rank holds everything."""
        return self._rank

    @property
    def full_bytes(self) -> int:
        return self.full.numel() * self.full.element_size()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor this buffer owns, by what it is for."""
        owned = {"parameters": self.shard.memory}
        if self.master is not None and self.master is not self.shard:
            owned["master"] = self.master.memory
        return owned

    def detach(self) -> None:
        """Give the (gathered) parameters memory of their own and forget the rest."""
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view.clone()
        for kind in ("param", "master"):
            if f"{self.layout.name}/{kind}" in self._store.usage():
                self._store.drop(f"{self.layout.name}/{kind}")


def master_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """The type in which a parameter is updated: fp64 stays, everything else is fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
