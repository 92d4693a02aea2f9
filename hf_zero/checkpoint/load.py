"""Loads a checkpoint into a running engine. All ranks call; reader.py reads the files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hf_zero.checkpoint import differences
from hf_zero.checkpoint.agreement import refuse_differences
from hf_zero.checkpoint.contents import CheckpointContents
from hf_zero.checkpoint.file_exchange import FileExchange, open_on_nodes
from hf_zero.checkpoint.format import Manifest
from hf_zero.checkpoint.frozen_digests import check_frozen
from hf_zero.checkpoint.optimizer_state import ATTACHED, check_optimizer_fits, load_groups, read_states
from hf_zero.checkpoint.reader import CheckpointReader, open_checkpoint
from hf_zero.checkpoint.scheduler_state import state_for
from hf_zero.errors import CheckpointError
from hf_zero.layout import Slice
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.progress import progress
from hf_zero.sharding.model_params import clean_name
from hf_zero.sharding.shard import Shard
from hf_zero.sharding.unit import gather_resident

logger = logging.getLogger(__name__)

_BROKEN_OFF = "after the broken load"


@dataclass(frozen=True)
class Parts:
    """The parts of a checkpoint that are loaded beside weights and buffers."""

    optimizer: bool = True
    scheduler: bool = True
    counters: bool = True
    strict: bool = True  # model and checkpoint must have the same parameters and buffers
    is_scheduled: bool = False  # a scheduler that is not the engine's sets the rates after the load


ALL_PARTS = Parts()


def load(contents: CheckpointContents, folder: Path, parts: Parts) -> Manifest:
    """Restore from `folder`, written at any world size and stage; returns its manifest. All ranks must call.

    Raises CheckpointError on every rank. Nothing is changed then, where the manifest, a file's size or header, or a
    parameter is at fault. Data are compared with their checksums as they are read, once: where they are damaged, the
    model holds a part of them (`_half_loaded`), and the error says so.
    """
    comm = contents.comm
    if contents.optimizer is not None and not contents.optimizer.suspended.startswith(_BROKEN_OFF):
        contents.optimizer.check_active("loading a checkpoint")
    reader, exchange = _open_together(contents, folder, parts)
    total, shown = _bytes_to_load(contents, reader, parts), comm.rank == 0
    with reader, torch.no_grad(), progress(f"Loading {folder.name}", total, shown=shown) as reader.on_read:
        check_frozen(comm, reader, contents.frozen_shards())
        said = _differences(contents, reader, parts)
        with _half_loaded(contents.optimizer, folder, parts):
            comm.agree("weights", lambda: exchange.run(lambda: _load_weights(contents, reader)), CheckpointError)
            gather_resident(contents.flats)  # communicates, so no rank may have failed before
            if parts.optimizer and contents.optimizer is not None:
                load_states = partial(_load_optimizer, contents, reader, parts)
                said += comm.agree("optimizer state", lambda: exchange.run(load_states), CheckpointError)[comm.rank]
                work = partial(_load_attached, contents, reader)
                comm.agree("state beside the optimizer's", lambda: exchange.run(work), CheckpointError)
                said += _load_guard(contents.optimizer, reader.manifest)
        manifest = reader.manifest
    state = state_for(contents.lr_scheduler, manifest) if parts.scheduler else None
    if state is not None:
        contents.lr_scheduler.load_state_dict(state)
    for line in said if comm.rank == 0 else ():
        logger.warning("%s: %s", folder, line)
    return manifest


def _bytes_to_load(contents: CheckpointContents, reader: CheckpointReader, parts: Parts) -> int:
    """Return about the bytes that this rank reads: an optimizer that needs full parameters reads what it owns."""
    total = 0
    for slice_ in (slice_ for flat in contents.flats for slice_ in flat.layout.slices(flat.rank)):
        if reader.holds(slice_.name):
            kinds = reader.kinds(slice_.name) if parts.optimizer else [reader.weight_kind(slice_.name)]
            total += sum(slice_.numel * reader.dtype(slice_.name, kind).itemsize for kind in kinds if kind)
    return total


def _differences(contents: CheckpointContents, reader: CheckpointReader, parts: Parts) -> list[str]:
    flats = contents.flats
    said = differences.of_names(reader, contents.layouts) + differences.of_weights(reader, flats)
    if parts.optimizer and contents.optimizer is not None:
        said += differences.of_optimizer_state(reader, contents.layouts)
    return said


def _load_guard(optimizer: ShardedOptimizer, manifest: Manifest) -> list[str]:
    """Let the loss scale go on where it was. Returns what is to be said: where it starts anew."""
    saved = dict(manifest.step_guard)
    optimizer.guard.load_state_dict(saved)
    scaler = optimizer.guard.scaler
    if not scaler.dynamic or not saved or "cur_iter" in saved:
        return []
    return [f"it was saved without dynamic loss scaling: the loss scale starts at {scaler.cur_scale:g}"]


@contextlib.contextmanager
def _half_loaded(optimizer: ShardedOptimizer | None, folder: Path, parts: Parts) -> Iterator[None]:
    """Inside, an error leaves the model half loaded: there is no step and no save until a load is complete."""
    was_broken = optimizer is not None and optimizer.suspended != ""
    if optimizer is not None:
        optimizer.suspended = f"{_BROKEN_OFF} of {folder}: load a checkpoint with its optimizer state first"
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}\nThe model now holds a part of {folder}: load a complete checkpoint before it trains on."
        ) from error
    if optimizer is not None and (parts.optimizer or not was_broken):
        optimizer.suspended = ""


def _open_together(contents: CheckpointContents, folder: Path, parts: Parts) -> tuple[CheckpointReader, FileExchange]:
    """Open the checkpoint and find out whether it can be loaded, before anything is changed."""
    comm = contents.comm
    opened: list[tuple[CheckpointReader, FileExchange, Iterable[int]]] = []
    params = {clean_name(path) for path, _ in contents.model.named_parameters()}
    if contents.node_local:
        opened.append(open_on_nodes(comm, folder))

    def work() -> None:
        if not opened:
            reader = open_checkpoint(folder)
            share = range(comm.rank, len(reader.manifest.files), comm.world_size)
            opened.append((reader, FileExchange(comm, (), ()), share))
        reader, _, mine = opened[0]
        buffers = contents.shapes_in_no_unit()
        if reader.manifest.frozen_digests is not None:  # then frozen parameters are not in the files, integers too
            stored = {info.name for info in reader.manifest.buffers}
            buffers = {name: shape for name, shape in buffers.items() if name in stored or name not in params}
        reader.check_against(contents.layouts, buffers, strict=parts.strict)
        if parts.optimizer and contents.optimizer is not None:
            check_optimizer_fits(contents.optimizer, reader.manifest)
        if parts.scheduler:
            state_for(contents.lr_scheduler, reader.manifest)
        reader.verify_before_reading(mine)

    comm.agree("checkpoint", work, CheckpointError)
    reader, exchange, _ = opened[0]
    identities = comm.all_gather_object(f"{folder}, {reader.manifest.identity}", "load_checkpoint")
    refuse_differences("load_checkpoint", identities, "nothing was loaded")
    return reader, exchange


def _load_weights(contents: CheckpointContents, reader: CheckpointReader) -> None:
    """Load masters or parameters of this rank, and buffers. No communication."""
    absent = reader.manifest.frozen_digests or {}  # found to be the same
    for flat in contents.flats:
        for slice_ in flat.layout.slices(flat.rank):
            if slice_.name in absent or not reader.holds(slice_.name):
                continue
            _load_slice(flat.best, slice_, reader)
        flat.refresh()
    stored = {info.name for info in reader.manifest.buffers}
    for name, value in contents.unmanaged_tensors():
        if name in stored:
            value.copy_(reader.read_buffer(name).view(value.shape))


def _load_slice(shard: Shard, slice_: Slice, reader: CheckpointReader) -> None:
    """Read weights into the memory of the shard, where it has some of their type on the host."""
    name, kind, memory = slice_.name, reader.weight_kind(slice_.name), shard.in_memory
    if memory is not None and kind is not None and reader.fits([memory.memory], name, kind):
        memory.wait_for_readers()
        reader.read_into(memory.slice_tensors(slice_), name, kind, slice_)
    else:
        shard.write_slice(slice_, reader.read_weights(name, slice_, shard.dtype))


def _load_optimizer(contents: CheckpointContents, reader: CheckpointReader, parts: Parts) -> list[str]:
    """Load hyperparameters, then states: where a state belongs depends on them. Returns what is to be said."""
    optimizer = contents.optimizer
    assert optimizer is not None
    is_scheduled = parts.is_scheduled or contents.lr_scheduler is not None
    changed = load_groups(optimizer.param_groups, reader.manifest.param_groups, is_scheduled=is_scheduled)
    group_of = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    earlier = dict(optimizer.state)
    optimizer.state.clear()
    for owned in optimizer.owned:
        if owned.native:
            optimizer.load_native_state(
                owned, read_states(reader, owned.slice.name, owned.slice, owned.masters, {})[0]
            )
    for name, pieces, tensors in optimizer.strategy.places(optimizer.owned):
        group = group_of.get(id(tensors[0]), {}) if tensors else {}
        before = [earlier.pop(tensor, {}) for tensor in tensors]
        for tensor, state in zip(tensors, read_states(reader, name, pieces, tensors, group, before), strict=True):
            if state:
                optimizer.state[tensor] = state
    if not changed:
        return []
    return [f"hyperparameters are those of the checkpoint: {'; '.join(changed)}. Set others after the load."]


def load_attached(contents: CheckpointContents, folder: Path, kind: str) -> None:
    """Restore one attached kind alone from `folder`. All ranks must call.

    Raises CheckpointError on every rank: as `load`, and where the folder does not hold this kind.
    """
    reader, exchange = _open_together(contents, folder, Parts(optimizer=False, scheduler=False))
    with reader:
        stored = {name for kinds in reader.manifest.kinds.values() for name in kinds}
        if ATTACHED + kind not in stored:
            raise CheckpointError(f"{folder} holds no {kind!r}: it was saved without, or under another name")
        work = partial(_load_attached, contents, reader, only=kind)
        contents.comm.agree(kind, lambda: exchange.run(work), CheckpointError)


def _load_attached(contents: CheckpointContents, reader: CheckpointReader, *, only: str | None = None) -> None:
    """Load attached kinds. Parts that the checkpoint does not hold start from the weights, which have been loaded."""
    new = set()
    for kind, shards in contents.attached():
        if only is not None and kind != ATTACHED + only:
            continue
        for flat, shard in shards.items():
            for slice_ in flat.layout.slices(flat.rank):
                if not reader.holds(slice_.name):
                    new.add(kind)
                    chunks = flat.best.chunks(slice_.shard_offset, slice_.numel)
                    values = torch.cat([chunk.to("cpu", shard.dtype, copy=True) for chunk in chunks])
                elif kind in reader.kinds(slice_.name):
                    values = reader.read(slice_.name, kind, slice_)
                else:
                    new.add(kind)
                    values = reader.read_weights(slice_.name, slice_, shard.dtype)
                shard.write_slice(slice_, values)
    if new and contents.comm.rank == 0:
        logger.warning("%s: %s starts anew from the weights", reader.folder, ", ".join(sorted(new)))
