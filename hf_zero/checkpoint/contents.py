"""The contents of a checkpoint: which parts of a running engine are saved, under which names, from which memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.client_state import encode_client_state
from hf_zero.checkpoint.format import SCALE_MARK, STATE_MARK, SaveInfo, TensorInfo
from hf_zero.checkpoint.frozen_digests import FrozenShards
from hf_zero.checkpoint.optimizer_state import ATTACHED, collect, package_of
from hf_zero.checkpoint.scheduler_state import plain
from hf_zero.checkpoint.writer import Chunked, Scalar, SliceState
from hf_zero.distributed.comm import Comm
from hf_zero.layout import Slice, UnitLayout
from hf_zero.optim.param_groups import OwnedSlice
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.optim.updates.elementwise import FileState
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.model_params import clean_name, tied_names
from hf_zero.sharding.scaled_shard import ScaledShard
from hf_zero.sharding.shard import Shard, ShardTensor, StagedShard
from hf_zero.sharding.unit import ShardUnit


@dataclass(frozen=True)
class CheckpointContents:
    """The parts of an engine that go into a checkpoint and come from it."""

    model: nn.Module
    units: list[ShardUnit]
    comm: Comm
    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    stage: int
    global_step: int
    skipped_steps: int
    node_local: bool = False  # each node saves into a folder of its own, and loads what is missing from the others
    exclude_frozen: bool = False  # frozen weights are not saved, but their digests: [Note: Digests of frozen weights]
    # Optimizer state that is not where its parameter is; it is found when a save begins.
    file_state: FileState = field(default_factory=FileState)

    @property
    def flats(self) -> list[FlatParam]:
        return [flat for unit in self.units for flat in unit.flats]

    # A pipeline overrides the properties and methods from here on: its ranks hold different layers.
    @property
    def num_writers(self) -> int:
        """The number of ranks that hold a shard each; 1 where every rank holds everything."""
        return max((flat.layout.world_size for flat in self.flats), default=1)

    @property
    def file_number(self) -> int | None:
        """The index of this rank's file, or None if lower ranks hold everything that it holds."""
        return self.comm.rank if self.comm.rank < self.num_writers else None

    @property
    def saves_copies(self) -> bool:
        """Whether this rank saves what others hold as well: frozen parameters that are not sharded, buffers."""
        return self.comm.rank == 0

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        """The layouts of all parameters, as in the checkpoint."""
        return tuple(flat.layout for flat in self.flats)

    def tensor_infos(self) -> tuple[TensorInfo, ...]:
        """Return name, shape and type of all parameters, in the order of the state dict."""
        dtypes = {slot.name: flat.layout.dtype for flat in self.flats for slot in flat.layout.slots}
        named = [(clean_name(path), param) for path, param in self.model.named_parameters()]
        return tuple(TensorInfo(name, tuple(param.shape), dtypes[name]) for name, param in named if name in dtypes)

    def tied(self) -> dict[str, str]:
        """Map other names of tied parameters to the name that `tensor_infos` has."""
        return tied_names(self.model)

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, of which the hyperparameters count."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    def shapes_in_no_unit(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what the checkpoint holds beside the layouts."""
        return {name: tuple(value.shape) for name, value in self.unmanaged_tensors()}

    def in_first_file(self, copies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the first file that this rank writes; `copies` are its own. All ranks must call."""
        return copies

    # ---------------------------------------------------------------- what is saved
    def info(self, client_state: Any) -> SaveInfo:
        """Return what every rank knows of the save. Fields that the ranks make together are not set."""
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        of_optimizer: dict[str, Any] = {}
        if optimizer is not None:
            of_optimizer = {
                "optimizer": type(optimizer.optimizer).__name__,
                "optimizer_package": package_of(optimizer),
                "step_guard": {**optimizer.guard.scaler.state_dict(), "skipped_steps": self.skipped_steps},
            }
        return SaveInfo(
            world_size=self.num_writers,
            stage=self.stage,
            layouts=self.layouts,
            params=self.tensor_infos(),
            tied=self.tied(),
            param_groups=[
                {key: plain(value) for key, value in group.items() if key != "params"} for group in self.groups()
            ],
            global_step=self.global_step,
            client_state=encode_client_state(client_state),
            processes=self.comm.world_size,
            lr_scheduler=None if scheduler is None else plain(scheduler.state_dict()),
            lr_scheduler_class=None if scheduler is None else type(scheduler).__name__,
            **of_optimizer,
        )

    def slice_states(self) -> Iterator[SliceState]:
        """Yield what this rank owns of every parameter, and of its optimizer state."""
        owned = {} if self.optimizer is None else {one.slice.name: one for one in self.optimizer.owned}
        for flat in self.flats:
            for slice_ in flat.layout.slices(flat.rank):
                if flat.master is None:
                    weights = {} if self.exclude_frozen else {"param": _readable(flat.shard, slice_)}
                    yield SliceState(slice_, weights)
                    continue
                tensors: dict[str, torch.Tensor | Chunked] = {"master": _readable(flat.master, slice_)}
                scalars: dict[str, Scalar] = {}
                tensors.update((kind, _readable(shards[flat], slice_)) for kind, shards in self.attached())
                if slice_.name in owned and self.optimizer is not None:
                    more, scalars = self._optimizer_state(self.optimizer, owned[slice_.name])
                    tensors.update(more)
                yield SliceState(slice_, tensors, scalars)

    def _optimizer_state(
        self, optimizer: ShardedOptimizer, owned: OwnedSlice
    ) -> tuple[dict[str, torch.Tensor | Chunked], dict[str, Scalar]]:
        native = optimizer.native_state(owned)
        if native is None:
            states = self.file_state.parts.get(owned.slice.name)
            if states is None:
                states = [optimizer.state.get(master, {}) for master in owned.masters]
            return collect(states, owned, self.file_state.odd)
        tensors: dict[str, torch.Tensor | Chunked] = {}
        scalars: dict[str, Scalar] = {}
        for kind, value in native.items():
            if isinstance(value, ScaledShard):
                tensors[kind], scalars[kind + SCALE_MARK] = value.stored_slice(owned.slice)
            elif isinstance(value, Shard):
                tensors[kind] = _readable(value, owned.slice)
            else:
                scalars[kind] = float(value)
        return tensors, scalars

    def attached(self) -> list[tuple[str, dict[FlatParam, ShardTensor]]]:
        """Return (kind in the files, shards) of what is kept beside the state that the optimizer itself has."""
        found = {} if self.optimizer is None else self.optimizer.attached
        return [(ATTACHED + kind, shards) for kind, shards in found.items()]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return persistent buffers, and what else is in no unit; one rank saves them for all."""
        if not self.saves_copies:
            return {}
        found = dict(self.unmanaged_tensors())
        return found | {f"{name}{STATE_MARK}{kind}": value for (name, kind), value in self.file_state.odd.items()}

    def unmanaged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield persistent buffers, and parameters that are no floats (frozen ones: not where these are left out)."""
        for path, module in self.model.named_modules():
            for name, value in module._buffers.items():
                if value is not None and name not in module._non_persistent_buffers_set:
                    yield clean_name(f"{path}.{name}" if path else name), value
        held = {slot.name for flat in self.flats for slot in flat.layout.slots}
        for path, param in self.model.named_parameters():
            if clean_name(path) not in held and not self.exclude_frozen:
                yield clean_name(path), param.detach()

    def frozen_shards(self) -> FrozenShards:
        """Return the slices of frozen parameters for which this rank answers."""
        return [
            (slice_, _readable(flat.shard, slice_))
            for flat in self.flats
            if flat.master is None and (flat.layout.world_size > 1 or self.saves_copies)
            for slice_ in flat.layout.slices(flat.rank)
        ]


def _readable(shard: Shard, slice_: Slice) -> Chunked:
    """Return the elements of `slice_`, to be read chunk by chunk from where they are kept."""
    place = slice_.shard_offset, slice_.numel
    keep = partial(shard.keep, *place) if isinstance(shard, StagedShard) else None
    return Chunked(slice_.numel, shard.dtype, lambda: shard.chunks(*place), keep)
