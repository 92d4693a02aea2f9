"""Saves and loads the state of a running engine. All ranks call; files are written and read by save.py and load.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hf_zero.checkpoint.frozen import FrozenShards, check_frozen, whole_digests
from hf_zero.checkpoint.latest import set_latest
from hf_zero.checkpoint.load import CheckpointReader, open_checkpoint
from hf_zero.checkpoint.manifest import FROZEN_DIGESTS, SaveInfo, TensorInfo
from hf_zero.checkpoint.optimizer_state import ATTACHED, collect, read_states, state_name
from hf_zero.checkpoint.save import (
    build_manifest,
    check_info,
    commit,
    discard,
    prepare_folder,
    write_rank_file,
)
from hf_zero.checkpoint.state import Chunked, RunState, Scalar
from hf_zero.comm import Comm
from hf_zero.errors import CheckpointError, OffloadError
from hf_zero.layout import Run
from hf_zero.optim.owned import OwnedRun
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.optim.update import FileState
from hf_zero.shards.buffer import FlatBuffer
from hf_zero.shards.partition import clean_name, tied_names
from hf_zero.shards.stored import StoredShard
from hf_zero.shards.tensors import ShardTensor
from hf_zero.shards.unit import ShardUnit

logger = logging.getLogger(__name__)

# Optimizers that keep the same state under the same names: one goes on where the other stopped.
_SAME_STATE = frozenset(["Adam", "AdamW", "CPUAdam", "UncorrectedAdam"])
_T = TypeVar("_T")


@dataclass(frozen=True)
class Session:
    """What of an engine goes into a checkpoint."""

    model: nn.Module
    units: list[ShardUnit]
    comm: Comm
    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    stage: int
    global_step: int
    exclude_frozen: bool = False  # frozen weights are not saved, but their digests: [Note: Digests of frozen weights]
    file_state: FileState = field(
        default_factory=FileState
    )  # while saving: optimizer state that is not where its parameter is

    @property
    def buffers(self) -> list[FlatBuffer]:
        return [buffer for unit in self.units for buffer in unit.buffers]

    @property
    def num_writers(self) -> int:
        """Ranks that hold a part each; 1 where every rank holds everything."""
        return max((buffer.layout.world_size for buffer in self.buffers), default=1)


@dataclass(frozen=True)
class Loaded:
    global_step: int
    client_state: Any


# -------------------------------------------------------------------- save
def save(session: Session, folder: Path, client_state: Any, exclude_frozen: bool = False) -> Path:
    """Write a checkpoint into `folder`, with `exclude_frozen` without the weights of frozen parameters.

    All ranks must call. See [Note: Commit order] in save.py.

    Raises CheckpointError on every rank if any rank could not write its part; the folder's old checkpoint, if it held
    one, is then still whole.
    """
    comm = session.comm
    session = replace(session, exclude_frozen=exclude_frozen)
    if session.optimizer is not None:
        session.optimizer.check_active("a checkpoint")
        owned = list(session.optimizer.owned_runs())
        session = replace(session, file_state=session.optimizer.strategy.file_state(owned))
    frozen = whole_digests(comm, _frozen_shards(session)) if session.exclude_frozen else {}
    info = _info(session, client_state, frozen)
    _together(comm, "checkpoint contents", lambda: check_info(info))
    save_id = _together(comm, "checkpoint folder", lambda: prepare_folder(folder) if comm.rank == 0 else "")[0]
    writes = comm.rank < session.num_writers
    try:
        records = _together(
            comm,
            "checkpoint files",
            lambda: (
                write_rank_file(folder, comm.rank, _run_states(session), _model_buffers(session), save_id=save_id)
                if writes
                else None
            ),
        )
    except CheckpointError:
        if comm.rank == 0:
            discard(folder)
        raise
    written = [record for record in records if record is not None]
    _together(
        comm, "checkpoint manifest", lambda: commit(folder, build_manifest(info, written)) if comm.rank == 0 else None
    )
    return folder


def mark_latest(comm: Comm, folder: Path, tag: str | None) -> None:
    """Let a load of `folder` without a tag find what was saved last. All ranks must call; see latest.py."""
    _together(comm, "checkpoint tag", lambda: set_latest(folder, tag) if comm.rank == 0 else None)


def _together(comm: Comm, what: str, work: Callable[[], _T]) -> list[_T]:
    return comm.together(what, work, catch=(CheckpointError, OffloadError, OSError), raise_as=CheckpointError)


def _frozen_shards(session: Session) -> FrozenShards:
    return [
        (run, _readable(buffer.shard, run))
        for buffer in session.buffers
        if buffer.master is None and (buffer.layout.world_size > 1 or session.comm.rank == 0)
        for run in buffer.layout.runs(buffer.rank)
    ]


def _info(session: Session, client_state: Any, frozen: dict[str, str]) -> SaveInfo:
    layouts = tuple(buffer.layout for buffer in session.buffers)
    dtypes = {slot.name: layout.dtype for layout in layouts for slot in layout.slots}
    aliases = tied_names(session.model)
    params = []
    for path, param in session.model.named_parameters():
        name = clean_name(path)
        if name in dtypes:
            params.append(TensorInfo(name, tuple(param.shape), dtypes[name]))
    extra: dict[str, Any] = {"processes": session.comm.world_size}
    if frozen:
        extra[FROZEN_DIGESTS] = frozen
    if session.lr_scheduler is not None:
        extra["lr_scheduler"] = _plain(session.lr_scheduler.state_dict())
        extra["lr_scheduler_class"] = type(session.lr_scheduler).__name__
    if session.optimizer is not None:
        extra["optimizer"] = type(session.optimizer.optimizer).__name__
        extra["step_guard"] = session.optimizer.guard.state_dict()
        extra["optimizer_package"] = _package(session.optimizer)
    return SaveInfo(
        world_size=session.num_writers,
        stage=session.stage,
        layouts=layouts,
        params=tuple(params),
        tied=aliases,
        param_groups=_hyperparameters(session.optimizer),
        global_step=session.global_step,
        client_state=client_state,
        extra=extra,
    )


def _hyperparameters(optimizer: ShardedOptimizer | None) -> list[dict[str, Any]]:
    if optimizer is None:
        return []
    return [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """JSON for what optimizers and schedulers keep; other objects (lambdas of a scheduler) are left out as None."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else None


def _model_buffers(session: Session) -> dict[str, torch.Tensor]:
    """Persistent buffers; rank 0 saves them for all."""
    if session.comm.rank != 0:
        return {}
    found = {}
    for path, module in session.model.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                found[clean_name(f"{path}.{name}" if path else name)] = value
    return found | {state_name(*key): value for key, value in session.file_state.odd.items()}


def _run_states(session: Session) -> Iterator[RunState]:
    """Everything this rank owns."""
    owned = _owned_by_name(session.optimizer)
    for buffer in session.buffers:
        for run in buffer.layout.runs(buffer.rank):
            if buffer.master is None:
                weights = {} if session.exclude_frozen else {"param": _readable(buffer.shard, run)}
                yield RunState(buffer.layout.name, run, weights)
                continue
            tensors: dict[str, torch.Tensor | Chunked] = {"master": _readable(buffer.master, run)}
            scalars: dict[str, Scalar] = {}
            tensors.update((kind, shards[buffer].read_run(run)) for kind, shards in _attached(session.optimizer))
            if run.name in owned and session.optimizer is not None:
                more, scalars = _optimizer_state(session, session.optimizer, owned[run.name])
                tensors.update(more)
            yield RunState(buffer.layout.name, run, tensors, scalars)


def _readable(shard: ShardTensor | StoredShard, run: Run) -> torch.Tensor | Chunked:
    """The elements of `run`: in memory, or tile by tile from where they are kept."""
    if isinstance(shard, ShardTensor):
        return shard.read_run(run)
    return Chunked(run.numel, shard.dtype, lambda: shard.chunks(run.shard_offset, run.numel))


def _optimizer_state(
    session: Session, optimizer: ShardedOptimizer, owned: OwnedRun
) -> tuple[dict[str, torch.Tensor | Chunked], dict[str, Scalar]]:
    native = optimizer.native_state(owned)
    if native is None:
        states = session.file_state.parts.get(owned.run.name)
        if states is None:
            states = [optimizer.state.get(master, {}) for master in owned.masters]
        return collect(states, owned, session.file_state.odd)
    tensors = {kind: _readable(value, owned.run) for kind, value in native.items() if isinstance(value, StoredShard)}
    scalars = {kind: float(value) for kind, value in native.items() if not isinstance(value, StoredShard)}
    return tensors, dict(scalars)


def _attached(optimizer: ShardedOptimizer | None) -> list[tuple[str, dict[FlatBuffer, ShardTensor]]]:
    """Kinds in the files, and shards, of what is kept beside the state that the optimizer itself has."""
    return [] if optimizer is None else [(ATTACHED + kind, shards) for kind, shards in optimizer.attached.items()]


def _owned_by_name(optimizer: ShardedOptimizer | None) -> dict[str, OwnedRun]:
    return {} if optimizer is None else {owned.run.name: owned for owned in optimizer.owned_runs()}


# -------------------------------------------------------------------- load
def load(session: Session, folder: Path, *, load_optimizer: bool, load_scheduler: bool) -> Loaded:
    """Restore from `folder`, written at any world size and stage. All ranks must call.

    Raises CheckpointError on every rank: no manifest, files missing or damaged, parameters that do not fit.
    """
    comm = session.comm
    if session.optimizer is not None:
        session.optimizer.check_active("loading a checkpoint")
    with _open_together(session, folder) as reader:
        with torch.no_grad():
            check_frozen(comm, reader, _frozen_shards(session))
            _together(comm, "weights", lambda: _load_weights(session, reader))
            if load_optimizer and session.optimizer is not None:
                _together(comm, "optimizer state", lambda: _load_optimizer(session, reader))
                _load_attached(session, reader)
                session.optimizer.guard.load_state_dict(reader.manifest.extra.get("step_guard", {}))
        manifest = reader.manifest
    if session.lr_scheduler is not None and "lr_scheduler" in manifest.extra and load_scheduler:
        saved, mine = manifest.extra.get("lr_scheduler_class"), type(session.lr_scheduler).__name__
        if saved not in (None, mine):
            raise CheckpointError(
                f"the checkpoint holds the state of {saved}, this run's schedule is {mine}: use the same, or load "
                "with load_lr_scheduler_states=False"
            )
        state = {key: value for key, value in manifest.extra["lr_scheduler"].items() if value is not None}
        session.lr_scheduler.load_state_dict({**session.lr_scheduler.state_dict(), **state})
    return Loaded(manifest.global_step, manifest.client_state)


def _open_together(session: Session, folder: Path) -> CheckpointReader:
    comm = session.comm
    readers: list[CheckpointReader] = []

    def work() -> None:
        reader = open_checkpoint(folder)
        readers.append(reader)
        reader.check_against([buffer.layout for buffer in session.buffers])
        reader.verify(comm.rank, comm.world_size)

    _together(comm, "checkpoint", work)
    return readers[0]


def _load_weights(session: Session, reader: CheckpointReader) -> None:
    absent = reader.manifest.extra.get(FROZEN_DIGESTS, {})  # found to be the same
    for buffer in session.buffers:
        for run in buffer.layout.runs(buffer.rank):
            if run.name in absent:
                continue
            target = buffer.shard if buffer.master is None else buffer.master
            target.write_run(run, reader.read_weights(run.name, run, target.dtype))
        buffer.refresh()
    for buffer in session.buffers:
        if not buffer.on_demand and buffer.layout.world_size > 1:
            buffer.gather_start()
            buffer.gather_finish()
    stored = {info.name for info in reader.manifest.buffers}
    for path, module in session.model.named_modules():
        for name, value in module._buffers.items():
            full_name = clean_name(f"{path}.{name}" if path else name)
            if value is not None and full_name in stored:
                value.copy_(reader.read_buffer(full_name).view(value.shape))


def _load_optimizer(session: Session, reader: CheckpointReader) -> None:
    optimizer = session.optimizer
    assert optimizer is not None
    saved_class = reader.manifest.extra.get("optimizer")
    mine = type(optimizer.optimizer).__name__
    if saved_class is not None and saved_class != mine and not {saved_class, mine} <= _SAME_STATE:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved_class}, this run uses {mine}: use the same optimizer, or load "
            "with load_optimizer_states=False"
        )
    packages = reader.manifest.extra.get("optimizer_package"), _package(optimizer)
    if saved_class == mine and None not in packages and len(set(packages)) > 1:
        raise CheckpointError(
            f"the checkpoint holds the state of {packages[0]}'s {mine}, this run uses that of {packages[1]}, with "
            "another state: use the same optimizer, or load with load_optimizer_states=False"
        )
    optimizer.state.clear()
    for owned in optimizer.owned_runs():
        if owned.native:
            optimizer.load_native_state(owned, read_states(reader, owned.run.name, owned.run, owned.masters)[0])
    for name, pieces, tensors in optimizer.strategy.places(list(optimizer.owned_runs())):
        for tensor, state in zip(tensors, read_states(reader, name, pieces, tensors), strict=True):
            if state:
                optimizer.state[tensor] = state
    for group, saved in zip(optimizer.param_groups, reader.manifest.param_groups, strict=False):
        for key, value in saved.items():
            if key in group and value is not None:
                group[key] = tuple(value) if isinstance(group[key], tuple) else value


def _package(optimizer: ShardedOptimizer) -> str | None:
    """Where the optimizer's class is from, among the packages that have different classes of one name."""
    package = type(optimizer.optimizer).__module__.partition(".")[0]
    known = type(optimizer.optimizer).__name__ not in _SAME_STATE and package in ("torch", "transformers", "hf_zero")
    return package if known else None


def load_attached(session: Session, folder: Path, kind: str) -> None:
    """Restore one attached kind alone from `folder`. All ranks must call.

    Raises CheckpointError on every rank: as `load`, and where the folder does not hold this kind.
    """
    with _open_together(session, folder) as reader:
        stored = {name for kinds in reader.manifest.kinds.values() for name in kinds}
        if ATTACHED + kind not in stored:
            raise CheckpointError(f"{folder} holds no {kind!r}: it was saved without, or under another name")
        _load_attached(session, reader, only=kind)


def _load_attached(session: Session, reader: CheckpointReader, *, only: str | None = None) -> None:
    """What a checkpoint does not hold of an attached kind starts from the weights, which have been loaded."""
    new = set()
    for kind, shards in _attached(session.optimizer):
        if only is not None and kind != ATTACHED + only:
            continue
        for buffer, shard in shards.items():
            for run in buffer.layout.runs(buffer.rank):
                found = kind if kind in reader.kinds(run.name) else "master"
                new.update([kind] if found != kind else [])
                values = (
                    reader.read(run.name, kind, run)
                    if found == kind
                    else reader.read_weights(run.name, run, shard.dtype)
                )
                shard.write_run(run, values)
    if new and session.comm.rank == 0:
        logger.warning("%s: %s starts anew from the weights", reader.folder, ", ".join(sorted(new)))
