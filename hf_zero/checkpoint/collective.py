"""Saves and loads the state of a running engine. All ranks call; writer.py and reader.py write and read the files."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint import differences
from hf_zero.checkpoint.agreement import refuse_differences
from hf_zero.checkpoint.background import BackgroundSaves, Job
from hf_zero.checkpoint.committers import commit_everywhere, find_committers, is_committer
from hf_zero.checkpoint.file_exchange import FileExchange, open_on_nodes
from hf_zero.checkpoint.format import STATE_MARK, Manifest, SaveInfo, TensorInfo, zero_folder
from hf_zero.checkpoint.frozen_digests import FrozenShards, check_frozen, full_digests
from hf_zero.checkpoint.optimizer_state import (
    ATTACHED,
    check_optimizer_fits,
    collect,
    group_numbers,
    load_groups,
    package_of,
    read_states,
)
from hf_zero.checkpoint.reader import CheckpointReader, open_checkpoint
from hf_zero.checkpoint.scheduler_state import plain, state_for
from hf_zero.checkpoint.snapshot import nbytes_of_copy
from hf_zero.checkpoint.stand_alone import scripts
from hf_zero.checkpoint.writer import (
    Chunked,
    FileRecord,
    Scalar,
    SliceState,
    abandon,
    build_manifest,
    check_info,
    commit,
    prepare_folder,
    wait_for_folder,
    write_rank_file,
)
from hf_zero.distributed.comm import Comm
from hf_zero.errors import CheckpointError
from hf_zero.layout import Slice, UnitLayout
from hf_zero.optim.param_groups import OwnedSlice
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.optim.updates.elementwise import FileState
from hf_zero.progress import progress
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.partition import clean_name, tied_names
from hf_zero.sharding.shard import Shard, ShardTensor, StagedShard
from hf_zero.sharding.unit import ShardUnit, gather_resident

logger = logging.getLogger(__name__)

_BROKEN_OFF = "after the broken load"


@dataclass(frozen=True)
class Session:
    """The parts of an engine that go into a checkpoint."""

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
    # While saving: optimizer state that is not where its parameter is.
    file_state: FileState = field(default_factory=FileState)

    @property
    def flats(self) -> list[FlatParam]:
        return [flat for unit in self.units for flat in unit.flats]

    # What a pipeline's sessions answer otherwise: their ranks hold different layers.
    @property
    def num_writers(self) -> int:
        """Ranks that hold a shard each; 1 where every rank holds everything."""
        return max((flat.layout.world_size for flat in self.flats), default=1)

    @property
    def file_number(self) -> int | None:
        """Of the file that this rank writes; None if lower ranks hold everything that it holds."""
        return self.comm.rank if self.comm.rank < self.num_writers else None

    @property
    def saves_copies(self) -> bool:
        """Whether this rank saves what others hold as well: frozen parameters that are not sharded, buffers."""
        return self.comm.rank == 0

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        """Of all parameters, as in the checkpoint."""
        return tuple(flat.layout for flat in self.flats)

    def tensor_infos(self) -> tuple[TensorInfo, ...]:
        """Of all parameters, in the order of the state dict."""
        dtypes = {slot.name: flat.layout.dtype for flat in self.flats for slot in flat.layout.slots}
        named = [(clean_name(path), param) for path, param in self.model.named_parameters()]
        return tuple(TensorInfo(name, tuple(param.shape), dtypes[name]) for name, param in named if name in dtypes)

    def tied(self) -> dict[str, str]:
        """Other name -> the name that the parameter has in `tensor_infos`."""
        return tied_names(self.model)

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups: their hyperparameters count."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    def shapes_in_no_unit(self) -> dict[str, tuple[int, ...]]:
        """Of what the checkpoint holds beside the layouts."""
        return {name: tuple(value.shape) for name, value in in_no_unit(self)}

    def in_first_file(self, copies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this rank writes of tensors that the first file holds; `copies` are its own. All ranks must call."""
        return copies


@dataclass(frozen=True)
class Parts:
    """What of a checkpoint is loaded beside weights and buffers."""

    optimizer: bool = True
    scheduler: bool = True
    counters: bool = True
    strict: bool = True  # model and checkpoint must have the same parameters and buffers
    is_scheduled: bool = False  # a scheduler that is not the engine's sets the rates after the load


ALL_PARTS = Parts()


# -------------------------------------------------------------------- save
@dataclass(frozen=True)
class _Told:
    """What the ranks tell each other of a save."""

    save_id: str  # of those that commit
    groups: dict[str, int]  # parameter -> index of its group, of those that the rank updates
    host: tuple[int | None, str]  # the number of the rank's file, and where it is written


class _Saved:
    """What this rank writes of one save."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self._states: list[SliceState] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self.is_mine = session.file_number is not None

    def collect(self) -> None:
        """Find what is to be written, and refuse what cannot be."""
        if self.is_mine:
            self._states, self._buffers = [*_slice_states(self._session)], _model_buffers(self._session)

    def exchange(self) -> None:
        """Move what the first file holds to the rank that writes it. All ranks must call."""
        self._buffers = self._session.in_first_file(self._buffers)

    def copy(self, background: BackgroundSaves) -> None:
        """Write a copy, which the training does not change."""
        self._states, self._buffers = background.copy(self._states, self._buffers)

    def write(self, info: SaveInfo, save_id: str, bar: str = "") -> FileRecord:
        wait_for_folder(self._folder)
        number, parts = self._session.file_number, (self._states, self._buffers)
        assert number is not None
        return write_rank_file(self._folder, number, *parts, save_id=save_id, info=info, bar=bar)


def snapshot_bytes(session: Session) -> int:
    """Bytes of the copy that a save in the background would make now of what this rank writes. No communication.

    0 where it would make none, and where only the save itself finds out what there is to write.
    """
    if session.file_number is None:
        return 0
    try:
        states = [*_slice_states(session)]
    except CheckpointError:  # state that is no part of its parameter: `file_state`, which communicates, has it
        return 0
    return nbytes_of_copy(states, _model_buffers(session))


def save(
    session: Session,
    folder: Path,
    client_state: Any,
    *,
    exclude_frozen: bool = False,
    beside: Mapping[Path, bytes] | None = None,
    background: BackgroundSaves | None = None,
) -> None:
    """Write a checkpoint into `folder`, with `exclude_frozen` without the weights of frozen parameters.

    All ranks must call. See [Note: Commit order] in writer.py. `beside`, in which order counts, and copies of
    consolidate.py are written with it by rank 0; with `node_local`, by the first rank of each file system.

    With `background` this returns when everything is copied, and the rest follows: [Note: A save in the background].
    What is on a disk is not copied, but kept there as it is until it is written.

    Raises CheckpointError on every rank if any rank could not write its file; the folder's old checkpoint, if it held
    one, is then still complete.
    """
    comm = session.comm
    session = replace(session, exclude_frozen=exclude_frozen)
    if session.optimizer is not None:
        session.optimizer.check_active("a checkpoint")
        session = replace(session, file_state=session.optimizer.strategy.file_state(session.optimizer.owned))
    digests = full_digests(comm, _frozen_shards(session)) if exclude_frozen else {}
    committers = find_committers(comm, zero_folder(folder)) if session.node_local else [0] * comm.world_size
    commits = is_committer(comm, committers)
    saved = _Saved(session, folder)
    beside = {**scripts(folder), **(beside or {})}

    def prepare() -> _Told:
        saved.collect()
        check_info(_info(session, client_state))
        groups = {} if session.optimizer is None else group_numbers(session.optimizer)
        save_id = prepare_folder(folder, beside) if commits else ""
        return _Told(save_id, groups, (session.file_number, socket.gethostname()))

    with _discarding(folder, beside, commits):
        told = comm.agree("checkpoint contents", prepare, CheckpointError)
        saved.exchange()
    save_id = next((one.save_id for one in told if one.save_id), "")  # one for all nodes: a file has one name
    info = replace(_info(session, client_state), **_shared(session, digests, told))
    if background is not None:
        background.start(Job(folder, info, _write_of_copy(saved, info, save_id, background), beside, committers))
        return
    with _discarding(folder, beside, commits):
        write = partial(saved.write, info, save_id, f"Saving {folder.name}" if comm.rank == 0 else "")
        records = comm.agree("checkpoint files", write if saved.is_mine else None, CheckpointError)
        written = [record for record in records if record is not None]
        if not session.node_local:

            def publish() -> None:
                commit(folder, build_manifest(info, written), beside)

            comm.agree("checkpoint manifest", publish if comm.rank == 0 else None, CheckpointError)
    if session.node_local:
        commit_everywhere(comm, folder, lambda: build_manifest(info, written), committers, beside)


def _write_of_copy(
    saved: _Saved, info: SaveInfo, save_id: str, background: BackgroundSaves
) -> Callable[[], FileRecord] | None:
    """Copy now what is saved; what this returns writes the copy, or raises why there is none. No communication.

    A copy that fails is told with what could not be written: the ranks need not wait for each other here.
    """
    try:
        saved.copy(background)
    except Exception as error:
        problem = error  # the name in `except` ends with it

        def refuse() -> FileRecord:
            raise problem

        return refuse
    return partial(saved.write, info, save_id) if saved.is_mine else None


def _shared(session: Session, digests: dict[str, str], told: Sequence[_Told]) -> dict[str, Any]:
    """The fields of SaveInfo that the ranks make together."""
    hosts = dict(one.host for one in told)
    return {
        "frozen_digests": digests if session.exclude_frozen else None,
        "param_group_of": {name: number for one in told for name, number in one.groups.items()},
        "hosts": [hosts[number] for number in range(session.num_writers)] if session.node_local else (),
    }


@contextlib.contextmanager
def _discarding(folder: Path, beside: Iterable[Path], commits: bool) -> Iterator[None]:
    """Delete what was written if the ranks fail inside."""
    try:
        yield
    except CheckpointError:
        if commits:
            with contextlib.suppress(OSError):  # as what failed here has been
                abandon(folder, beside)
        raise


def _frozen_shards(session: Session) -> FrozenShards:
    return [
        (slice_, _readable(flat.shard, slice_))
        for flat in session.flats
        if flat.master is None and (flat.layout.world_size > 1 or session.saves_copies)
        for slice_ in flat.layout.slices(flat.rank)
    ]


def _info(session: Session, client_state: Any) -> SaveInfo:
    """The fields that every rank knows; see `_shared`."""
    optimizer, scheduler = session.optimizer, session.lr_scheduler
    of_optimizer: dict[str, Any] = {}
    if optimizer is not None:
        of_optimizer = {
            "optimizer": type(optimizer.optimizer).__name__,
            "optimizer_package": package_of(optimizer),
            "step_guard": {**optimizer.guard.scaler.state_dict(), "skipped_steps": session.skipped_steps},
        }
    return SaveInfo(
        world_size=session.num_writers,
        stage=session.stage,
        layouts=session.layouts,
        params=session.tensor_infos(),
        tied=session.tied(),
        param_groups=[
            {key: plain(value) for key, value in group.items() if key != "params"} for group in session.groups()
        ],
        global_step=session.global_step,
        client_state=client_state,
        processes=session.comm.world_size,
        lr_scheduler=None if scheduler is None else plain(scheduler.state_dict()),
        lr_scheduler_class=None if scheduler is None else type(scheduler).__name__,
        **of_optimizer,
    )


def _model_buffers(session: Session) -> dict[str, torch.Tensor]:
    """Persistent buffers, and what else is in no unit; one rank saves them for all."""
    if not session.saves_copies:
        return {}
    found = dict(in_no_unit(session))
    return found | {f"{name}{STATE_MARK}{kind}": value for (name, kind), value in session.file_state.odd.items()}


def in_no_unit(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers, and parameters that are no floats (frozen ones, so not where these are left out)."""
    for path, module in session.model.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield clean_name(f"{path}.{name}" if path else name), value
    held = {slot.name for flat in session.flats for slot in flat.layout.slots}
    for path, param in session.model.named_parameters():
        if clean_name(path) not in held and not session.exclude_frozen:
            yield clean_name(path), param.detach()


def _slice_states(session: Session) -> Iterator[SliceState]:
    """What this rank owns of every parameter, and of its optimizer state."""
    owned = {} if session.optimizer is None else {one.slice.name: one for one in session.optimizer.owned}
    for flat in session.flats:
        for slice_ in flat.layout.slices(flat.rank):
            if flat.master is None:
                weights = {} if session.exclude_frozen else {"param": _readable(flat.shard, slice_)}
                yield SliceState(slice_, weights)
                continue
            tensors: dict[str, torch.Tensor | Chunked] = {"master": _readable(flat.master, slice_)}
            scalars: dict[str, Scalar] = {}
            tensors.update((kind, _readable(shards[flat], slice_)) for kind, shards in _attached(session.optimizer))
            if slice_.name in owned and session.optimizer is not None:
                more, scalars = _optimizer_state(session, session.optimizer, owned[slice_.name])
                tensors.update(more)
            yield SliceState(slice_, tensors, scalars)


def _readable(shard: Shard, slice_: Slice) -> Chunked:
    """The elements of `slice_`, chunk by chunk from where they are kept."""
    place = slice_.shard_offset, slice_.numel
    keep = partial(shard.keep, *place) if isinstance(shard, StagedShard) else None
    return Chunked(slice_.numel, shard.dtype, lambda: shard.chunks(*place), keep)


def _optimizer_state(
    session: Session, optimizer: ShardedOptimizer, owned: OwnedSlice
) -> tuple[dict[str, torch.Tensor | Chunked], dict[str, Scalar]]:
    native = optimizer.native_state(owned)
    if native is None:
        states = session.file_state.parts.get(owned.slice.name)
        if states is None:
            states = [optimizer.state.get(master, {}) for master in owned.masters]
        return collect(states, owned, session.file_state.odd)
    tensors: dict[str, torch.Tensor | Chunked] = {}
    scalars: dict[str, Scalar] = {}
    for kind, value in native.items():
        if isinstance(value, Shard):
            tensors[kind] = _readable(value, owned.slice)
        else:
            scalars[kind] = float(value)
    return tensors, scalars


def _attached(optimizer: ShardedOptimizer | None) -> list[tuple[str, dict[FlatParam, ShardTensor]]]:
    """Kinds in the files, and shards, of what is kept beside the state that the optimizer itself has."""
    return [] if optimizer is None else [(ATTACHED + kind, shards) for kind, shards in optimizer.attached.items()]


# -------------------------------------------------------------------- load
def load(session: Session, folder: Path, parts: Parts) -> Manifest:
    """Restore from `folder`, written at any world size and stage; returns its manifest. All ranks must call.

    Raises CheckpointError on every rank. Nothing is changed then, where the manifest, a file's size or header, or a
    parameter is at fault. Data are compared with their checksums as they are read, once: where they are damaged, the
    model holds a part of them (`_half_loaded`), and the error says so.
    """
    comm = session.comm
    if session.optimizer is not None and not session.optimizer.suspended.startswith(_BROKEN_OFF):
        session.optimizer.check_active("loading a checkpoint")
    reader, exchange = _open_together(session, folder, parts)
    total, shown = _bytes_to_load(session, reader, parts), comm.rank == 0
    with reader, torch.no_grad(), progress(f"Loading {folder.name}", total, shown=shown) as reader.on_read:
        check_frozen(comm, reader, _frozen_shards(session))
        said = _differences(session, reader, parts)
        with _half_loaded(session.optimizer, folder, parts):
            comm.agree("weights", lambda: exchange.run(lambda: _load_weights(session, reader)), CheckpointError)
            gather_resident(session.flats)  # communicates, so no rank may have failed before
            if parts.optimizer and session.optimizer is not None:
                load_states = partial(_load_optimizer, session, reader, parts)
                said += comm.agree("optimizer state", lambda: exchange.run(load_states), CheckpointError)[comm.rank]
                work = partial(_load_attached, session, reader)
                comm.agree("state beside the optimizer's", lambda: exchange.run(work), CheckpointError)
                said += _load_guard(session.optimizer, reader.manifest)
        manifest = reader.manifest
    state = state_for(session.lr_scheduler, manifest) if parts.scheduler else None
    if state is not None:
        session.lr_scheduler.load_state_dict(state)
    for line in said if comm.rank == 0 else ():
        logger.warning("%s: %s", folder, line)
    return manifest


def _bytes_to_load(session: Session, reader: CheckpointReader, parts: Parts) -> int:
    """Of this rank's shards, about: an optimizer that needs full parameters reads what it owns of them."""
    total = 0
    for slice_ in (slice_ for flat in session.flats for slice_ in flat.layout.slices(flat.rank)):
        if reader.holds(slice_.name):
            kinds = reader.kinds(slice_.name) if parts.optimizer else [reader.weight_kind(slice_.name)]
            total += sum(slice_.numel * reader.dtype(slice_.name, kind).itemsize for kind in kinds if kind)
    return total


def _differences(session: Session, reader: CheckpointReader, parts: Parts) -> list[str]:
    flats = session.flats
    said = differences.of_names(reader, session.layouts) + differences.of_weights(reader, flats)
    if parts.optimizer and session.optimizer is not None:
        said += differences.of_optimizer_state(reader, session.layouts)
    return said


def _load_guard(optimizer: ShardedOptimizer, manifest: Manifest) -> list[str]:
    """Where the loss scale goes on; says so where it starts anew."""
    saved = dict(manifest.step_guard)
    optimizer.guard.load_state_dict(saved)
    scaler = optimizer.guard.scaler
    if not scaler.dynamic or not saved or "cur_iter" in saved:
        return []
    return [f"it was saved without dynamic loss scaling: the loss scale starts at {scaler.cur_scale:g}"]


@contextlib.contextmanager
def _half_loaded(optimizer: ShardedOptimizer | None, folder: Path, parts: Parts) -> Iterator[None]:
    """After an error inside, the model is half loaded: there is no step and no save until a load is complete."""
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


def _open_together(session: Session, folder: Path, parts: Parts) -> tuple[CheckpointReader, FileExchange]:
    """Open the checkpoint and find out whether it can be loaded, before anything is changed."""
    comm = session.comm
    opened: list[tuple[CheckpointReader, FileExchange, Iterable[int]]] = []
    params = {clean_name(path) for path, _ in session.model.named_parameters()}
    if session.node_local:
        opened.append(open_on_nodes(comm, folder))

    def work() -> None:
        if not opened:
            reader = open_checkpoint(folder)
            share = range(comm.rank, len(reader.manifest.files), comm.world_size)
            opened.append((reader, FileExchange(comm, (), ()), share))
        reader, _, mine = opened[0]
        buffers = session.shapes_in_no_unit()
        if reader.manifest.frozen_digests is not None:  # then frozen parameters are not in the files, integers too
            stored = {info.name for info in reader.manifest.buffers}
            buffers = {name: shape for name, shape in buffers.items() if name in stored or name not in params}
        reader.check_against(session.layouts, buffers, strict=parts.strict)
        if parts.optimizer and session.optimizer is not None:
            check_optimizer_fits(session.optimizer, reader.manifest)
        if parts.scheduler:
            state_for(session.lr_scheduler, reader.manifest)
        reader.verify_before_reading(mine)

    comm.agree("checkpoint", work, CheckpointError)
    reader, exchange, _ = opened[0]
    identities = comm.all_gather_object(f"{folder}, {reader.manifest.identity}", "load_checkpoint")
    refuse_differences("load_checkpoint", identities, "nothing was loaded")
    return reader, exchange


def _load_weights(session: Session, reader: CheckpointReader) -> None:
    """Masters or parameters of this rank, and buffers. No communication."""
    absent = reader.manifest.frozen_digests or {}  # found to be the same
    for flat in session.flats:
        for slice_ in flat.layout.slices(flat.rank):
            if slice_.name in absent or not reader.holds(slice_.name):
                continue
            _load_slice(flat.best, slice_, reader)
        flat.refresh()
    stored = {info.name for info in reader.manifest.buffers}
    for name, value in in_no_unit(session):
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


def _load_optimizer(session: Session, reader: CheckpointReader, parts: Parts) -> list[str]:
    """Hyperparameters first: where a state belongs depends on them. Returns what is to be said."""
    optimizer = session.optimizer
    assert optimizer is not None
    is_scheduled = parts.is_scheduled or session.lr_scheduler is not None
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


def load_attached(session: Session, folder: Path, kind: str) -> None:
    """Restore one attached kind alone from `folder`. All ranks must call.

    Raises CheckpointError on every rank: as `load`, and where the folder does not hold this kind.
    """
    reader, exchange = _open_together(session, folder, Parts(optimizer=False, scheduler=False))
    with reader:
        stored = {name for kinds in reader.manifest.kinds.values() for name in kinds}
        if ATTACHED + kind not in stored:
            raise CheckpointError(f"{folder} holds no {kind!r}: it was saved without, or under another name")
        work = partial(_load_attached, session, reader, only=kind)
        session.comm.agree(kind, lambda: exchange.run(work), CheckpointError)


def _load_attached(session: Session, reader: CheckpointReader, *, only: str | None = None) -> None:
    """What a checkpoint does not hold of an attached kind starts from the weights, which have been loaded."""
    new = set()
    for kind, shards in _attached(session.optimizer):
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
    if new and session.comm.rank == 0:
        logger.warning("%s: %s starts anew from the weights", reader.folder, ", ".join(sorted(new)))
