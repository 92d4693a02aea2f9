"""One flat parameter: parameters of one type that are unsharded and resharded together.

[Note: The tensors of a flat parameter]
  - full: the unsharded parameters, 1-D with padding at the end. Where the unit is sharded between uses its storage has
    0 bytes then.
  - views: the parameters' data while the unit is unsharded; each is a range of `full` in the parameter's shape.
  - placeholder: a parameter's data while the unit is sharded: its shape with one NaN element behind it.
  - shard: this rank's equal part of `full`, in the parameters' type, on the device, the host or a disk.
  - master: the same part in fp32 (fp64 for fp64 parameters), which the optimizer updates; the shard is a cast of it.
  - buckets: consecutive ranges of `full`; one all-gather fills each, and a rank's shard has a part in every bucket.
  - slice: the elements of this rank's shard that belong to one parameter.
  - row: this rank's part of `full` within its group of ranks, where there are groups; see [Note: Groups].

[Note: Groups]
Where ranks form groups (`sharding_group`; [Note: Two steps] in distributed/two_steps.py) a parameter that is sharded
between uses is so twice. The shard, the masters and all that the optimizer has are of all ranks, as ever: a checkpoint
is the same with groups and without. The row is the shards of the ranks at this one's place in their groups, so that
the rows of a group are the whole, and a gather stays within it. The row is filled by the first gather after the shards
have changed. Whoever changes them says so, on all ranks, by `shard_changed`; that costs nothing. Between gathers the
row is where the shard is, on the device, the host or a disk, and a gather has it on the device.
With `hybrid_shard` there are no rows: a shard is one of as many as a group has ranks, and each group has them all.

[Note: Whose memory]
Autograd keeps views of a gathered weight (the transpose that a matrix product saves) until backward. So the storage of
`full` is resized to 0 at a reshard and refilled at the next gather: a view saved in forward sees the data again once
the unit is gathered in backward. The parameters themselves are pointed at placeholders before the memory goes.
Whatever else refers to the memory then (a state_dict, `param.data`, a view that a layer returned, an array of numpy)
would read what is freed, and other values later. torch counts who refers to a storage: where that is more than this
object and the views that graphs have saved (`in_graphs`), the memory is left to its holders, and the next gather takes
new memory. That is right for graphs too, whose views hold the values until they go; it only frees later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from hf_zero.distributed.comm import Comm
from hf_zero.distributed.work import Pending
from hf_zero.errors import StateError
from hf_zero.layout import Slice, UnitLayout
from hf_zero.native.host_memory import use_huge_pages
from hf_zero.sharding.param_data import set_data
from hf_zero.sharding.placement import FlatParamSpec, Placement, master_dtype_of
from hf_zero.sharding.scaled_shard import ScaledShard
from hf_zero.sharding.shard import Shard, ShardTensor, make_shard, make_stored, slices_by_name
from hf_zero.sharding.sharded_param import OnValues, asking_nobody, holders, plain_class, sharded_class
from hf_zero.storage.base import BorrowedTensors, ShardStore


class FlatParam:
    """Parameters of one unit with one type that are all trainable or all frozen.

    Invariants:
      - Gathered parameters are views of `full`; a gather needs no copy-out.
      - A sharded parameter keeps its identity, shape, type and device; its data is one NaN element of its own,
        expanded with stride 0. Nobody reads or writes it: see [Note: Values of a sharded parameter].
      - `master` exists for trainable parameters only, and is `shard` itself where type and medium agree.
      - While `update` is not over, it may be writing to the shard: whoever reads the shard waits for it first.
    """

    full: torch.Tensor  # 1-D [padded_numel], the parameters' type
    storage: torch.UntypedStorage  # of `full`
    in_graphs: int  # views of `full` that graphs have saved, whose backward gathers again
    shard: Shard  # the parameters' type
    master: Shard | None  # fp32 (fp64 for fp64 parameters)
    update: Pending | None
    rank: int  # the number of the shard that this process holds; 0 where every rank holds everything
    slices: dict[str, Slice]  # what this rank owns, by parameter name; without those of which it owns nothing

    def __init__(
        self,
        spec: FlatParamSpec,
        params: Sequence[nn.Parameter],
        comm: Comm,
        placement: Placement,
        initialize: Callable[[FlatParam], None],
    ) -> None:
        """`initialize` gives the first values by one of the three initialize_ methods. All ranks must call."""
        self.layout = layout = spec.layout
        self.params = list(params)
        self.on_demand = spec.on_demand
        self.scaled = spec.scaled
        self.dtype = spec.dtype
        self.placement = placement
        self.update = None
        self.comm = comm
        self.rank = comm.rank % layout.world_size
        self.slices = slices_by_name(layout, self.rank)
        self._borrowed: BorrowedTensors | None = None
        self._copied: torch.Event | None = None  # the shard has reached the compute device
        self._row: Shard | None = None  # padded_numel / size of a group elements
        self._row_is_old = True  # the shards have changed since it was filled
        self._lent_row: ShardTensor | None = None  # on the device for a gather, where the row is elsewhere
        self._keeps_row = False  # the row on the device is new: it goes to where the row is kept
        self._device = comm.device
        values = torch.full((len(self.params),), torch.nan, dtype=self.dtype, device=self._device)
        slots = zip(values.unbind(), layout.slots, strict=True)
        self.placeholders = [value.expand(slot.shape) for value, slot in slots]
        self._classes = [plain_class(param) for param in self.params]
        self._sharded_classes = self._classes
        self.on_values: OnValues | None = None
        initialize(self)

    @property
    def master_dtype(self) -> torch.dtype:
        """The type in which its parameters are updated, if they are trained."""
        return master_dtype_of(self.dtype, as_params=self.placement.masters_as_params)

    # ---------------------------------------------------------------- first values
    def initialize_from_params(self) -> None:
        """Initialize from unsharded parameters. All ranks must call; rank 0's values win."""
        master_dtype = self.master_dtype if self.layout.trainable else self.dtype
        values = torch.zeros(self.layout.padded_numel, dtype=master_dtype, device=self._device)
        with torch.no_grad():
            for param, slot in zip(self.params, self.layout.slots, strict=True):
                values[slot.offset : slot.end].copy_(param.detach().reshape(-1))
        for bucket in values.split([numel for _, numel in self.layout.buckets()]):
            self.comm.broadcast(bucket, f"first weights of {self.layout.name}")
        self._set_full(values.to(self.dtype))
        self._set_shards(ShardTensor(self.layout, self.rank, values, in_full=True))
        for param, view in zip(self.params, self._views, strict=True):
            set_data(param, view)
        self.bind_views()

    def initialize_with_zeros(self) -> None:
        """Start with zeros: whoever knows the values writes this rank's slices into the shard."""
        if self.layout.trainable:
            raise AssertionError(f"{self.layout.name}: masters would not follow")
        full = torch.empty(self.layout.padded_numel, dtype=self.dtype, device=self._device)
        self._set_full(full if self.on_demand else full.zero_())
        self._set_shards(None)
        self.bind_views()

    def initialize_from(self, old: FlatParam, *, share: bool) -> None:
        """Take the shard of a flat parameter with the same parameters at the same places. No communication.

        `share`: the old one will be discarded, so that its full tensor may be kept.
        """
        reuse = share and old.dtype == self.dtype and not self.on_demand
        full = old.full if reuse else torch.empty(self.layout.padded_numel, dtype=self.dtype, device=self._device)
        if not self.on_demand and not reuse:
            full.copy_(old.full)
        self._set_full(full)
        self._set_shards(old.best)
        self.bind_views()

    def fits(self, other: FlatParam, params: Sequence[nn.Parameter]) -> bool:
        """Whether `other` has `params` at the places where this one has its own, and nothing else."""
        return other._is_sharded_as(self.layout, params) and self.on_demand == other.on_demand

    def _is_sharded_as(self, layout: UnitLayout, params: Sequence[nn.Parameter]) -> bool:
        mine = self.layout
        same_shards = mine.world_size == layout.world_size and mine.bucket_numel == layout.bucket_numel
        shapes = [slot.shape for slot in mine.slots] == [slot.shape for slot in layout.slots]
        return same_shards and shapes and [id(param) for param in params] == [id(param) for param in self.params]

    # ---------------------------------------------------------------- another engine, the same memory
    def can_become(
        self, spec: FlatParamSpec, params: Sequence[nn.Parameter], placement: Placement, comm: Comm
    ) -> bool:
        """Whether a new flat parameter would have the memory that this one has. Names and trainability may differ."""
        kinds = (spec.dtype, spec.on_demand, spec.scaled), (self.dtype, self.on_demand, self.scaled)
        same_kind = kinds[0] == kinds[1] and comm is self.comm
        if not same_kind or not self._is_sharded_as(spec.layout, params):
            return False
        if self.on_demand and not placement.param.can_adopt(self.placement.param):
            return False
        if self.master is None or not spec.layout.trainable:
            return True
        return not (placement.native or self.placement.native) and placement.master.can_adopt(self.placement.master)

    def become(self, layout: UnitLayout, placement: Placement) -> None:
        """Go on as the flat parameter of `layout`, which `can_become` has admitted. No communication, no copy.

        A master is kept, made from the shard where training begins, or dropped where it ends.
        """
        self.finish_update()
        if self.own_master is not None and layout.trainable:
            self.own_master.move(layout, placement.master)
        elif self.own_master is not None:
            self.own_master.drop()
        self.shard.move(layout, placement.param)
        self.layout, self.placement, self.slices = layout, placement, slices_by_name(layout, self.rank)
        self.drop_row()
        if not layout.trainable:
            self.master = None
        elif self.master is None:
            self.master = self._own_master(self.shard)

    def _set_full(self, full: torch.Tensor) -> None:
        self.full, self.storage, self.in_graphs = full, full.untyped_storage(), 0
        self._views = [full[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots]
        self._buckets = self._split(full)
        self._own_uses = 2 + len(self._views) + len(self._buckets)  # and those of `full` and `storage`

    def _set_shards(self, values: Shard | None) -> None:
        """Make shard and master, with these values or zeros."""
        if self.on_demand:
            self.shard = self._keep(values, self.placement.param, "param", self.dtype)
        else:
            self.shard = ShardTensor(self.layout, self.rank, self.full, in_full=True)
        self.master = self._own_master(values) if self.layout.trainable and values is not None else None

    def _own_master(self, values: Shard) -> Shard:
        dtype = self.master_dtype
        if self.placement.scaled:
            scaled = ScaledShard(self.layout, self.rank, self._device, torch.float16)
            scaled.copy_from(values)
            return scaled
        if self.placement.native:
            tile = self.placement.tile_numel
            master = make_stored(self.layout, self.rank, self.placement.master, "master", dtype, tile)
            master.copy_from(values)
            return master
        if dtype == self.dtype and self.shard.in_memory is not None:
            master_is_on_host = self.comm.computes_on_host or not self.placement.master.is_on_device
            if master_is_on_host == self.shard_is_on_host:
                return self.shard
        return self._keep(values, self.placement.master, "master", dtype)

    def _keep(self, values: Shard | None, store: ShardStore, kind: str, dtype: torch.dtype) -> Shard:
        """A shard of its own with these values, or zeros."""
        shard = make_shard(self.layout, self.rank, store, kind, dtype)
        if values is not None:
            shard.copy_from(values)
        return shard

    # ---------------------------------------------------------------- unshard and reshard
    def prefetch(self) -> None:
        """Start bringing what a gather reads near, from a slow medium. No communication; any rank may call."""
        if self.on_demand and self.update is None:
            read = self.shard if self._row is None or self._row_is_old else self._row
            read.prefetch()

    def allocate(self) -> None:
        """Get memory for the unsharded parameters, which are still placeholders then."""
        if not self.on_demand:
            return
        if self.in_graphs:
            self.in_graphs = min(self.in_graphs, self.uses())  # some may have gone unused
        self.storage.resize_(self.full_bytes)
        if self._device.type == "cpu":
            use_huge_pages(self.full)

    def on_copy_stream(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a shard's copy from the host, and its all-gather, stay off the compute stream."""
        return self.placement.copies.beside() if self.is_offloaded else contextlib.nullcontext()

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard, or its update, is elsewhere than on the device."""
        return self.placement.master is not self.placement.param or not self.placement.param.is_on_device

    def buckets_of(self, full: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the buckets of an unsharded tensor: one all-gather each."""
        return self._buckets if full is self.full else self._split(full)

    def _split(self, full: torch.Tensor) -> Sequence[torch.Tensor]:
        buckets: Sequence[torch.Tensor] = full.split([numel for _, numel in self.layout.buckets()])
        return buckets

    def parts_on_device(self, full: torch.Tensor) -> list[torch.Tensor]:
        """This rank's part of every bucket of `full`, on the compute device; valid until `end_gather`."""
        shard = self.shard.in_memory
        if shard is None or self.update is not None:
            with self._reading():
                shard, self._borrowed = self.shard.borrow()
        shard.check_here()
        if shard.memory.device == full.device:
            return shard.parts
        # Straight into this rank's place in the full tensor: from there the all-gather takes it.
        places = ShardTensor(self.layout, self.rank, full, in_full=True).parts
        self._copied = shard.copy_parts_to(places)
        return places

    @property
    def has_row(self) -> bool:
        """Whether it is gathered within the groups of ranks."""
        groups, is_of_all = self.comm.groups, self.layout.world_size == self.comm.world_size
        return self.on_demand and groups is not None and not groups.replicates and is_of_all

    @property
    def row_bytes(self) -> int:
        """The bytes of what this rank keeps for its group, beside its shard."""
        return 0 if self._row is None else self._row.nbytes

    def shard_changed(self) -> None:
        """Let the next gather bring the new shards of the other groups. All ranks must call; no communication."""
        self._row_is_old = True

    def drop_row(self) -> None:
        """Give the memory back until the next gather. All ranks must call; no communication."""
        if self._row is not None:
            self._row.drop()
        self._row, self._row_is_old = None, True

    def gather_in_group(self, full: torch.Tensor, *, may_quantize: bool = False) -> list[Pending]:
        """Start to fill `full` from the rows of this rank's group. All ranks must call, in the same order.

        `may_quantize`: See ShardUnit.unshard. An exact gather fills the row for itself alone: what computes does not
        depend on whether somebody has read weights meanwhile.
        """
        assert self.comm.groups is not None
        if self._row is not None and self._row.layout.world_size != self.comm.groups.size:
            self.drop_row()  # of other groups, before another engine took the model over
        buckets = self.buckets_of(full)
        exact_once = not may_quantize and "weights" in self.comm.quantizes
        fills = self._row_is_old or exact_once
        parts = self.parts_on_device(full) if fills else [None] * len(buckets)
        row = self._row_on_device(fills=fills)
        self._keeps_row = fills and not exact_once
        self._row_is_old = exact_once
        start = functools.partial(self.comm.all_gather_in_group, what=self.layout.name, may_quantize=may_quantize)
        return [start(*each) for each in zip(buckets, row.parts, parts, strict=True)]

    def _row_on_device(self, *, fills: bool) -> ShardTensor:
        """Return the row, or a copy of it where it is elsewhere; memory for new values where the gather `fills` it."""
        with self.comm.stop_together():  # the host's memory, or the disk, may be full on one rank
            if self._row is None:
                assert self.comm.groups is not None
                layout = dataclasses.replace(self.layout, world_size=self.comm.groups.size)
                place = self.comm.rank % layout.world_size
                # An evaluation may be the first gather, and the row is filled in training too.
                with torch.inference_mode(False):
                    self._row = make_shard(layout, place, self.placement.param, "row", self.dtype)
            if self._row.in_memory is not None and (self.comm.computes_on_host or self.placement.param.is_on_device):
                return self._row.in_memory
            memory = torch.empty(self._row.layout.shard_numel, dtype=self.dtype, device=self._device)
            self._lent_row = ShardTensor(self._row.layout, self._row.rank, memory, in_full=False)
            if not fills:
                kept, self._borrowed = self._row.borrow()
                if kept.memory.device == self._device:  # read from a disk on the CPU, or a plan, which has no values
                    self._lent_row.copy_from(kept)
                else:
                    self._copied = kept.copy_parts_to(self._lent_row.parts)
        return self._lent_row

    def _return_row(self) -> None:
        """Give the row on the device back after a gather, and copy one that is new to where it is kept."""
        if self._lent_row is None:
            return
        assert self._row is not None
        with self.comm.stop_together(), self.on_copy_stream():  # which has its memory, and waits for the gather
            if self._keeps_row:
                self._row.copy_from(self._lent_row)
            self._lent_row = None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Wait for an update under way, around a read of the shard or the masters; all ranks raise its errors."""
        with self.comm.stop_together():
            if self.update is not None:
                pending, self.update = self.update, None
                pending.wait()
            yield

    def finish_update(self) -> None:
        """Wait for an update of the shard that is under way."""
        if self.update is not None:
            with self._reading():
                pass

    def use_gathered(self) -> None:
        """All buckets are filled: point the parameters at them."""
        self.end_gather()
        if self.on_demand:
            self.bind_views()

    def end_gather(self) -> None:
        """All buckets are filled: what the gather had of other memory goes back."""
        if self._copied is not None:
            # An all-gather in between has waited already.
            self._copied.wait(torch.accelerator.current_stream(self._device))
        if self._borrowed is not None:
            if self._copied is not None:  # the borrowed tensor is read until here
                self._copied.synchronize()
            self._borrowed.release()
        self._borrowed = self._copied = None
        self._return_row()

    def drop_gather(self) -> None:
        """A gather was broken off, and its connections are closed: what it had of other memory goes back."""
        if self._copied is not None:  # it may be reading what goes back, and writing to the full tensor
            self._copied.synchronize()
        if self._borrowed is not None:
            self._borrowed.release()
        self._borrowed = self._copied = self._lent_row = None

    def reshard(self) -> None:
        """Point the parameters at placeholders and give the memory up. See [Note: Whose memory]."""
        self._bind(self.placeholders)
        if self.uses() > self.in_graphs or not self.storage.resizable():
            self._set_full(torch.empty_like(self.full))
        self.storage.resize_(0)

    def uses(self) -> int:
        """Return the number of tensors that refer to the memory of `full`, beside our own and the parameters."""
        bound = len(self.params) if self._bound is self._views else 0
        return torch._C._storage_Use_Count(self.storage._cdata) - self._own_uses - bound

    def bind_views(self) -> None:
        self._bind(self._views)
        self.mark_written()

    def _bind(self, places: list[torch.Tensor]) -> None:
        self._bound = places
        if places is self._views:
            for param, place, kind in zip(self.params, places, self._classes, strict=True):
                param.__class__ = kind
                param.data = place
        else:
            with asking_nobody():
                for param, place, kind in zip(self.params, places, self._sharded_classes, strict=True):
                    param.data = place
                    param.__class__ = kind

    def point_at(self, whole: Mapping[int, torch.Tensor]) -> None:
        """Point parameters at other memory, by their ids, until `point_back`. No communication.

        A parameter stays as it is where its device exchanges no memory with that of the tensor.
        """
        with asking_nobody():
            for param, kind in zip(self.params, self._classes, strict=True):
                tensor = whole.get(id(param))
                if tensor is not None and torch._has_compatible_shallow_copy_type(param, tensor):
                    param.data = tensor
                    param.__class__ = kind

    def point_back(self) -> None:
        """Undo `point_at`."""
        self._bind(self._bound)

    def watch_values(self, on_values: OnValues | None) -> None:
        """Ask `on_values` wherever values of a sharded parameter are read or written; None asks nobody any more."""
        self.on_values = on_values
        if on_values is None:
            holders.discard(self)
            self._sharded_classes = self._classes
        else:
            holders.add(self)
            self._sharded_classes = [sharded_class(kind) for kind in self._classes]
        if self._bound is self.placeholders:
            self._bind(self.placeholders)

    def name_of(self, param: nn.Parameter) -> str:
        """The name of one of `params`."""
        return next(slot.name for slot, mine in zip(self.layout.slots, self.params, strict=True) if mine is param)

    def mark_written(self) -> None:
        """Remember torch's counts of writes: what was written so far is known."""
        self._versions = [param._version for param in self.params]

    def written(self) -> list[int]:
        """Return which parameters were written to in place since `mark_written`, by torch's counts."""
        pairs = zip(self.params, self._versions, strict=True)
        return [index for index, (param, known) in enumerate(pairs) if param._version != known]

    def check_views(self) -> None:
        """Raise if a parameter has left `full` (`.to(dtype)`, `param.data = ...`): updates would miss it."""
        bound = zip(self.layout.slots, self.params, self._bound, strict=True)
        with asking_nobody():
            strays = [
                slot.name
                for slot, param, place in bound
                if param.data_ptr() != place.data_ptr() or param.dtype != self.dtype
            ]
        if strays:
            if self.on_demand:
                self._bind(self._bound)
            raise StateError(
                f"rank {self.comm.run_rank}: parameter(s) were replaced or cast after hf_zero had taken the model "
                f"over, and updates would not reach them: {', '.join(strays[:5])} ({len(strays)} in all).\nDo not "
                "call .to(dtype) or .half(), nor assign param.data (vector_to_parameters does), on a model in "
                "training: set the type before, or in the configuration (bf16.enabled), and values with "
                "hf_zero.set_full_param(model, tensor, name), or in place inside "
                "`with hf_zero.gathered_params(model, write_rank=0):`."
            )

    # ---------------------------------------------------------------- around the optimizer step
    def refresh(self) -> None:
        """Bring the parameters' type up to date with the master weights after an update. All ranks must call."""
        self.shard_changed()
        if self.own_master is not None:
            self.shard.copy_from(self.own_master)

    def full_master(self) -> torch.Tensor:
        """The masters of all ranks, 1-D [padded_numel], in their own type, on the device. All ranks must call."""
        assert self.master is not None
        full = torch.empty(self.layout.padded_numel, dtype=self.master.dtype, device=self._device)
        mine = ShardTensor(self.layout, self.rank, full, in_full=True)
        with self._reading():
            mine.copy_from(self.master)
        if self.layout.world_size > 1:
            name = f"masters of {self.layout.name}"
            parts = zip(self.layout.buckets(), mine.parts, strict=True)
            for pending in [self.comm.all_gather(full[at : at + numel], part, name) for (at, numel), part in parts]:
                pending.wait()
        return full

    def accept_edits(self) -> None:
        """Take edits of the gathered parameters over into the shard. There must be no master: it would be rounded."""
        if self.master is not None or not self.on_demand:
            raise AssertionError(f"{self.layout.name} has more than a shard to bring up to date")
        self.shard.copy_from(ShardTensor(self.layout, self.rank, self.full, in_full=True))
        self.shard_changed()

    @property
    def shard_is_on_host(self) -> bool:
        """Whether the parameters' shard, where it is memory, is memory of the host."""
        return self.comm.computes_on_host or (self.on_demand and not self.placement.param.is_on_device)

    def slice_of(self, index: int) -> Slice | None:
        """Return the slice of parameter `index` that this rank owns; None if it owns nothing of it."""
        return self.slices.get(self.layout.slots[index].name)

    @property
    def full_bytes(self) -> int:
        return self.full.numel() * self.full.element_size()

    def owned(self) -> dict[str, Shard]:
        """Return the shards that are kept between uses, by what they are for."""
        owned = {"parameters": self.shard}
        return owned if self.own_master is None else owned | {"master": self.own_master}

    @property
    def own_master(self) -> Shard | None:
        """The master weights, where they are not the shard itself."""
        return None if self.master is self.shard else self.master

    @property
    def best(self) -> Shard:
        """This rank's weights with all their digits: the master weights, or the shard where there are none."""
        return self.shard if self.master is None else self.master

    def holds(self, index: int) -> bool:
        """Whether a parameter is still what this one made it: its placeholder, or its view of the full tensor."""
        param = self.params[index]
        known = (self.placeholders[index], self._views[index])
        with asking_nobody():
            return any(param.data_ptr() == mine.data_ptr() and param.shape == mine.shape for mine in known)

    def detach(self) -> None:
        """Give the (gathered) parameters memory of their own and forget the rest."""
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view.clone()
        self.discard()

    def discard(self) -> None:
        """Forget the full tensor and the shards; the parameters have other memory by now."""
        for shard in self.owned().values():
            shard.drop()
        self.drop_row()
        self.on_values = None
        holders.discard(self)
        # An engine that another one replaces still knows this object, and must not keep its memory.
        self.full = self.full.new_empty(0)
        self.storage = self.full.untyped_storage()
        self._views, self._bound, self._buckets, self.master = [], [], [], None
        del self.shard
