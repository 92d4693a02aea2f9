"""Full weights out of a sharded model and back, one unit at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch import nn

from hf_zero.distributed.comm import Comm
from hf_zero.errors import CheckpointError, DivergenceError, OffloadError, StateError
from hf_zero.layout import Slice
from hf_zero.runtime.edit_watch import EditWatch
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.model_params import clean_name, tied_names
from hf_zero.sharding.shard import ShardTensor, slice_of
from hf_zero.sharding.unit import ShardUnit, UnitState, gather_resident


def own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers in state_dict order, under plain names."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{clean_name(path)}." if clean_name(path) else ""
        for name, param in module._parameters.items():
            if param is not None:
                yield prefix + name, param
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


class FullWeights:
    """Reads and writes the weights of one engine's model as full tensors."""

    def __init__(
        self,
        model: nn.Module,
        units: list[ShardUnit],
        params: OnDemandParams,
        comm: Comm,
        before_write: Callable[[], None],
    ) -> None:
        self._model = model
        self._units = units
        self._params = params
        self._comm = comm
        self._before_write = before_write  # nothing may write to the masters beside an edit
        self._blocks: list[EditWatch] = []  # `looked_at` and `edited` that have been entered, the outermost first
        self._worked_on: set[ShardUnit] = set()

    @contextlib.contextmanager
    def gathered(self, units: Iterable[ShardUnit]) -> Iterator[None]:
        """Unshard `units` inside the block, for reading. All ranks must call."""
        units = list(units)
        with torch.no_grad():
            for unit in units:
                if not unit.is_exact:  # it was gathered for a forward or a backward
                    self._params.unshard(unit, exact=True, wait=unit.state is UnitState.UNSHARDED)
        wanted = [unit for unit in units if unit.state is not UnitState.UNSHARDED]
        if wanted:
            with self._comm.coalesced("weights"):
                self._params.gather_ahead(wanted)
        with self._params.pinned(wanted):
            yield

    @contextlib.contextmanager
    def looked_at(self, units: Iterable[ShardUnit]) -> Iterator[None]:
        """Gather for code that is not ours; raise StateError on every rank if one wrote to a parameter."""
        units = list(units)
        with self.gathered(units):
            watch = EditWatch([flat for unit in units for flat in unit.flats], by_value=False)
            with self._open(watch):
                yield
            stayed = all(unit.state is UnitState.UNSHARDED for unit in units)  # else a step released them
            self._refuse_edits(list(watch.edited()) if stayed else [])

    def _refuse_edits(self, mine: list[str]) -> None:
        everyone = self._comm.all_gather_object(mine, "edits")
        said = [f"rank {rank}: {_some(theirs)}" for rank, theirs in enumerate(everyone) if theirs]
        if said:
            raise StateError(
                "parameter(s) that were gathered for reading were written to, and no other rank hears of it:\n"
                + "\n".join(said)
                + "\nName the rank whose edits are to be kept: hf_zero.gathered_params(..., write_rank=0)."
            )

    @contextlib.contextmanager
    def worked_on(self, units: Iterable[ShardUnit]) -> Iterator[None]:
        """Let an `edited` of rank 0 inside the block leave out `units`: they are whole, and rank 0's values win.

        It is for code that is not ours and gathers by itself, as it does under DeepSpeed.
        """
        begun = set(units) - self._worked_on
        self._worked_on |= begun
        try:
            yield
        finally:
            self._worked_on -= begun

    @contextlib.contextmanager
    def edited(self, units: Iterable[ShardUnit], write_rank: int, *, alike: bool = False) -> Iterator[None]:
        """Unshard `units` inside the block and keep the edits of `write_rank`: all or none. All ranks must call.

        Inside `looked_at` too, which sees the edits from the end of the block on.

        Args:
            alike: The ranks run the same code, perhaps with other random numbers: edits of others are dropped. The
                block is one of `worked_on` too.
        Raises StateError on every rank, with nothing kept, if another rank wrote or any rank left by an exception.
        """
        units = [unit for unit in units if write_rank != 0 or unit not in self._worked_on]
        readers = [watch for watch in self._blocks_around(units) if not watch.by_value]
        self.check_idle(units, readers)
        self._before_write()
        flats = [flat for unit in units for flat in unit.flats]
        # Parameters that stay unsharded are edited in place. Masters are no copy of it: they may be the same memory.
        shown = {flat for unit in units if unit.state is UnitState.UNSHARDED for flat in unit.flats}
        staying = [flat for flat in flats if flat in shown or not flat.on_demand]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.gathered(units))
            writes = self._comm.rank == write_rank
            saved = [flat.full.to("cpu", copy=True) for flat in staying] if writes else []
            watch = EditWatch(flats, by_value=True)
            for reader in readers:
                stack.enter_context(reader.leaving_to(watch))
            try:
                with self._open(watch), self.worked_on(units if alike else ()):
                    yield
                error = None
            except (DivergenceError, OffloadError):
                raise  # the ranks cannot talk any more
            except Exception as problem:
                error = problem
            if any(unit.state is not UnitState.UNSHARDED for unit in units):
                raise StateError("a step inside gathered_params(..., write_rank=...): parameters have changed twice")
            try:
                names = self._agree_on_edits(watch, write_rank, error, alike=alike)
            except StateError:
                for flat, values in zip(staying, saved, strict=False):
                    flat.full.copy_(values)
                self._broadcast(staying, write_rank)
                for flat in staying:
                    flat.bind_views()
                if error is not None:
                    raise error from None
                raise
            changed = [flat for flat in flats if any(slot.name in names for slot in flat.layout.slots)]
            self._broadcast(changed, write_rank)
            for flat in changed:
                take_over(flat, names)

    @contextlib.contextmanager
    def _open(self, watch: EditWatch) -> Iterator[None]:
        self._blocks.append(watch)
        try:
            yield
        finally:
            self._blocks.remove(watch)

    def _blocks_around(self, units: Sequence[ShardUnit]) -> list[EditWatch]:
        """The blocks that show one of `units`."""
        flats = {flat for unit in units for flat in unit.flats}
        return [watch for watch in self._blocks if not flats.isdisjoint(watch.flats)]

    def are_shown(self, part: nn.Module) -> bool:
        """Whether a block that has been entered shows all parameters of `part` that are sharded else."""
        params = {id(tensor) for _, tensor in own_tensors(part)}
        flats = {flat for unit in self._units if unit.on_demand for flat in unit.flats}
        wanted = {flat for flat in flats if not params.isdisjoint(id(param) for param in flat.params)}
        return bool(wanted) and all(any(flat in watch.flats for watch in self._blocks) for flat in wanted)

    def check_idle(self, units: Sequence[ShardUnit], readers: Sequence[EditWatch] = ()) -> None:
        """Raise StateError if one of `units` is in use, or shown by another block than `readers`.

        Its values cannot be replaced now.
        """
        on_demand = [unit for unit in units if unit.on_demand]
        if any(watch not in readers for watch in self._blocks_around(units)):
            raise StateError(
                "parameters cannot be written inside another gathered_params that shows them. Leave that block first; "
                "inside one for reading, write in hf_zero.gathered_params(..., write_rank=...)."
            )
        shown = {flat for watch in readers for flat in watch.flats}
        in_use = [unit for unit in on_demand if unit.state is UnitState.UNSHARDED and shown.isdisjoint(unit.flats)]
        if in_use or (on_demand and self._params.awaits_backward):
            raise StateError(
                "parameters cannot be written between forward and backward: units are in use. Write before the "
                "forward or after engine.step()."
            )

    def _agree_on_edits(self, watch: EditWatch, write_rank: int, error: Exception | None, *, alike: bool) -> set[str]:
        """Return the names of what `write_rank` has edited. All ranks must call; raises StateError on all of them."""
        mine = dict[str, int]()
        try:
            if error is None:
                watch.take_replaced()
                mine = watch.edited()
        except StateError as problem:
            error = problem
        text = None if error is None else f"{type(error).__name__}: {error}"
        everyone = self._comm.all_gather_object((text, mine), "edits")
        failed = [f"rank {rank}: {theirs}" for rank, (theirs, _) in enumerate(everyone) if theirs is not None]
        if failed:
            raise StateError("an edit of parameters broke off, and nothing of it is kept:\n" + "\n".join(failed))
        kept = everyone[write_rank][1]
        strays = []
        for rank, (_, theirs) in enumerate(everyone):
            lost = [name for name, bits in theirs.items() if kept.get(name) != bits]  # the same edit is no loss
            if lost and not alike:
                strays.append(f"rank {rank}: {_some(lost)}")
        if strays:
            raise StateError(
                f"gathered_params(..., write_rank={write_rank}) keeps the edits of rank {write_rank} alone, but other "
                "ranks made other edits, and none is kept:\n"
                + "\n".join(strays)
                + f"\nWrite under `if rank == {write_rank}`."
            )
        return set(kept)

    def _broadcast(self, flats: Iterable[FlatParam], src: int) -> None:
        for flat in flats:
            for start, numel in flat.layout.buckets():
                bucket = flat.full[start : start + numel]
                self._comm.broadcast(bucket, f"edits of {flat.layout.name}", src=src)
            if not flat.on_demand:  # a backward that saved the old values must say so, as in plain torch
                torch.autograd.graph.increment_version(flat.params)

    def state_dict(self, keep: bool, *, trainable_only: bool) -> dict[str, torch.Tensor]:
        """See ZeroEngine.full_state_dict."""
        whole: dict[int, torch.Tensor] = {}  # by parameter: adapters and wrappers may have renamed it
        for unit in self._units:
            with self.gathered([unit]):
                for param in (param for flat in unit.flats for param in flat.params):
                    if keep and (param.requires_grad or not trainable_only):
                        whole[id(param)] = param.detach().to("cpu", copy=True)
        if not keep:
            return {}
        ordered: dict[str, torch.Tensor] = {}
        for name, tensor in own_tensors(self._model):
            if id(tensor) in whole:
                ordered[name] = whole[id(tensor)]
            elif not trainable_only:  # buffers, and parameters that are in no unit: integers, packed ones
                ordered[name] = tensor.detach().to("cpu", copy=True)
        return ordered

    @contextlib.contextmanager
    def saving_from(self, state: Mapping[str, torch.Tensor], part: nn.Module | None = None) -> Iterator[None]:
        """Let parameters be these full tensors inside the block, on this rank alone, for code that saves a model.

        No communication. A forward inside, without gradients, is this rank's own; writes to its parameters are lost.

        Args:
            state: Full tensors by name, as `state_dict` returns them; parameters that it lacks stay sharded.
            part: The module that has these names; by default the model.
        """
        named = own_tensors(self._model if part is None else part)
        whole = {id(own): state[name] for name, own in named if name in state}
        with contextlib.ExitStack() as stack:
            for unit in self._units:
                stack.enter_context(unit.saving_from(whole))
            yield

    def without_data(self) -> dict[str, torch.Tensor]:
        """Return what `state_dict` gives, as tensors that have shape and type only. No communication."""
        return {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in own_tensors(self._model)
        }

    def for_ranks(self, wanted: Sequence[Set[str]]) -> dict[str, torch.Tensor]:
        """See ZeroEngine.weights_for_ranks."""
        own = dict(own_tensors(self._model))
        names = wanted[self._comm.rank] if self._comm.rank < len(wanted) else set[str]()
        mine = {id(own[name]) for name in names}
        anyones = {id(own[name]) for theirs in wanted for name in theirs}
        whole: dict[int, torch.Tensor] = {}
        in_units: set[int] = set()
        for unit in self._units:
            params = {id(param): param for flat in unit.flats for param in flat.params}
            in_units |= params.keys()
            if not params.keys() & anyones:
                continue
            with self.gathered([unit]):
                whole.update({key: params[key].detach().to("cpu", copy=True) for key in params.keys() & mine})
        outside = {id(tensor): (name, tensor) for name, tensor in own.items() if id(tensor) in anyones - in_units}
        for key, (name, tensor) in outside.items():  # buffers, and parameters that are in no unit
            values = self._from_rank_0(name, tensor)
            if key in mine:
                whole[key] = values
        return {name: whole[id(own[name])] for name in names}

    def _from_rank_0(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The values that rank 0 has, on the CPU: ranks may have different buffers, and rank 0's are saved."""
        values = tensor.detach().to(self._comm.device, copy=True).contiguous()
        if values.numel():
            self._comm.broadcast(values.reshape(-1).view(torch.uint8), name, src=0)
        return values.cpu()

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
        """See ZeroEngine.load_full_state_dict."""
        names = tied_names(self._model)
        own = dict(own_tensors(self._model))
        wanted = {names.get(name, name): tensor for name, tensor in own.items()}
        given = {names.get(clean_name(name), clean_name(name)): name for name in state}
        problems = [f"missing: {name}" for name in wanted if name not in given]
        problems += [f"not in the model: {name}" for name in given if name not in wanted]
        if strict and problems:
            raise CheckpointError(
                f"rank {self._comm.run_rank}: the weights do not fit the model:\n  " + "\n  ".join(problems)
            )
        shapes = [
            f"{name}: {tuple(state[given[name]].shape)} in the file, {tuple(tensor.shape)} in the model"
            for name, tensor in wanted.items()
            if name in given and state[given[name]].shape != tensor.shape
        ]
        if shapes:
            raise CheckpointError(f"rank {self._comm.run_rank}: shapes differ:\n  " + "\n  ".join(shapes))
        with torch.no_grad():
            sources = {id(tensor): given[name] for name, tensor in wanted.items() if name in given}
            for unit in self._units:
                mine: dict[str, torch.Tensor] = {}
                for flat in unit.flats:
                    for slot, param in zip(flat.layout.slots, flat.params, strict=True):
                        if id(param) in sources:
                            mine[slot.name] = state[sources.pop(id(param))]
                if mine:
                    with self._unsharded_again(unit):
                        self.set_unit(unit, mine)
            for tensor in wanted.values():  # buffers, and parameters that are in no unit
                if id(tensor) in sources:
                    tensor.copy_(state[sources[id(tensor)]])

    @contextlib.contextmanager
    def _unsharded_again(self, unit: ShardUnit) -> Iterator[None]:
        """Unshard `unit` again, with the values that it is given here, for the blocks that read it.

        All ranks must call.
        """
        readers = self._blocks_around([unit])
        if not readers or any(watch.by_value for watch in readers):
            yield
            return
        with contextlib.ExitStack() as stack:
            for reader in readers:
                stack.enter_context(reader.leaving_to(EditWatch(unit.flats, by_value=False)))
            yield
            self._params.unshard(unit, exact=True)

    def set_unit(self, unit: ShardUnit, state: Mapping[str, torch.Tensor]) -> None:
        """Set parameters of a unit that is not in use, masters too, from full tensors. No communication.

        `state` must be the same on every rank, with the shapes of the parameters.
        """
        self._params.reshard(unit)  # it may have been gathered ahead
        for flat in unit.flats:
            flat.shard_changed()
            targets = list(flat.owned().values())
            for slice_ in flat.layout.slices(flat.rank):
                if slice_.name in state:
                    mine = slice_of(state[slice_.name], slice_)
                    for target in targets:
                        target.write_slice(slice_, mine)
            if not flat.on_demand:
                for slot, param in zip(flat.layout.slots, flat.params, strict=True):
                    if slot.name in state:
                        param.copy_(state[slot.name])

    def set_piece(self, unit: ShardUnit, flat: FlatParam, slice_: Slice | None, values: torch.Tensor | None) -> None:
        """Set what this rank owns of a parameter of a unit that is not in use, masters too. All ranks must call.

        `values` is 1-D [run.numel]; None where this rank owns nothing.
        """
        self._params.reshard(unit)
        if slice_ is not None and values is not None:
            for target in flat.owned().values():
                target.write_slice(slice_, values)
        share_resident(flat)


def share_resident(flat: FlatParam) -> None:
    """Make parameters that are never sharded whole again, from what each rank owns. All ranks must call."""
    gather_resident([flat])
    if flat.on_demand:
        return
    torch.autograd.graph.increment_version(flat.params)  # a backward that saved the old values must say so


def take_over(flat: FlatParam, names: set[str]) -> None:
    """Bring shard and master of these parameters up to date with what `full` holds.

    A master keeps its digits where the parameter is still what it rounds to. All ranks must call.
    """
    flat.shard_changed()
    whole = ShardTensor(flat.layout, flat.rank, flat.full, in_full=True)
    for slice_ in flat.layout.slices(flat.rank):
        if slice_.name not in names:
            continue
        values = whole.read_slice(slice_)
        if flat.on_demand:
            flat.shard.write_slice(slice_, values)
        master = flat.master
        if master is not None and master is not flat.shard:
            old = master.read_slice(slice_)
            values = values.to(old.device)
            master.write_slice(slice_, torch.where(old.to(flat.dtype) == values, old, values.to(old.dtype)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
