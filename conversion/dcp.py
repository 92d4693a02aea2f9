"""Checkpoints of torch.distributed.checkpoint (DCP), as FSDP2 users save them, to and from those of hf_zero.

The form is `dcp.save({"model": ..., "optim": ...})` of what `get_state_dict` returns with
`StateDictOptions(flatten_optimizer_state_dict=True)`. Read are also the nested form of the optimizer's state, any
other name of it, both below another name ("app"), and the two folders that Trainer and Accelerate write for FSDP.

One tensor is in memory at a time, and of a source the one chunk that it is put together from; nothing else grows with
the model but the metadata. No process group is needed. DCP's metadata is a pickle: it is read with a closed list of
types, and no code of it runs.
"""

from __future__ import annotations

import io
import logging
import math
import pathlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import gt
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from hf_zero.checkpoint.folders import chosen
from hf_zero.checkpoint.format import MOST_NUMEL, STATE_MARK, WEIGHT_KINDS
from hf_zero.checkpoint.frozen_digests import partial_digest
from hf_zero.checkpoint.optimizer_state import ATTACHED, restored, stored_scalar
from hf_zero.checkpoint.reader import CheckpointReader, open_checkpoint
from hf_zero.checkpoint.scheduler_state import plain
from hf_zero.checkpoint.writer import Chunked, Scalar
from hf_zero.conversion.target import (
    NOTHING_KNOWN,
    ConvertedParam,
    check_frozen_are_there,
    new_folder,
    write_checkpoint,
)
from hf_zero.errors import CheckpointError
from hf_zero.layout import Piece, Slice
from hf_zero.progress import progress

logger = logging.getLogger(__name__)

_METADATA = ".metadata"
_OF_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")  # folders with "model" and "optimizer"
STATISTICS = ("running_mean", "running_var")  # buffers of floats that every batch norm has
_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_ALLOWED: dict[tuple[str, str], Any] = {(metadata.__name__, name): getattr(metadata, name) for name in _CLASSES}
_ALLOWED |= {
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): cast(Any, torch.serialization)._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
}
_ALLOWED |= {(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")}
_ALLOWED |= {(module, "WindowsPath"): pathlib.PureWindowsPath for module in ("pathlib", "pathlib._local")}
_BELOW = re.compile(r"([^.]+)\.model\.")
# State of a parameter -> the optimizer of torch that keeps it: DCP does not say which it was.
_OPTIMIZERS = {
    frozenset(["step", "exp_avg", "exp_avg_sq"]): "AdamW",
    frozenset(["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]): "AdamW",
    frozenset(["momentum_buffer"]): "SGD",
}
_DEFAULTS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
SAME_AS_ADAMW = ("CPUAdam", "DeepSpeedCPUAdam", "FusedAdam")  # but for names of hyperparameters
HOW = ("fused", "foreach", "capturable", "differentiable")  # how an update is computed: the other tool's own choice


# -------------------------------------------------------------------- hf_zero -> DCP
def to_dcp(src: str | Path, dst: str | Path) -> None:
    """Write the checkpoint `src` of hf_zero as the DCP folder `dst`, which appears complete or not at all.

    Schedulers, client_state and what is kept beside the optimizer's state (averages of the weights) are left out.

    Raises:
        CheckpointError: `src` is no complete checkpoint, or lacks weights or optimizer; `dst` exists.
    """
    with open_checkpoint(chosen(src, None)) as reader:
        reader.verify_before_reading()
        check_frozen_are_there(reader)
        sources: dict[str, tuple[str, str]] = {}
        state = {"model": _model_entries(reader, sources), "optim": _optimizer_entries(reader, sources)}
        if not state["optim"]:
            del state["optim"]
        with new_folder(Path(dst)) as folder:
            writer = filesystem.FileSystemWriter(folder, thread_count=1)
            with progress(f"Writing {Path(dst).name}", reader.manifest.nbytes) as reader.on_read:
                try:
                    save(state, storage_writer=writer, planner=_LazyPlanner(reader, sources), no_dist=True)
                except CheckpointException as error:  # torch's, with what happened inside
                    cause = next(iter(error.failures.values()))[0]
                    if isinstance(cause, (OSError, CheckpointError)):
                        raise cause from None
                    reason = (str(cause).splitlines() or [type(cause).__name__])[0]
                    raise CheckpointError(f"cannot write {dst}: {reason}") from error


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each when it is written."""

    def __init__(self, reader: CheckpointReader, sources: Mapping[str, tuple[str, str]]) -> None:
        super().__init__()
        self._reader = reader
        self._sources = sources

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO or write_item.index.fqn not in self._sources:
            return super().resolve_data(write_item)
        name, kind = self._sources[write_item.index.fqn]
        if not kind:
            return self._reader.read_buffer(name)
        shape = self._reader.shape(name)
        if not math.prod(shape):
            return torch.empty(shape, dtype=_weight_dtype(self._reader, name))
        return self._reader.read(name, kind, [Piece(name, 0, math.prod(shape), 0, 0)]).view(shape)


def _weight_dtype(reader: CheckpointReader, name: str) -> torch.dtype:
    kind = reader.weight_kind(name)
    stored = {info.name: info.dtype for info in reader.manifest.params}[name] if kind is None else None
    return cast(torch.dtype, getattr(torch, stored or reader.kinds(name)[kind or ""]))


def _model_entries(reader: CheckpointReader, sources: dict[str, tuple[str, str]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    manifest = reader.manifest
    first_names = {info.name: info.name for info in manifest.params} | dict(manifest.tied)
    for alias, name in first_names.items():
        sources[f"model.{alias}"] = (name, reader.weight_kind(name) or "master")
        entries[alias] = torch.empty(reader.shape(name), dtype=_weight_dtype(reader, name), device="meta")
    for info in manifest.buffers:
        if STATE_MARK not in info.name:
            sources[f"model.{info.name}"] = (info.name, "")
            entries[info.name] = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
    return entries


def _optimizer_entries(reader: CheckpointReader, sources: dict[str, tuple[str, str]]) -> dict[str, Any]:
    manifest = reader.manifest
    entries: dict[str, Any] = {}
    trained = [slot.name for layout in manifest.layouts if layout.trainable for slot in layout.slots]
    for name in trained if manifest.param_groups else ():
        for kind, dtype in reader.kinds(name).items():
            if kind.startswith(ATTACHED):
                logger.warning("%s of %s is left out: it is not the optimizer's", kind, name)
            elif kind not in WEIGHT_KINDS:
                sources[f"optim.state.{name}.{kind}"] = (name, kind)
                entries[f"state.{name}.{kind}"] = torch.empty(
                    reader.shape(name), dtype=getattr(torch, dtype), device="meta"
                )
        entries |= {f"state.{name}.{key}": value for key, value in map(_kept, reader.scalars(name).items())}
        entries |= {f"param_groups.{name}.{key}": value for key, value in _group_of(reader, name).items()}
    for info in manifest.buffers:
        name, mark, kind = info.name.partition(STATE_MARK)
        if mark:
            sources[f"optim.state.{name}.{kind}"] = (info.name, "")
            entries[f"state.{name}.{kind}"] = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
    return entries


def _kept(item: tuple[str, Scalar]) -> tuple[str, torch.Tensor | Scalar]:
    return restored(*item)


def _group_of(reader: CheckpointReader, name: str) -> dict[str, Any]:
    """Return a parameter's hyperparameters, with those that torch's own optimizer has beside hf_zero's."""
    manifest = reader.manifest
    group = group_for_torch(reader, manifest.param_groups[manifest.param_group_of.get(name, 0)])
    saved_by = manifest.optimizer or ""
    of_torch = "AdamW" if saved_by in SAME_AS_ADAMW else saved_by
    if of_torch not in _DEFAULTS:
        return group
    defaults = _options_of(of_torch)
    return defaults | group | {key: defaults[key] for key in HOW if key in defaults}


def group_for_torch(reader: CheckpointReader, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group as torch has them. Raises CheckpointError where it has no such update."""
    if reader.manifest.optimizer == "UncorrectedAdam" or not saved.get("bias_correction", True):
        raise CheckpointError(
            f"{reader.folder}: torch has no Adam without bias correction, with which it was trained."
        )
    group = {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    if "adamw_mode" in group:  # as hf_zero's own Adam calls it
        group.setdefault("decoupled_weight_decay", group["adamw_mode"])
    return group


# -------------------------------------------------------------------- DCP -> hf_zero
def from_dcp(src: str | Path, dst: str | Path, buffers: Sequence[str] = ()) -> None:
    """Write the DCP folder `src` as the checkpoint `dst` of hf_zero, which appears complete or not at all.

    DCP does not tell buffers from frozen parameters. What the optimizer does not hold is a frozen parameter, but for
    integers, statistics of batch norms, and the names in `buffers`. Where that is wrong for a model, loading says so.

    Args:
        buffers: Names of further persistent buffers.
    Raises:
        CheckpointError: `src` is no DCP checkpoint of a model, damaged or of an optimizer that is not known; `dst`
            exists.
    """
    source = _Source(Path(src))
    unknown = [name for name in buffers if name not in source.model]
    if unknown:
        raise CheckpointError(f"{src} holds no {', '.join(unknown)}: name buffers as the model's state_dict() does.")
    run = _Run.of(source)
    has_optimizer = bool(run.group_of)
    rest = [name for name in source.model if name not in run.group_of] if has_optimizer else []
    held = {
        name for name in source.model if name in buffers or (name not in run.group_of and _is_buffer(source, name))
    }
    tied = _find_tied(source, run.group_of, [name for name in rest if name not in held])
    odd: dict[str, torch.Tensor] = {}
    params = [
        _converted(source, name, run, name not in rest, odd)
        for name in source.model
        if name not in held and name not in tied
    ]
    kept = {name: source.read(source.model[name]) for name in source.model if name in held}
    steps = [int(one.scalars["step"]) for one in params if "step" in one.scalars]
    converted = replace(
        NOTHING_KNOWN,
        tied=tied,
        param_groups=run.groups,
        global_step=max(steps, default=0),
        optimizer=run.optimizer(source),
        param_group_of=run.group_of if len(run.groups) > 1 else {},
    )
    write_checkpoint(Path(dst), params, kept | odd, converted)


def _is_buffer(source: _Source, name: str) -> bool:
    info = source.tensor(source.model[name])
    return not info.properties.dtype.is_floating_point or name.rpartition(".")[2] in STATISTICS


def _find_tied(source: _Source, trained: Mapping[str, int], rest: Sequence[str]) -> dict[str, str]:
    """Find names that the optimizer lacks, with the very values of one that it has: tied weights are saved twice.

    Digests find the candidates, so each tensor is read once, however many frozen ones have the shape of a trained one.
    """
    kinds = {source.kind(name) for name in rest}
    candidates: dict[tuple[Any, int], list[str]] = {}
    for name in trained:
        if source.kind(name) in kinds:
            candidates.setdefault((source.kind(name), source.digest(name)), []).append(name)
    known = {kind for kind, _ in candidates}
    tied = {}
    for name in rest:
        alike = candidates.get((source.kind(name), source.digest(name)), []) if source.kind(name) in known else []
        for other in alike:
            if torch.equal(source.read(source.model[name]), source.read(source.model[other])):
                tied[name] = other
                break
    return tied


def _converted(source: _Source, name: str, run: _Run, trainable: bool, odd: dict[str, torch.Tensor]) -> ConvertedParam:
    """`odd`: takes optimizer state that has another shape than the parameter."""
    fqn = source.model[name]
    info = source.tensor(fqn)
    shape = tuple(info.size)
    tensors = {"master" if trainable else "param": source.chunked(fqn)}
    scalars: dict[str, Scalar] = {}
    for kind, key in run.state.get(name, {}).items():
        if key in source.tensors and tuple(source.tensor(key).size) == shape and shape:
            tensors[kind] = source.chunked(key)
            continue
        value = source.read(key) if key in source.tensors else source.read_value(key)
        scalar = stored_scalar(kind, value)
        if scalar is not None:
            scalars[scalar[0]] = scalar[1]
            _check_step(source, key, scalar[1])
        elif isinstance(value, torch.Tensor):
            odd[f"{name}{STATE_MARK}{kind}"] = value
        else:
            raise CheckpointError(f"{source.folder}: optimizer state {key} is a {type(value).__name__}, no number")
    if not math.prod(shape):
        tensors = {}
    return ConvertedParam(name, shape, info.properties.dtype, trainable, tensors, scalars)


def _check_step(source: _Source, key: str, value: Scalar) -> None:
    if key.endswith(".step") and not 0 <= value < 2**53:
        raise CheckpointError(f"{source.folder}: {key} is {value}: expected a count. Copy the files again.")


@dataclass
class _Run:
    """The optimizer's part of a DCP checkpoint, flattened or nested."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)
    state: dict[str, dict[str, str]] = field(default_factory=dict)  # parameter -> kind -> key in DCP

    @classmethod
    def of(cls, source: _Source) -> _Run:
        run = cls()
        values: dict[str, dict[str, Any]] = {}
        nested = any(re.fullmatch(r"param_groups\.\d+\.params", rest) for rest in source.optim)
        for rest, key in source.optim.items():
            part, _, rest = rest.partition(".")
            if part == "param_groups" and nested:
                number, _, kind = rest.partition(".")
                if not re.fullmatch(r"\d{1,9}", number, re.ASCII):
                    raise CheckpointError(f"{source.folder}: {key} is of no parameter group with a number.")
                values.setdefault(number, {})[kind] = _group_value(source, key)
                continue
            name = _owner(source, rest)
            kind = rest[len(name) + 1 :]
            if part == "state":
                run.state.setdefault(name, {})[kind] = key
            elif part == "param_groups":
                values.setdefault(name, {})[kind] = _group_value(source, key)
        if nested:
            run._take_groups(source, [values[number] for number in sorted(values, key=int)])
            values = {}
        for name, group in values.items():
            if group not in run.groups:
                run.groups.append(group)
            run.group_of[name] = run.groups.index(group)
        missing = [name for name in run.state if name not in run.group_of]
        if missing:
            raise CheckpointError(
                f"{source.folder} has optimizer state but no hyperparameters of {', '.join(missing)}"
            )
        return run

    def _take_groups(self, source: _Source, groups: Sequence[Mapping[str, Any]]) -> None:
        for number, group in enumerate(groups):
            names = group.get("params")
            if not isinstance(names, list) or not {name for name in names if isinstance(name, str)} <= {*source.model}:
                raise CheckpointError(f"{source.folder}: parameter group {number} names no parameters under 'model'.")
            self.groups.append({key: plain(value) for key, value in group.items() if key != "params"})
            self.group_of.update(dict.fromkeys(group["params"], number))

    def optimizer(self, source: _Source) -> str | None:
        """The name of the class of torch that keeps such state; None where there is none."""
        kinds = {frozenset(kinds) for kinds in self.state.values()}
        classes = {_OPTIMIZERS.get(one) for one in kinds}
        if self.groups and not kinds and all("dampening" in group for group in self.groups):
            classes = {"SGD"}  # without momentum it has no state
        # RAdam keeps what Adam keeps, and computes another update: it has no amsgrad.
        is_adam = all("amsgrad" in group for group in self.groups)
        if None in classes or len(classes) > 1 or ("AdamW" in classes and not is_adam):
            raise CheckpointError(
                f"{source.folder} holds optimizer state {sorted(map(sorted, kinds))}, "
                "which is not that of Adam, AdamW or SGD of torch: "
                "convert a checkpoint without its optimizer, and start it anew."
            )
        if not classes:
            return None
        name = cast(str, classes.pop())
        known = {key for group in self.groups for key in group} & {*_options_of(name)}
        for number, group in enumerate(self.groups):
            if lacking := sorted(known - {*group}):
                raise CheckpointError(
                    f"{source.folder}: parameter group {number} lacks {', '.join(lacking)}, which other groups of its "
                    f"optimizer have: {_METADATA} is damaged, copy it again."
                )
        return name


def _options_of(optimizer: str) -> dict[str, Any]:
    """The hyperparameters of an optimizer of torch."""
    return cast(dict[str, Any], _DEFAULTS[optimizer]([torch.zeros(1)], lr=1e-3).defaults)


def _group_value(source: _Source, key: str) -> Any:
    return plain(source.read(key) if key in source.tensors else source.read_value(key))


def _owner(source: _Source, rest: str) -> str:
    """The parameter at the beginning of `rest`: names and kinds may both have dots."""
    name = rest
    while name and name not in source.model:
        name = name.rpartition(".")[0]
    if not name:
        raise CheckpointError(f"{source.folder}: optimizer state {rest} is of no parameter under 'model'.")
    return name


def _folders(src: Path) -> list[Path]:
    """The DCP folders of one checkpoint: it may be in two."""
    weights, optimizer = _OF_ACCELERATE
    if (src / _METADATA).is_file() or not (src / weights / _METADATA).is_file():
        if src.name == weights and (src.parent / optimizer / _METADATA).is_file():
            logger.warning("%s is converted without its optimizer, which %s has: convert that", src, src.parent)
        return [src]
    if (src / optimizer / _METADATA).is_file():
        return [src / weights, src / optimizer]
    logger.warning("%s has no %s: it is converted without its optimizer", src, optimizer)
    return [src / weights]


def _prefixes(keys: Iterable[str], folder: Path) -> tuple[str, str]:
    """Find the names below which the model and the optimizer lie; the scripts that save choose them."""
    keys = list(keys)
    found = {match[1] for key in keys if (match := re.match(r"(.+?)\.param_groups\.", key))}
    found -= {name for name in found if name == "model" or name.startswith("model.")}
    if len(found) > 1:
        raise CheckpointError(f"{folder} holds several optimizers: {', '.join(sorted(found))}. Save it with one.")
    optimizer = next(iter(found), "optim")
    above = {optimizer.rpartition(".")[0]} if found else {match[1] for key in keys if (match := _BELOW.match(key))}
    name = next(iter(above)) if len(above) == 1 and not any(key.startswith("model.") for key in keys) else ""
    return (f"{name}.model" if name else "model"), optimizer


class _Source:
    """An open DCP checkpoint: its tensors and values under their keys, read one by one.

    Raises:
        CheckpointError: Something of it is missing, damaged, or not of DCP.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts = {one: _read_metadata(one / _METADATA) for one in _folders(folder)}
        self._part_of = {key: one for one, found in self._parts.items() for key in found.state_dict_metadata}
        self.tensors = {
            key: info
            for found in self._parts.values()
            for key, info in found.state_dict_metadata.items()
            if isinstance(info, metadata.TensorStorageMetadata)
        }
        model, optimizer = _prefixes(self._part_of, folder)
        self.model, self.optim = self._below(model), self._below(optimizer)
        left = self._part_of.keys() - {*self.model.values(), *self.optim.values()}
        others = {".".join(key.split(".")[: model.count(".") + 1]) for key in left}
        if not self.model:
            there = ", ".join(sorted({key.split(".")[0] for key in self._part_of})) or "nothing at all"
            raise CheckpointError(
                f"{folder} holds nothing under 'model', but {there}: save it as dcp.save({{'model': ..., "
                "'optim': ...})."
            )
        if others:
            logger.warning(
                "%s: neither weights nor an optimizer, and left out: %s", folder, ", ".join(sorted(others)[:5])
            )
        for one, found in self._parts.items():
            _check_files(one, found)

    def _below(self, part: str) -> dict[str, str]:
        """Name below `part` -> key."""
        start = f"{part}."
        return {key.removeprefix(start): key for key in self._part_of if key.startswith(start)}

    def tensor(self, key: str) -> metadata.TensorStorageMetadata:
        if key not in self.tensors:
            raise CheckpointError(f"{self.folder}: {key} is no tensor.")
        return self.tensors[key]

    def kind(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Shape and type of something of the model."""
        info = self.tensor(self.model[name])
        return info.size, info.properties.dtype

    def digest(self, name: str) -> int:
        """Return a digest of the values of something of the model."""
        values = self.chunked(self.model[name])
        everything = Piece(name, 0, values.numel, 0, 0)
        return partial_digest(values, Slice(name, tuple(self.kind(name)[0]), (everything,)))

    def chunked(self, key: str) -> Chunked:
        info = self.tensor(key)

        def chunks() -> Iterator[torch.Tensor]:
            yield self.read(key).reshape(-1)

        return Chunked(math.prod(info.size), info.properties.dtype, chunks)

    def read(self, key: str) -> torch.Tensor:
        """The full tensor, put together from the chunks of all ranks."""
        info = self.tensor(key)
        result = torch.empty(info.size, dtype=info.properties.dtype)
        filled = 0
        for chunk in info.chunks:
            part = self._load(metadata.MetadataIndex(key, chunk.offsets))
            if not isinstance(part, torch.Tensor) or part.shape != chunk.sizes or part.dtype != result.dtype:
                raise CheckpointError(f"{self.folder}: a chunk of {key} is not what {_METADATA} says. Copy it again.")
            where = tuple(slice(start, start + n) for start, n in zip(chunk.offsets, chunk.sizes, strict=True))
            result[where] = part
            filled += part.numel()
        if filled != result.numel():
            raise CheckpointError(f"{self.folder}: the chunks of {key} have {filled} of {result.numel()} elements.")
        return result

    def read_value(self, key: str) -> Any:
        return self._load(metadata.MetadataIndex(key))

    def _load(self, index: metadata.MetadataIndex) -> Any:
        folder = self._part_of[index.fqn]
        place = self._parts[folder].storage_data.get(index)
        if place is None:
            raise CheckpointError(f"{folder}: {_METADATA} does not say where {index.fqn} is. Save it again.")
        path = folder / place.relative_path
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path}: {index.fqn} holds more than tensors and numbers, or is damaged; nothing of it was executed. "
                "Save the checkpoint again without that object, or copy the file again."
            ) from error
        except Exception as error:  # a damaged archive may raise anything
            raise CheckpointError(f"{path}: cannot read {index.fqn}: {error}. Copy the file again.") from error


def _check_files(folder: Path, found: metadata.Metadata) -> None:
    ends: dict[str, int] = {}
    for one in found.storage_data.values():
        if Path(one.relative_path).name != one.relative_path or getattr(one, "transform_descriptors", None):
            raise CheckpointError(f"{folder}: {one.relative_path} is packed, or outside. Save it without.")
        ends[one.relative_path] = max(ends.get(one.relative_path, 0), one.offset + one.length)
    wrong = []
    for name, end in ends.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{path} is missing")
        elif path.stat().st_size < end:
            wrong.append(f"{path} is torn: it has {path.stat().st_size} of {end} bytes")
    if wrong:
        raise CheckpointError(f"{folder} is not complete: {'; '.join(wrong)}. Copy these files again.")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is no type of DCP's metadata")
        return _ALLOWED[module, name]


def _read_metadata(path: Path) -> metadata.Metadata:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} is no checkpoint of torch.distributed.checkpoint: {path} is missing.")
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"cannot read {path}: {error}. Nothing of it was executed; copy it again, or save it with torch's own "
            "writer."
        ) from error
    if problem := _why_unsound(found):
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint ({problem}): copy it again.")
    return cast(metadata.Metadata, found)


def _why_unsound(found: Any) -> str:
    """Say why DCP cannot have written these metadata: a pickle has no checksum, and a flipped bit in it may leave
    anything of the allowed types anywhere. Empty where they are sound."""
    entries, places = (getattr(found, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not (isinstance(found, metadata.Metadata) and isinstance(entries, dict) and isinstance(places, dict)):
        return "it has no tables of tensors and of places"
    for key, info in entries.items():
        if not isinstance(key, str) or not _is_entry(info):
            return f"the entry of {key!r}"
    for index, place in places.items():
        sound = isinstance(index, metadata.MetadataIndex) and getattr(index, "fqn", None) in entries
        sound = sound and isinstance(place, filesystem._StorageInfo)
        sound = sound and isinstance(getattr(place, "relative_path", None), str)
        if not sound or not all(_is_count(getattr(place, name, None)) for name in ("offset", "length")):
            return f"the place of {index!r}"
    return ""


def _is_entry(info: Any) -> bool:
    if isinstance(info, metadata.BytesStorageMetadata):
        return True
    size, properties, chunks = (getattr(info, name, None) for name in ("size", "properties", "chunks"))
    if not isinstance(info, metadata.TensorStorageMetadata) or not isinstance(size, torch.Size) or not _is_size(size):
        return False
    if not isinstance(getattr(properties, "dtype", None), torch.dtype) or not isinstance(chunks, list):
        return False
    for chunk in chunks:
        offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        if not (_is_size(offsets) and _is_size(sizes)):
            return False
        ends = [start + count for start, count in zip(cast(Any, offsets), cast(Any, sizes), strict=False)]
        if {len(cast(Any, offsets)), len(cast(Any, sizes)), len(ends)} != {len(size)} or any(map(gt, ends, size)):
            return False
    return math.prod(size) < MOST_NUMEL


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(_is_count(one) for one in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_NUMEL
