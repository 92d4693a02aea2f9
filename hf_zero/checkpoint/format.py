"""The format of a checkpoint: what zero/manifest.json holds and which values are right, and the header of a rank file.

A checkpoint folder holds one safetensors file per rank, zero/rank-00000.safetensors and so on, whose tensors are
1-D slices of parameters under the keys NAME::KIND, and the manifest. The manifest is the commit mark: a folder without
one holds no checkpoint, whatever else lies in it. It also holds the layouts, so that a reader finds any element of any
parameter from the manifest and the rank files alone.

To change what the manifest has: add or change a field of `SaveInfo` or `Manifest` here, and set it in contents.py, or
in save.py if the ranks make it together. Old manifests lack a new field, so it has to be an `extra_key`: readers
demand all others. Raise FORMAT_VERSION if older versions of hf_zero would read a new checkpoint wrongly.

This file needs numpy and the standard library only: it is a part of the stand-alone script (stand_alone.py).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hf_zero.layout import UnitLayout

# The newest version that is read. In version 1 files had one checksum each, of all their bytes. In version 3 units may
# have a `first_rank`, and in version 4 kinds a scale: `version_of` says which one is written.
FORMAT_VERSION = 4
ZERO_FOLDER = "zero"
MANIFEST_NAME = "manifest.json"
ORIGINAL_NAMES = "original_names.json"  # beside it where a pipeline was made of a model: layers' names -> the model's
BLOCK_BYTES = 1 << 20  # of a tensor in a rank file, under one checksum
RANK_FILE_ALIGN = 4096  # tensors of a rank file begin at a multiple: direct writes need it
WEIGHT_KINDS = ("master", "param")  # of a trainable parameter the master is stored, of a frozen one the parameter
BUFFER_KIND = "buffer"
# Optimizer state that is not sharded as its parameter is lies among the buffers, as PARAMETER::state::KIND.
STATE_MARK = "::state::"
# The scale of a kind whose elements are stored times a number, as an optimizer scalar: values are elements / scale.
SCALE_MARK = "@scale"
MOST_NUMEL = 1 << 56  # of a tensor, and most bytes of a file: what is beyond is damage, and products of it overflow
MAX_HEADER_BYTES = 1 << 30  # more than any real header, less than what a damaged length could make us allocate

FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
TORCH_NAMES = {**FLOATS, "C64": "complex64", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
TORCH_NAMES |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
TORCH_NAMES |= {f"{k}{bits}": f"{t}{bits}" for k, t in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)}
CODES = {name: code for code, name in TORCH_NAMES.items()}
ITEM_BYTES = {code: int((re.findall(r"\d+", code) or ["8"])[0]) // 8 for code in TORCH_NAMES}


class ConsolidateError(RuntimeError):
    """The checkpoint is not complete, or an output cannot be written; the message names the file."""


def zero_folder(folder: str | Path) -> Path:
    return Path(folder) / ZERO_FOLDER


def package_version() -> str:
    try:
        return importlib.metadata.version("hf-zero")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def manifest_path(folder: str | Path) -> Path:
    return zero_folder(folder) / MANIFEST_NAME


# -------------------------------------------------------------------- values in JSON
# Reads a value of JSON that is at the place named by the text. Raises ValueError unless it is right there.
Read = Callable[[Any, str], Any]


def expect(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def is_count(value: Any, most: int = MOST_NUMEL) -> bool:
    return type(value) is int and 0 <= value <= most


def is_shape(value: Any) -> bool:
    sizes = isinstance(value, list) and all(is_count(n) for n in value)
    return sizes and math.prod(max(n, 1) for n in value) <= MOST_NUMEL


def is_name(value: Any) -> bool:
    """Whether this is text that can be written: JSON may hold half of a character."""
    can_be_encoded = isinstance(value, str) and value.encode("utf-8", "replace").decode() == value
    return can_be_encoded and value != "" and "\0" not in value


def is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def checked(fits: Callable[[Any], bool], to: Callable[[Any], Any] = lambda value: value) -> Read:
    def read(value: Any, where: str) -> Any:
        expect(fits(value), f"{where} {value!r}"[:200])
        return to(value)

    return read


def count(least: int = 0, most: int = MOST_NUMEL) -> Read:
    return checked(lambda value: is_count(value, most) and value >= least)


def list_of(item: Read) -> Read:
    def read(value: Any, where: str) -> Any:
        expect(isinstance(value, list), f"{where} is no list")
        return tuple(item(one, f"{where}[{number}]") for number, one in enumerate(value))

    return read


def map_of(item: Read) -> Read:
    def read(value: Any, where: str) -> Any:
        expect(isinstance(value, dict), f"{where} is no object")
        return {name: item(one, f"{where}[{name!r}]") for name, one in value.items()}

    return read


def read_keys(keys: Mapping[str, Read], value: Any, where: str) -> dict[str, Any]:
    """The values of an object that must have all these keys; others that it has are left out."""
    expect(isinstance(value, dict), f"{where} is no object")
    missing = sorted(keys.keys() - value.keys())
    expect(not missing, f"{where} lacks {', '.join(missing)}".lstrip())
    return {name: read(value[name], f"{where} {name}".lstrip()) for name, read in keys.items()}


def object_of(kind: type[Any]) -> Read:
    """Read a dataclass whose fields are declared by `key`."""
    keys = {one.name: one.metadata["read"] for one in fields(kind)}
    return lambda value, where: kind(**read_keys(keys, value, where))


NAME = checked(is_name)
TEXT = checked(lambda value: isinstance(value, str))
TEXT_OR_NONE = checked(lambda value: isinstance(value, str | None))
FLAG = checked(lambda value: isinstance(value, bool))
NUMBER = checked(is_number)
SHAPE = checked(is_shape, tuple)
DTYPE = checked(lambda value: isinstance(value, str) and value in CODES)
OBJECT = checked(lambda value: isinstance(value, dict))
ANYTHING = checked(lambda value: True)
TIME = checked(lambda value: type(value) in (int, float) and 0 <= value < 253402300800)  # until the year 10000
SLOT = checked(lambda slot: isinstance(slot, list) and len(slot) == 3 and is_name(slot[0]) and is_shape(slot[1]))

_UNIT: dict[str, Read] = {
    "name": NAME,
    "dtype": DTYPE,
    "trainable": FLAG,
    "world_size": count(1, 1 << 31),
    "bucket_numel": count(1),
    "padded_numel": count(),
    "slots": list_of(SLOT),
    "first_rank": count(most=1 << 31),
}


def read_layout(value: Any, where: str) -> UnitLayout:
    """Read the layout of a unit, which must be one that UnitLayout.build makes of its parameters."""
    unit = read_keys(_UNIT, {"first_rank": 0, **value} if isinstance(value, dict) else value, where)
    ranks, padded, bucket = unit["world_size"], unit["padded_numel"], unit["bucket_numel"]
    expect(padded % ranks == 0, f"{where} padded_numel {padded}")
    expect(bucket % ranks == 0, f"{where} bucket_numel {bucket}")
    layout = UnitLayout.from_json(unit)
    built = UnitLayout.build(
        layout.name,
        {slot.name: slot.shape for slot in layout.slots},
        dtype=layout.dtype,
        trainable=layout.trainable,
        world_size=ranks,
        max_bucket_numel=bucket if bucket < padded else None,
    )
    expect(layout.slots == built.slots, f"{where} slots: a parameter is there twice, or not behind the one before it")
    end = built.slots[-1].end if built.slots else 0
    # Earlier checkpoints have parts that are not aligned.
    expect(padded in (built.padded_numel, end + -end % ranks), f"{where} padded_numel {padded}")
    expect(bucket == (built.bucket_numel if bucket < padded else max(padded, ranks)), f"{where} bucket_numel {bucket}")
    return layout


# -------------------------------------------------------------------- the manifest
def key(read: Read, *, in_extra: bool = False, **default: Any) -> Any:
    """A field that stands under its name in the manifest, or with `in_extra` in the object "extra" there.

    Keys of "extra" are written only where they differ from their default.
    """
    return field(metadata={"read": read, "in_extra": in_extra}, **default)


extra_key = partial(key, in_extra=True)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the model: its name in `state_dict()`, shape, and element type without "torch."."""

    name: str = key(NAME)
    shape: tuple[int, ...] = key(SHAPE)
    dtype: str = key(DTYPE)


@dataclass(frozen=True)
class FileInfo:
    """The file of one rank. `crc32` is that of the header, in version 1 that of the whole file."""

    name: str = key(NAME)
    size: int = key(count())
    crc32: int = key(count(most=0xFFFFFFFF))


@dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """The part of the manifest that every rank knows. All of it must be JSON: no tensors, no keys but strings."""

    world_size: int = key(count(1, 1 << 31))  # the number of rank files
    stage: int = key(count(0, 3))
    layouts: tuple[UnitLayout, ...] = key(list_of(read_layout))
    # In state_dict order, tied ones under one name, with the model's own dtypes.
    params: tuple[TensorInfo, ...] = key(list_of(object_of(TensorInfo)))
    tied: Mapping[str, str] = key(map_of(NAME), default_factory=dict)  # other name -> the name in `params`
    param_groups: Sequence[Mapping[str, Any]] = key(list_of(OBJECT), default=())  # the optimizer's hyperparameters
    global_step: int = key(count(), default=0)
    client_state: Any = key(ANYTHING, default=None)  # noqa: RUF009

    processes: int | None = extra_key(count(1, 1 << 31), default=None)  # ranks of the run that saved
    hosts: Sequence[str] = extra_key(list_of(NAME), default=())  # by rank file, where nodes have folders of their own
    optimizer: str | None = extra_key(TEXT_OR_NONE, default=None)  # the name of its class
    optimizer_package: str | None = extra_key(TEXT_OR_NONE, default=None)  # where packages have classes of one name
    step_guard: Mapping[str, float] = extra_key(map_of(NUMBER), default_factory=dict)  # loss scale and skipped_steps
    param_group_of: Mapping[str, int] = extra_key(map_of(count()), default_factory=dict)  # with several groups
    lr_scheduler: Mapping[str, Any] | None = extra_key(OBJECT, default=None)
    lr_scheduler_class: str | None = extra_key(TEXT_OR_NONE, default=None)
    # Digests of the frozen parameters where these were not saved; None where they were.
    frozen_digests: Mapping[str, str] | None = extra_key(map_of(TEXT), default=None)
    converted_from: str | None = extra_key(TEXT_OR_NONE, default=None)


@dataclass(frozen=True, kw_only=True)
class Manifest(SaveInfo):
    """SaveInfo, and what the ranks wrote: all that zero/manifest.json holds."""

    format_version: int = key(count(1, FORMAT_VERSION))
    hf_zero_version: str = key(NAME)
    saved_at: float = key(TIME)  # seconds since 1970
    files: tuple[FileInfo, ...] = key(list_of(object_of(FileInfo)))  # by rank
    buffers: tuple[TensorInfo, ...] = key(list_of(object_of(TensorInfo)))
    kinds: Mapping[str, Mapping[str, str]] = key(map_of(map_of(DTYPE)))  # parameter -> kind -> element type
    scalars: Mapping[str, Mapping[str, Any]] = key(map_of(map_of(NUMBER)))  # parameter -> optimizer scalars

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were left out because a gradient was not finite."""
        return int(self.step_guard.get("skipped_steps", 0))

    @property
    def loss_scale(self) -> float:
        """The loss scale when it was saved; 1 where there was none."""
        return float(self.step_guard.get("cur_scale", 1))

    @property
    def nbytes(self) -> int:
        """The bytes of all rank files."""
        return sum(file.size for file in self.files)

    @property
    def has_blocks(self) -> bool:
        """Whether each block of a tensor has a checksum, so that reads can be verified by themselves."""
        return self.format_version > 1

    @property
    def identity(self) -> str:
        """The words for a message by which one save differs from any other."""
        mark = zlib.crc32(repr([(file.name, file.size, file.crc32) for file in self.files]).encode())
        return f"step {self.global_step}, saved at {self.saved_at} with checksum {mark:08x}"

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = dict.fromkeys(("format_version", "hf_zero_version", "saved_at"))  # stand first
        extra = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if not one.metadata["in_extra"]:
                content[one.name] = _plain(value)
            elif value != _default(one):
                extra[one.name] = _plain(value)
        return {**content, "extra": extra}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        """Read a manifest. Raises ValueError, with what is wrong where, unless a save can have written it.

        Its layouts, names, shapes, types and files agree then: readers rely on that and do not check again.
        """
        keys = {one.name: one.metadata["read"] for one in fields(cls) if not one.metadata["in_extra"]}
        values = read_keys({**keys, "extra": OBJECT}, content, "")
        extra = values.pop("extra")
        for one in fields(cls):
            if one.metadata["in_extra"] and one.name in extra:
                values[one.name] = one.metadata["read"](extra[one.name], one.name)
        manifest = cls(**values)
        _check_agreement(manifest)
        return manifest


def _default(declared: Any) -> Any:
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


def _plain(value: Any) -> Any:
    """The form that a value of the manifest has in JSON."""
    if isinstance(value, UnitLayout):
        return value.to_json()
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _check_agreement(manifest: Manifest) -> None:
    """Raise ValueError where two parts of a manifest contradict each other."""
    ranks = manifest.world_size
    expect(len(manifest.files) == ranks, f"{len(manifest.files)} files, and the world size is {ranks}")
    for rank, file in enumerate(manifest.files):
        match = re.fullmatch(r"rank-([0-9]{5,9})(\.[0-9a-f]+)?\.safetensors", file.name)
        expect(match is not None and int(match[1]) == rank, f"files[{rank}] has the name {file.name!r}")
    slots: dict[str, TensorInfo] = {}
    for unit in manifest.layouts:
        has_files = unit.first_rank % unit.world_size == 0 and unit.first_rank + unit.world_size <= ranks
        is_whole = unit.world_size == ranks or manifest.format_version > 2
        expect(has_files and is_whole, f"{unit.name}: ranks {unit.world_size} from {unit.first_rank} on, of {ranks}")
        found = {slot.name: TensorInfo(slot.name, slot.shape, unit.dtype) for slot in unit.slots}
        expect(not found.keys() & slots.keys(), f"{unit.name} holds parameters of another unit")
        slots |= found
    params = {info.name: info for info in manifest.params}
    other = sorted(name for name in params.keys() | slots.keys() if params.get(name) != slots.get(name))
    expect(not other, f"{', '.join(other[:3])}: the layouts have other parameters, shapes or types")
    names = [info.name for info in (*manifest.params, *manifest.buffers)]
    taken = set(names)
    expect(len(taken) == len(names), "params and buffers: a name is there twice")
    expect(params.keys() >= {*manifest.tied.values()}, "tied: a name that no parameter has")
    expect(all(map(is_name, manifest.tied)) and not taken & manifest.tied.keys(), "tied: a name that is taken")
    absent = manifest.frozen_digests or {}
    for what, given in (
        ("frozen_digests", absent),
        ("kinds", manifest.kinds),
        ("scalars", manifest.scalars),
        ("param_group_of", manifest.param_group_of),
    ):
        expect(given.keys() <= params.keys(), f"{what}: an unknown parameter")
    for name, info in params.items():
        stored = [kind for kind in WEIGHT_KINDS if kind in manifest.kinds.get(name, {})]
        wanted = 0 if name in absent or not math.prod(info.shape) else 1
        expect(len(stored) == wanted, f"{name}: weights in {stored}")
    expect(max(manifest.param_group_of.values(), default=-1) < len(manifest.param_groups), "param_group_of: no group")
    expect(is_count(manifest.step_guard.get("skipped_steps", 0)), "step_guard: skipped_steps")


# -------------------------------------------------------------------- the manifest's file
_FOREIGN = {  # files of other tools' checkpoints -> whose they are, and the command that reads them
    "*_model_states.pt": ("DeepSpeed's", "from-deepspeed"),
    "zero/*/fp32.pt": ("DeepSpeed's universal", "from-universal"),
    ".metadata": ("torch.distributed.checkpoint's", "from-dcp"),
}


def foreign(folder: Path) -> str:
    """Say what to do with another tool's checkpoint, as the end of a sentence; empty where `folder` is none."""
    # The universal one comes first: it holds a file of the other kind, too.
    for pattern in sorted(_FOREIGN, reverse=True):
        if any(folder.glob(pattern)):
            whose, command = _FOREIGN[pattern]
            return f". It is {whose} checkpoint: hf-zero convert {command} {folder} {folder}-converted"
    return ""


def load_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a folder. Raises ConsolidateError, which names it."""
    path = manifest_path(folder)
    try:
        return decode_manifest(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        found = [*folder.glob("*/zero/manifest.json")] or [*folder.resolve().parent.glob("*/zero/manifest.json")]
        hint = ", ".join(sorted(str(other.parent.parent) for other in found))
        hint = foreign(folder) or (f". There are checkpoints in {hint}" if hint else "")
        raise ConsolidateError(f"{folder} holds no complete checkpoint: {path} is missing{hint}") from None
    except OSError as error:
        raise ConsolidateError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConsolidateError(f"{path} {error}") from error


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes: JSON, closed by a checksum of everything else in it."""
    content = manifest.to_json()
    return json.dumps({**content, "crc32": content_crc32(content)}, indent=1).encode("ascii")


def decode_manifest(data: bytes) -> Manifest:
    """Read and check a manifest's bytes.

    Raises:
        ValueError: They are none that this version understands. The text is what follows the name of the file.
    """
    try:
        content = parse_json(data)
    except ValueError as error:
        raise ValueError(f"is damaged: {error}") from error
    expect(isinstance(content, dict), "is damaged: it is not a JSON object")
    version = content.get("format_version")
    newer = isinstance(version, int) and version > FORMAT_VERSION
    needed = f"hf_zero {content.get('hf_zero_version')} or later, or use the consolidate.py of the checkpoint"
    expect(not newer, f"has format version {version}, this version reads up to {FORMAT_VERSION}: upgrade to {needed}")
    try:
        expect(content.pop("crc32", None) == content_crc32(content), "is damaged: its checksum is wrong")
    except RecursionError as error:
        raise ValueError(f"is damaged: {error}") from error
    try:
        return Manifest.from_json(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"contradicts itself: {error}") from error


def parse_json(data: bytes | bytearray | str) -> Any:
    """The value of JSON text. Raises ValueError, also where it is nested deeper than any file of a model is."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def version_of(layouts: Iterable[UnitLayout], scalars: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the oldest version whose readers understand such a checkpoint."""
    if any(key.endswith(SCALE_MARK) for values in scalars.values() for key in values):
        return 4
    return 3 if any(layout.first_rank for layout in layouts) else 2


def content_crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode("ascii"))


# -------------------------------------------------------------------- what the manifest says of the rank files
def file_marks(info: SaveInfo, buffers: Iterable[TensorInfo]) -> dict[str, str]:
    """Return digests of what decides which element of a file belongs where. They stand in rank files, too (that of the
    buffers in rank 0's), so that a manifest which has been edited is not taken for the one they were written with."""
    layout = {"layouts": info.layouts, "params": info.params, "tied": info.tied}
    marks = {"layout": layout, "buffers": [*buffers]}
    texts = {mark: json.dumps(_plain(value), sort_keys=True) for mark, value in marks.items()}
    return {mark: hashlib.sha256(text.encode("ascii")).hexdigest() for mark, text in texts.items()}


Segment = tuple[int, int, int]  # rank of the file, first element in the parameter's slice there, elements


def segments(unit: UnitLayout, name: str, start: int = 0, end: int | None = None) -> list[Segment]:
    """Locate the elements [start, end) of a flattened parameter in the files, in order.

    What a rank owns of one parameter is contiguous in its file. It begins in the bucket where the parameter does, or,
    if the rank's part of that bucket is before the parameter, with the rank's part of the next one.
    """
    offset = unit.slot(name).offset
    bucket = offset - offset % unit.bucket_numel
    part = min(unit.bucket_numel, unit.padded_numel - bucket) // unit.world_size
    found = []
    for owned in unit.locate(name, start, end):
        before = bucket // unit.world_size + min(max(offset - bucket - owned.rank * part, 0), part)
        found.append((unit.first_rank + owned.rank, owned.piece.shard_offset - before, owned.piece.numel))
    return found


def rank_contents(manifest: Manifest) -> list[dict[str, tuple[str, int]]]:
    """Return for each rank file: key -> element type and bytes of every tensor that the manifest has in it."""
    contents: list[dict[str, tuple[str, int]]] = [{} for _ in manifest.files]
    for unit, slot in ((layout, slot) for layout in manifest.layouts for slot in layout.slots):
        numels: dict[int, int] = {}
        for rank, _, numel in segments(unit, slot.name):
            numels[rank] = numels.get(rank, 0) + numel
        for kind, dtype in manifest.kinds.get(slot.name, {}).items():
            for rank, numel in numels.items():
                contents[rank][f"{slot.name}::{kind}"] = (CODES[dtype], numel * ITEM_BYTES[CODES[dtype]])
    for info in manifest.buffers:
        code = CODES[info.dtype]
        contents[0][f"{info.name}::{BUFFER_KIND}"] = (code, math.prod(info.shape) * ITEM_BYTES[code])
    return contents


def check_sizes(folder: Path, files: Iterable[FileInfo], hosts: Sequence[str] = ()) -> None:
    """Raise ConsolidateError, with all that are wrong, unless these files are in the folder with their sizes.

    Args:
        hosts: By rank, where each file was written, if the nodes have folders of their own.
    """
    wrong = []
    away: dict[str, list[str]] = {}  # host -> names
    for rank, file in enumerate(files):
        path = zero_folder(folder) / file.name
        try:
            found = path.stat().st_size
        except OSError as error:
            if rank < len(hosts):
                away.setdefault(hosts[rank], []).append(file.name)
            wrong.append(f"{path} is missing ({error.strerror})")
        else:
            wrong += [f"{path} is damaged: it has {found} bytes, not {file.size}"] if found != file.size else []
    if wrong:
        text = f"{folder} is not complete: {'; '.join(wrong)}"
        if away:
            places = "; ".join(f"{', '.join(names)} on {host}" for host, names in away.items())
            text += f". Its nodes saved into folders of their own: copy {places} from there into {zero_folder(folder)}"
        raise ConsolidateError(text)


# -------------------------------------------------------------------- headers of safetensors files
@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    nbytes: int
    checksums: Sequence[int] = ()  # by block, in rank files since version 2


def num_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def encode_rank_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str], checksums: Sequence[int] | None
) -> tuple[list[str], bytes]:
    """`encode_header` of a rank file, with the checksums of all blocks; None if they are not known yet."""
    blocks = sum(num_blocks(math.prod(shape) * ITEM_BYTES[code]) for code, shape in tensors.values())
    numbers = [0] * blocks if checksums is None else checksums
    expect(len(numbers) == blocks, f"{len(numbers)} checksums of {blocks} blocks")
    text = "".join(f"{number:08x}" for number in numbers)  # of a fixed width: the header's length is known before them
    return encode_header(tensors, {**metadata, "crc32": text}, RANK_FILE_ALIGN)


def encode_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str], align: int = 8
) -> tuple[list[str], bytes]:
    """The order in which a file holds tensors that are given as name -> (element type, shape), and its header.

    Readers view the bytes in place, so elements must start at a multiple of their size: the widest come first.
    """
    ordered = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name][0]])
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        code, shape = tensors[name]
        start, end = end, end + math.prod(shape) * ITEM_BYTES[code]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % align)
    return ordered, len(text).to_bytes(8, "little") + text


def decode_header(
    text: bytes | bytearray, size: int, marks: Mapping[str, str], *, has_blocks: bool
) -> dict[str, Stored]:
    """The tensors of the header `text` in a file of `size` bytes.

    Args:
        marks: What must not be otherwise in the header's metadata; older files have no marks.
        has_blocks: The header holds a checksum for each block of its tensors.
    Raises:
        ValueError: It is damaged.
    """
    begin = 8 + len(text)
    header = map_of(OBJECT)(parse_json(text), "its header")
    metadata = header.pop("__metadata__", {})
    known = all(metadata.get(mark, value) == value for mark, value in marks.items())
    expect(known, "it was written with another manifest")
    tensors = {}
    end = begin
    for name, entry in header.items():
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        expect(isinstance(dtype, str) and dtype in ITEM_BYTES, f"{name} has the type {dtype}, which is unknown here")
        expect(isinstance(offsets, list) and len(offsets) == 2, f"the offsets of {name}")
        expect(all(is_count(n) for n in offsets) and offsets[0] <= offsets[1], f"the offsets of {name}")
        nbytes = math.prod(shape) * ITEM_BYTES[dtype] if is_shape(shape) else -1
        expect(nbytes == offsets[1] - offsets[0], f"the shape of {name}")
        tensors[name] = Stored(dtype, tuple(shape), begin + offsets[0], nbytes)
        end = max(end, begin + offsets[1])
    problem = f"it describes {end - begin} bytes of tensors, and there are {size - begin}"
    expect(end == size, f"{problem}: it was truncated or overwritten")
    return _with_checksums(tensors, metadata.get("crc32"), begin) if has_blocks else tensors


def _with_checksums(tensors: Mapping[str, Stored], text: Any, begin: int) -> dict[str, Stored]:
    """The tensors with the checksums of their blocks, which `text` holds one behind the other; no byte is in none."""
    blocks = sum(num_blocks(tensor.nbytes) for tensor in tensors.values())
    digits = isinstance(text, str) and len(text) == 8 * blocks and set(text) <= set("0123456789abcdef")
    expect(digits, "its checksums")
    numbers: list[int] = np.frombuffer(bytes.fromhex(text), ">u4").tolist()
    found = {}
    block, end = 0, begin
    for name, tensor in tensors.items():
        expect(tensor.start == end, f"{name} is not behind the tensor before it")
        last = block + num_blocks(tensor.nbytes)
        found[name] = replace(tensor, checksums=numbers[block:last])
        block, end = last, end + tensor.nbytes
    return found
