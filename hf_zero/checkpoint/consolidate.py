"""Turns a sharded checkpoint of hf_zero into Hugging Face weights: `python consolidate.py --help`.

Under the name zero_to_fp32.py it answers to DeepSpeed's way of calling: `python zero_to_fp32.py CHECKPOINT_DIR OUT`.

Stand-alone, numpy and the standard library only: a copy of this very file lies in every checkpoint folder and has to
work there years later, without hf_zero and without torch. That is why it is one file and repeats the arithmetic of
hf_zero/layout.py (a test proves them equal). hf_zero's readers import from here how manifests and files are read.

Several threads stream tensors in chunks of a few MB from the files to the output, so memory does not depend on the
model. OUT appears by one rename when it is complete, or not at all.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import errno
import hashlib
import importlib.util
import json
import math
import mmap
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# In version 1 files had one checksum each, of all their bytes; in version 3 units may have a first_rank.
FORMAT_VERSION = 3
BLOCK_BYTES = 1 << 20  # of a tensor in a rank file, under one checksum
RANK_FILE_ALIGN = 4096  # tensors of a rank file begin at a multiple: direct writes need it
WEIGHT_KINDS = ("master", "param")  # of a trainable parameter the master is stored, of a frozen one the parameter
WRITTEN_KINDS = (*WEIGHT_KINDS, "buffer")  # what of a checkpoint this script writes
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
TORCH_NAMES = {**FLOATS, "C64": "complex64", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
TORCH_NAMES |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
TORCH_NAMES |= {f"{k}{bits}": f"{t}{bits}" for k, t in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)}
CODES = {name: code for code, name in TORCH_NAMES.items()}
ITEM_BYTES = {code: int((re.findall(r"\d+", code) or ["8"])[0]) // 8 for code in TORCH_NAMES}
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
CHUNK_BYTES = 4 << 20
READ_BYTES = 1 << 20
HUGE_PAGE = 2 << 20
WINDOW_BYTES = HUGE_PAGE + mmap.PAGESIZE  # two blocks of a tensor, wherever they begin
MAX_WINDOWS = 8  # of a thread
THREADS = 4  # each has a chunk in memory, and a part of the output to write
CLEAR_LINE = "\r\x1b[K"  # of a terminal that shows a progress bar
ALIGN = 8  # elements; as in hf_zero/layout.py
MOST_NUMEL = 1 << 56  # of a tensor, and most bytes of a file: what is beyond is damage, and products of it overflow
MANIFEST_KEYS = set(
    "format_version hf_zero_version saved_at world_size stage global_step files params buffers".split()
)
MANIFEST_KEYS |= set("tied kinds scalars param_groups client_state extra layouts".split())
UNIT_KEYS = {"name", "dtype", "trainable", "world_size", "bucket_numel", "padded_numel", "slots"}
MAX_OPEN_FILES = 48  # of a thread, with 3 descriptors each: a process may have 1024 by default
MAX_HEADER_BYTES = 1 << 30  # more than any real header, less than what a damaged length could make us allocate
BINARY = getattr(os, "O_BINARY", 0)  # without it Windows changes ends of lines

# What a Hugging Face folder holds beside the weights: configuration, tokenizer, chat templates, code of its own.
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "*.bpe", "*.py")
DEEPSPEEDS_NAME = "zero_to_fp32.py"
NOT_MODEL_FILES = (
    *("*.index.json", "trainer_state.json", "checksums.json", "*_results.json", "consolidate.py"),
    "original_names.json",
    DEEPSPEEDS_NAME,
)
ONE_FILE = (".safetensors", ".bin")
TEMPLATES = "additional_chat_templates"

Raw = npt.NDArray[np.uint8]
Advance = Callable[[int], None]  # called with the bytes done since the last call


class ConsolidateError(RuntimeError):
    """The checkpoint is not complete, or the output cannot be written; the message names the file."""


@dataclass(frozen=True)
class Options:
    dtype: str | None = None  # of parameters: "fp32", "bf16", "fp16"; None, and always buffers: as stored
    shard_bytes: int = 5 * 10**9
    only_trainable: bool = False  # leaves frozen parameters out; buffers stay
    verify: bool = True  # compare the checksums
    bins: bool = False  # a folder gets pytorch_model.bin, and nothing but weights
    names: Mapping[str, str] | None = None  # name in the checkpoint -> name that is written; others stay


DEFAULTS = Options()


@dataclass(frozen=True)
class Tensor:
    name: str
    key: str  # in the rank files
    shape: tuple[int, ...]
    stored: str  # element type, as safetensors names it
    written: str
    segments: list[tuple[int, int, int]]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.written]


# -------------------------------------------------------------------- the manifest
_FOREIGN = {  # files of other tools' checkpoints -> whose they are, and the command that reads them
    "*_model_states.pt": ("DeepSpeed's", "from-deepspeed"),
    "zero/*/fp32.pt": ("DeepSpeed's universal", "from-universal"),
    ".metadata": ("torch.distributed.checkpoint's", "from-dcp"),
}


def foreign(folder: Path) -> str:
    """What to do with another tool's checkpoint, as the end of a sentence; empty where `folder` is none."""
    # First the universal one: it holds a file of the other kind, too.
    for pattern in sorted(_FOREIGN, reverse=True):
        if any(folder.glob(pattern)):
            whose, command = _FOREIGN[pattern]
            return f". It is {whose} checkpoint: hf-zero convert {command} {folder} {folder}-converted"
    return ""


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "zero" / "manifest.json"
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


def decode_manifest(data: bytes) -> dict[str, Any]:
    """The content of a manifest's bytes, checked, without its checksum.

    Raises:
        ValueError: They are none that this version understands. The text is what follows the name of the file.
    """
    try:
        manifest = parse_json(data)
    except ValueError as error:
        raise ValueError(f"is damaged: {error}") from error
    expect(isinstance(manifest, dict), "is damaged: it is not a JSON object")
    version = manifest.get("format_version")
    newer = isinstance(version, int) and version > FORMAT_VERSION
    needed = f"hf_zero {manifest.get('hf_zero_version')} or later, or use the consolidate.py of the checkpoint"
    expect(not newer, f"has format version {version}, this version reads up to {FORMAT_VERSION}: upgrade to {needed}")
    try:
        expect(manifest.pop("crc32", None) == content_crc32(manifest), "is damaged: its checksum is wrong")
    except RecursionError as error:
        raise ValueError(f"is damaged: {error}") from error
    try:
        check_manifest(manifest)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"contradicts itself: {error}") from error
    return dict(manifest)


def parse_json(data: bytes | bytearray | str) -> Any:
    """What JSON says. Raises ValueError, also where it is nested deeper than any file of a model is."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def content_crc32(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode("ascii"))


# -------------------------------------------------------------------- does the manifest make sense?
def expect(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def is_count(value: Any, most: int = MOST_NUMEL) -> bool:
    return type(value) is int and 0 <= value <= most


def is_name(value: Any) -> bool:
    """Text that can be written: JSON may hold half of a character."""
    can_be_encoded = isinstance(value, str) and value.encode("utf-8", "replace").decode() == value
    return can_be_encoded and value != "" and "\0" not in value


def is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def is_map(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(of(item) for item in value.values())


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError, with what is wrong where, unless a save can have written this manifest.

    Its layouts, names, shapes, types and files agree then: readers rely on that and do not check again.
    """
    missing = sorted(MANIFEST_KEYS - manifest.keys())
    expect(not missing, f"{', '.join(missing)} missing")
    least_and_most = {"format_version": (1, FORMAT_VERSION), "world_size": (1, 1 << 31), "stage": (0, 3)}
    for key, (least, most) in {**least_and_most, "global_step": (0, MOST_NUMEL)}.items():
        expect(is_count(manifest[key], most) and manifest[key] >= least, f"{key} {manifest[key]!r}")
    world_size, saved_at = manifest["world_size"], manifest["saved_at"]
    has_stages = manifest["format_version"] > 2
    expect(is_name(manifest["hf_zero_version"]), "hf_zero_version is no text")
    expect(type(saved_at) in (int, float) and 0 <= saved_at < 253402300800, "saved_at is no time")  # the year 10000
    check_files(manifest["files"], world_size)
    slots = check_layouts(manifest["layouts"], world_size, has_stages=has_stages)
    check_tensors(manifest, slots)
    check_state(manifest, slots)


def check_files(files: Any, world_size: int) -> None:
    expect(isinstance(files, list) and len(files) == world_size, f"the files are not those of world size {world_size}")
    for rank, file in enumerate(files):
        expect(is_map(file, lambda value: True) and file.keys() >= {"name", "size", "crc32"}, f"files[{rank}]")
        name = file["name"]
        match = re.fullmatch(r"rank-([0-9]{5,9})(\.[0-9a-f]+)?\.safetensors", name) if isinstance(name, str) else None
        expect(match is not None and int(match[1]) == rank, f"files[{rank}] has the name {name!r}")
        expect(is_count(file["size"]) and is_count(file["crc32"], 0xFFFFFFFF), f"size or checksum of {name}")


def check_layouts(layouts: Any, num_files: int, *, has_stages: bool) -> dict[str, tuple[Mapping[str, Any], list[int]]]:
    """Parameter -> (its unit, its shape)."""
    expect(isinstance(layouts, list), "layouts is no list")
    units: set[str] = set()
    slots: dict[str, tuple[Mapping[str, Any], list[int]]] = {}
    for number, unit in enumerate(layouts):
        where = f"layouts[{number}]"
        expect(isinstance(unit, dict) and unit.keys() >= UNIT_KEYS, f"{where}: keys are missing")
        expect(is_name(unit["name"]) and unit["name"] not in units, f"{where}: the name {unit['name']!r}")
        units.add(unit["name"])
        expect(isinstance(unit["dtype"], str) and unit["dtype"] in CODES, f"{where}: the type {unit['dtype']!r}")
        expect(isinstance(unit["trainable"], bool), f"{where}: trainable {unit['trainable']!r}")
        world_size, first = unit["world_size"], unit.get("first_rank", 0)
        expect(is_count(world_size, num_files) and world_size > 0, f"{where}: the world size {world_size!r}")
        expect(world_size == num_files or has_stages, f"{where}: another world size")
        is_stage = is_count(first) and first % world_size == 0 and first + world_size <= num_files
        expect(is_stage, f"{where}: first_rank {first!r}")
        end = 0
        expect(isinstance(unit["slots"], list), f"{where}: slots is no list")
        for slot in unit["slots"]:
            expect(isinstance(slot, list) and len(slot) == 3, f"{where}: {slot!r} is no place of a parameter")
            name, shape, offset = slot
            expect(is_name(name) and name not in slots, f"{where}: the parameter {name!r} is no name, or there twice")
            expect(is_shape(shape), f"{name}: the shape {shape!r}")
            expect(type(offset) is int and offset == end + -end % ALIGN, f"{name}: the offset {offset!r}")
            end = offset + math.prod(shape)
            slots[name] = (unit, shape)
        padded, bucket = unit["padded_numel"], unit["bucket_numel"]
        # Earlier checkpoints have parts that are not aligned.
        expect(
            type(padded) is int and padded in (end + -end % (world_size * ALIGN), end + -end % world_size),
            f"{where}: padded_numel {padded!r}",
        )
        expect(is_count(bucket) and bucket > 0 and bucket % world_size == 0, f"{where}: bucket_numel {bucket!r}")
        shard = bucket // world_size
        fits = shard < ALIGN or shard % ALIGN == 0 if bucket < padded else bucket == max(padded, world_size)
        expect(fits, f"{where}: bucket_numel {bucket}")
    return slots


def is_shape(value: Any) -> bool:
    sizes = isinstance(value, list) and all(is_count(n) for n in value)
    return sizes and math.prod(max(n, 1) for n in value) <= MOST_NUMEL


def check_tensors(manifest: Mapping[str, Any], slots: Mapping[str, tuple[Mapping[str, Any], list[int]]]) -> None:
    """Parameters, buffers and tied names."""
    names: dict[str, set[str]] = {"params": set(), "buffers": set()}
    for what, seen in names.items():
        expect(isinstance(manifest[what], list), f"{what} is no list")
        for info in manifest[what]:
            expect(isinstance(info, dict) and info.keys() >= {"name", "shape", "dtype"}, f"{what}: {info!r}"[:200])
            name, shape, dtype = info["name"], info["shape"], info["dtype"]
            expect(is_name(name) and name not in seen, f"{what}: {name!r} is no name, or there twice")
            expect(is_shape(shape), f"{name}: the shape {shape!r}")
            expect(isinstance(dtype, str) and dtype in CODES, f"{name}: the type {dtype!r}")
            seen.add(name)
            if what == "params":
                expect(name in slots, f"{name} is in no layout")
                unit, laid_out = slots[name]
                expect(shape == laid_out, f"{name}: the shape {shape}, in the layout {laid_out}")
                expect(dtype == unit["dtype"], f"{name}: the type {dtype}, in the layout {unit['dtype']}")
    params, buffers = names["params"], names["buffers"]
    expect(params == set(slots), f"{', '.join(sorted(set(slots) - params)[:3])} not among the parameters")
    expect(not params & buffers, "a buffer has the name of a parameter")
    tied = manifest["tied"]
    expect(is_map(tied, lambda name: isinstance(name, str) and name in params), "tied: a name that no parameter has")
    expect(
        all(is_name(alias) for alias in tied) and not tied.keys() & (params | buffers), "tied: a name that is taken"
    )


def check_state(manifest: Mapping[str, Any], slots: Mapping[str, tuple[Mapping[str, Any], list[int]]]) -> None:
    """Kinds and numbers of every parameter, and what the optimizer, the scheduler and the caller left."""
    extra, kinds, scalars = manifest["extra"], manifest["kinds"], manifest["scalars"]
    expect(isinstance(extra, dict), "extra is no object")
    absent = extra.get("frozen_digests", {})
    expect(is_map(absent, lambda value: isinstance(value, str)) and absent.keys() <= slots.keys(), "frozen_digests")
    types = partial(is_map, of=lambda dtype: isinstance(dtype, str) and dtype in CODES)
    expect(is_map(kinds, types) and kinds.keys() <= slots.keys(), "kinds: no types, or of an unknown parameter")
    for name, (_, shape) in slots.items():
        stored = [kind for kind in WEIGHT_KINDS if kind in kinds.get(name, {})]
        expect(len(stored) == (0 if name in absent or not math.prod(shape) else 1), f"{name}: weights in {stored}")
    expect(is_map(scalars, partial(is_map, of=is_number)), "scalars: a value that is no number")
    expect(scalars.keys() <= slots.keys(), "scalars: of an unknown parameter")
    groups = manifest["param_groups"]
    expect(isinstance(groups, list) and all(isinstance(group, dict) for group in groups), "param_groups")
    number_of = extra.get("param_group_of", {})
    expect(is_map(number_of, lambda number: is_count(number) and number < len(groups)), "param_group_of: no group")
    expect(number_of.keys() <= slots.keys(), "param_group_of: an unknown parameter")
    for key in ("lr_scheduler_class", "optimizer", "optimizer_package"):
        expect(isinstance(extra.get(key), str | None), f"{key} {extra.get(key)!r}")
    expect(isinstance(extra.get("lr_scheduler", {}), dict), "lr_scheduler is no object")
    guard = extra.get("step_guard", {})
    expect(is_map(guard, is_number), "step_guard: a value that is no number")
    expect(is_count(guard.get("skipped_steps", 0)), "step_guard: skipped_steps")


def file_marks(content: Mapping[str, Any]) -> dict[str, str]:
    """Digests of what decides which element of a file belongs where. They stand in the rank files, too (that of the
    buffers in rank 0's), so that a manifest which has been edited is not taken for the one they were written with."""
    marks = {"layout": {key: content[key] for key in ("layouts", "params", "tied")}, "buffers": content["buffers"]}
    texts = {mark: json.dumps(value, sort_keys=True).encode("ascii") for mark, value in marks.items()}
    return {mark: hashlib.sha256(text).hexdigest() for mark, text in texts.items()}


def segments(unit: Mapping[str, Any], offset: int, numel: int) -> list[tuple[int, int, int]]:
    """Where the elements at [offset, offset + numel) of a unit's flat parameter lie: (rank, start, numel), in order.

    The flat parameter is split into buckets, and rank r owns the r-th of `world_size` equal shards of each. What a
    rank owns of one parameter is contiguous in its file, so a cursor per rank gives `start`, the place in there.
    The unit of a pipeline's stage has the files from its `first_rank` on.
    """
    found = []
    first = unit.get("first_rank", 0)
    used = [0] * unit["world_size"]
    position, end = offset, offset + numel
    while position < end:
        bucket_start = position - position % unit["bucket_numel"]
        shard = min(unit["bucket_numel"], unit["padded_numel"] - bucket_start) // unit["world_size"]
        rank, inside = divmod(position - bucket_start, shard)
        count = min(shard - inside, end - position)
        found.append((first + rank, used[rank], count))
        used[rank] += count
        position += count
    return found


def plan_tensors(manifest: Mapping[str, Any], options: Options) -> list[Tensor]:
    """What to write, in the order of state_dict: parameters, then persistent buffers."""
    slots = {slot[0]: (unit, slot[2]) for unit in manifest["layouts"] for slot in unit["slots"]}
    tensors = []
    for info in manifest["params"]:
        name, shape = info["name"], tuple(info["shape"])
        unit, offset = slots[name]
        if unit["trainable"] or not options.only_trainable:
            kinds = manifest["kinds"].get(name, {})  # empty for a parameter of no elements
            kind = next((kind for kind in WEIGHT_KINDS if kind in kinds), "")
            if name in manifest["extra"].get("frozen_digests", {}):
                raise ConsolidateError(f"frozen parameters were not saved ({name}): take --only-trainable")
            stored = CODES[kinds.get(kind, info["dtype"])]
            if options.dtype and stored.startswith("F8"):
                raise ConsolidateError(f"cannot convert {name}, which is {TORCH_NAMES[stored]}: leave the dtype out")
            written = DTYPES[options.dtype] if options.dtype and stored in FLOATS else stored
            where = segments(unit, offset, math.prod(shape))
            tensors.append(Tensor(name, f"{name}::{kind}", shape, stored, written, where))
    if not tensors:
        raise ConsolidateError(f"no {'trainable ' if options.only_trainable else ''}parameters are in the checkpoint")
    for info in manifest["buffers"]:
        name, shape, stored = info["name"], tuple(info["shape"]), CODES[info["dtype"]]
        if "::state::" not in name:  # which is optimizer state
            tensors.append(Tensor(name, f"{name}::buffer", shape, stored, stored, [(0, 0, math.prod(shape))]))
    return tensors


def renamed(tensors: list[Tensor], names: Mapping[str, str]) -> list[Tensor]:
    """The same tensors under other names. Raises ConsolidateError where two get the same one, or no name is meant."""
    if names and not any(tensor.name in names for tensor in tensors):
        raise ConsolidateError(
            f"--names: none of its {len(names)} names ({next(iter(names))}, ...) is in the checkpoint, where they are "
            f"as {tensors[0].name}. Is it the file of another checkpoint, or are names and their new ones swapped?"
        )
    result = [replace(tensor, name=names.get(tensor.name, tensor.name)) for tensor in tensors]
    origin: dict[str, str] = {}
    for before, after in zip(tensors, result, strict=True):
        if after.name in origin:
            raise ConsolidateError(f"--names: {origin[after.name]} and {before.name} would both be {after.name}")
        origin[after.name] = before.name
    return result


def read_names(path: Path) -> dict[str, str]:
    """A file for --names: a JSON object, name in the checkpoint -> name to write."""
    try:
        names = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConsolidateError(f"--names: {path} cannot be read as JSON: {error}") from error
    if not is_map(names, is_name):
        raise ConsolidateError(f'--names: {path} is no map of names, as in {{"0.weight": "model.embed.weight"}}')
    return {str(name): str(other) for name, other in names.items()}


def rank_contents(manifest: Mapping[str, Any]) -> list[dict[str, tuple[str, int]]]:
    """For each rank file: key -> element type and bytes of every tensor that is in it by the manifest."""
    contents: list[dict[str, tuple[str, int]]] = [{} for _ in manifest["files"]]
    for unit, slot in ((layout, slot) for layout in manifest["layouts"] for slot in layout["slots"]):
        name, shape, offset = slot
        numels: dict[int, int] = {}
        for rank, _, numel in segments(unit, offset, math.prod(shape)):
            numels[rank] = numels.get(rank, 0) + numel
        for kind, dtype in manifest["kinds"].get(name, {}).items():
            for rank, numel in numels.items():
                contents[rank][f"{name}::{kind}"] = (CODES[dtype], numel * ITEM_BYTES[CODES[dtype]])
    for info in manifest["buffers"]:
        code = CODES[info["dtype"]]
        contents[0][f"{info['name']}::buffer"] = (code, math.prod(info["shape"]) * ITEM_BYTES[code])
    return contents


def check_sizes(folder: Path, sizes: Mapping[str, int], hosts: Sequence[str] = ()) -> None:
    """Raise ConsolidateError, with all that are wrong, unless the rank files have these sizes, by name.

    `hosts`: by rank, where each file was written, if the nodes have folders of their own.
    """
    wrong = []
    away: dict[str, list[str]] = {}  # host -> names
    for rank, (name, size) in enumerate(sizes.items()):
        path = folder / "zero" / name
        try:
            found = path.stat().st_size
        except OSError as error:
            if rank < len(hosts):
                away.setdefault(hosts[rank], []).append(name)
            wrong.append(f"{path} is missing ({error.strerror})")
        else:
            wrong += [f"{path} is damaged: it has {found} bytes, not {size}"] if found != size else []
    if wrong:
        text = f"{folder} is not complete: {'; '.join(wrong)}"
        if away:
            places = "; ".join(f"{', '.join(names)} on {host}" for host, names in away.items())
            text += f". Its nodes saved into folders of their own: copy {places} from there into {folder / 'zero'}"
        raise ConsolidateError(text)


def hosts_of(manifest: Mapping[str, Any]) -> Sequence[str]:
    """By rank, the host that has its file, where the nodes have folders of their own; else empty."""
    hosts = manifest["extra"].get("hosts")
    return hosts if isinstance(hosts, list) and all(isinstance(host, str) for host in hosts) else ()


class RankFiles:
    """The rank files of one checkpoint, of which at most MAX_OPEN_FILES are open at once. For one thread: see `twin`.

    Args:
        kinds: What will be read ("master", "exp_avg", ...), None for all; what else files hold is not looked at.
        verify: Reads of tensors compare checksums. Those of version 1 are compared by `verify` alone.
        crc32: As zlib's, or faster.
        elsewhere: By rank, files that are not in the folder, and how to read them.
    Raises:
        ConsolidateError: A file is missing, damaged, or not what the manifest lists, here or at a later read.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        kinds: Sequence[str] | None = None,
        *,
        verify: bool = True,
        crc32: Callable[[memoryview, int], int] = zlib.crc32,
        elsewhere: Mapping[int, SafetensorsFile] | None = None,
    ) -> None:
        elsewhere = elsewhere or {}
        self._manifest = manifest
        self._kinds = kinds
        self._verify = verify
        self.crc32 = crc32
        self._files = [
            elsewhere.get(rank) or SafetensorsFile(folder / "zero" / file["name"])
            for rank, file in enumerate(manifest["files"])
        ]
        self._elsewhere = elsewhere.keys()
        self._open: set[int] = set()  # ranks
        self._windows: dict[int, Window] = {}  # by rank, of the files that were read last
        self._headers: dict[int, dict[str, Stored]] = {}  # by rank
        self._decoding = threading.Lock()  # one of the twins decodes a header, for all of them
        here = [file for rank, file in enumerate(manifest["files"]) if rank not in elsewhere]
        # Where some are elsewhere, it is known already that the others are here.
        check_sizes(folder, {file["name"]: file["size"] for file in here}, () if elsewhere else hosts_of(manifest))

    @property
    def count(self) -> int:
        return len(self._files)

    @property
    def has_blocks(self) -> bool:
        """Whether each block of a tensor has a checksum, so that reads can be verified by themselves."""
        return bool(self._manifest["format_version"] > 1)

    @cached_property
    def _marks(self) -> dict[str, str]:
        return file_marks(self._manifest)

    @cached_property
    def _contents(self) -> list[dict[str, tuple[str, int]]]:
        return rank_contents(self._manifest)

    def twin(self) -> RankFiles:
        """For another thread: with its own open files, and the headers of both."""
        with self._decoding:
            assert self._marks and self._contents  # are decided once
            twin = copy.copy(self)
        twin._files = [SafetensorsFile(file.path) for file in self._files]
        twin._open, twin._windows, twin._elsewhere = set(), {}, {}.keys()
        return twin

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._windows.clear()
        for rank in self._open:
            self._files[rank].close()
        self._open.clear()

    def verify(self, ranks: Iterable[int], advance: Advance | None = None) -> None:
        """Compare the checksums of all bytes of these files, and name all that are damaged."""
        damaged = []
        for rank in ranks:
            try:
                for count in self._verified_blocks(rank) if self.has_blocks else self._verified_whole(rank):
                    if advance is not None:
                        advance(count)
            except ConsolidateError as error:
                damaged.append(str(error))
        if damaged:
            raise ConsolidateError("; ".join(damaged))

    def _verified_blocks(self, rank: int) -> Iterator[int]:
        """Bytes that were found to be right, as they are read."""
        header = self.header(rank)
        yield self._manifest["files"][rank]["size"] - sum(stored.nbytes for stored in header.values())
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for key, stored in header.items():
            tensor = self.tensor(rank, key)
            for offset in range(0, stored.nbytes, CHUNK_BYTES):
                view = buffer[: stored.nbytes - offset]
                tensor.read(view, offset)
                yield len(view)

    def _verified_whole(self, rank: int) -> Iterator[int]:
        """The same of a file of version 1."""
        crc, size = 0, self._manifest["files"][rank]["size"]
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for offset in range(0, size, CHUNK_BYTES):
            view = buffer[: size - offset]
            self.read(rank, view, offset)
            crc = self.crc32(view, crc)
            yield len(view)
        if crc != self._manifest["files"][rank]["crc32"]:
            raise ConsolidateError(f"{self._files[rank].path} is damaged: wrong checksum, its content has changed")
        self.header(rank)

    def tensor(self, rank: int, key: str, end: int | None = None) -> RankTensor:
        """A tensor of a rank's file, to be read in parts, up to its byte `end`; `finish` it behind the last part."""
        stored = self.header(rank)[key]
        end = stored.nbytes if end is None else min(stored.nbytes, end + -end % BLOCK_BYTES)
        return RankTensor(self, rank, key, stored, end, self._verify and self.has_blocks)

    def header(self, rank: int) -> dict[str, Stored]:
        """The tensors in a rank's file, which have been compared with the manifest."""
        with self._decoding:
            if rank not in self._headers:
                self._headers[rank] = self._decoded(rank)
            return self._headers[rank]

    def _decoded(self, rank: int) -> dict[str, Stored]:
        with self._opened(rank) as file:
            crc32 = self._manifest["files"][rank]["crc32"] if self.has_blocks else None
            header = file.header(self._marks, crc32)
            held = {key: (tensor.dtype, tensor.nbytes) for key, tensor in header.items()}
            wanted = self._contents[rank]
            other = [key for key in sorted(held.keys() | wanted.keys()) if held.get(key) != wanted.get(key)]
            if self._kinds is not None:
                other = [key for key in other if key.rpartition("::")[2] in self._kinds]
            differences = f"{', '.join(other[:3])} ({len(other)} differences)"
            expect(not other, f"it does not hold what the manifest lists: {differences}")
        return header

    def damage(self, rank: int, key: str, block: int) -> ConsolidateError:
        path = self._files[rank].path
        return ConsolidateError(f"{path} is damaged: wrong checksum, block {block} of {key} has changed")

    def read(self, rank: int, view: memoryview, offset: int, end: int = 0) -> None:
        """Fill `view` from a byte of a rank's file on. Nothing is compared. More will be read, up to `end`."""
        with self._opened(rank) as file:
            if rank in self._elsewhere:
                file.read(view, offset)
            else:
                file.read_past_cache(view, offset, max(end, offset + len(view)), self._window_of(rank))

    def forget(self) -> None:
        """Read again from the files what was read ahead: they may change until the next read."""
        for window in self._windows.values():
            window.clear()

    def _window_of(self, rank: int) -> Window:
        if rank not in self._windows:
            if len(self._windows) >= MAX_WINDOWS:
                del self._windows[next(iter(self._windows))]
            self._windows[rank] = Window()
        return self._windows[rank]

    @contextmanager
    def _opened(self, rank: int) -> Iterator[SafetensorsFile]:
        if rank not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self.close()
            self._open.add(rank)
        path = self._files[rank].path
        try:
            yield self._files[rank]
        except OSError as error:
            raise ConsolidateError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConsolidateError(f"{path} is damaged: {error}") from error


# -------------------------------------------------------------------- safetensors files
@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    nbytes: int
    checksums: Sequence[int] = ()  # by block, in rank files since version 2


class RankTensor:
    """Reads parts of one tensor of a rank's file, and compares the blocks that they touch with their checksums.

    Parts that are read in order, one behind the other, are read once; where a part begins or ends inside a block, the
    rest of the block is read for its checksum alone. What `read` filled is known to be right after `finish`.
    """

    def __init__(self, files: RankFiles, rank: int, key: str, stored: Stored, end: int, verify: bool) -> None:
        self._files = files
        self._rank = rank
        self._key = key
        self._stored = stored
        self._end = end  # nobody wants what is behind
        self._verify = verify
        self._at = 0  # bytes from the start of the tensor; its block is checksummed up to here
        self._crc = 0

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from a byte of the tensor on."""
        self._move(offset)
        step = READ_BYTES if self._verify else max(len(view), 1)
        for start in range(0, len(view), step):  # what was read is in the cache still, when it is checksummed
            self._read(view[start : start + step])

    def finish(self) -> None:
        """Compare the last block, of which the rest is read."""
        if self._verify and self._at % BLOCK_BYTES:
            self._skip_to(min(self._stored.nbytes, self._at + -self._at % BLOCK_BYTES))

    def _move(self, offset: int) -> None:
        if not self._verify:
            self._at = offset
        elif offset != self._at:
            if not self._at <= offset < self._at + BLOCK_BYTES - self._at % BLOCK_BYTES:  # in another block, or back
                self.finish()
                self._at, self._crc = offset - offset % BLOCK_BYTES, 0
            self._skip_to(offset)

    def _skip_to(self, offset: int) -> None:
        scratch = memoryview(bytearray(min(offset - self._at, READ_BYTES)))
        while self._at < offset:
            self._read(scratch[: offset - self._at])

    def _read(self, view: memoryview) -> None:
        stored = self._stored
        self._files.read(self._rank, view, stored.start + self._at, stored.start + self._end)
        if not self._verify:
            self._at += len(view)
        while self._verify and view:
            part = view[: BLOCK_BYTES - self._at % BLOCK_BYTES]
            self._crc, self._at, view = self._files.crc32(part, self._crc), self._at + len(part), view[len(part) :]
            if self._at % BLOCK_BYTES == 0 or self._at == self._stored.nbytes:
                block = (self._at - 1) // BLOCK_BYTES
                if self._crc != self._stored.checksums[block]:
                    raise self._files.damage(self._rank, self._key, block)
                self._crc = 0


class TensorBytes:
    """The stored bytes of a whole tensor, from one of its elements on: from all files that hold parts of it.

    What `read` filled is known to be right after `finish`.
    """

    def __init__(self, files: RankFiles, tensor: Tensor, first: int) -> None:
        self._files = files
        self._key = tensor.key
        self._segments = self._from(tensor, first)
        self._parts: dict[int, RankTensor] = {}  # by rank
        self._at = (0, 0, 0)  # rank, byte from the start of its part, bytes left there

    @staticmethod
    def _from(tensor: Tensor, first: int) -> Iterator[tuple[int, int, int]]:
        item = ITEM_BYTES[tensor.stored]
        for rank, start, numel in tensor.segments:
            skipped = min(first, numel)
            first -= skipped
            if skipped < numel:
                yield rank, (start + skipped) * item, (numel - skipped) * item

    def read(self, view: memoryview) -> None:
        """Fill `view` with the next bytes."""
        while view:
            rank, offset, left = self._at if self._at[2] else next(self._segments)
            if rank not in self._parts:
                self._parts[rank] = self._files.tensor(rank, self._key)
            now = view[:left]
            self._parts[rank].read(now, offset)
            self._at = (rank, offset + len(now), left - len(now))
            view = view[len(now) :]

    def finish(self) -> None:
        for part in self._parts.values():
            part.finish()


def transfer_memory(nbytes: int) -> memoryview:
    """Memory that a disk reads from and writes to, on huge pages where the system has them.

    On small ones a megabyte is a list of 256 pieces, which many devices take in several commands: a disk that writes
    2 GB/s from huge pages came to 0.4 from small ones.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, nbytes))
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    with suppress(OSError):  # a kernel without them: small pages work, too
        memory.madvise(mmap.MADV_HUGEPAGE, start, max(nbytes - nbytes % HUGE_PAGE, mmap.PAGESIZE))
    return memoryview(memory)[start : start + nbytes]


class Window:
    """Bytes of one open file that were read past the page cache, ahead of those who want them. For one thread.

    A read through the page cache copies every byte once more and pushes out what others have there; where memory is
    short, or a virtual machine's, that takes longer than the disk.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")  # until it is needed
        self._start = self._end = 0

    def copy(self, view: memoryview, offset: int) -> int:
        """Fill the beginning of `view` from `offset` on; returns how many bytes are here."""
        if not self._start <= offset < self._end:
            return 0
        count = min(len(view), self._end - offset)
        view[:count] = self._memory[offset - self._start : offset - self._start + count]
        return count

    def clear(self) -> None:
        self._start = self._end = 0

    def fill(self, descriptor: int, offset: int, end: int) -> bool:
        """Read from `offset` on, not beyond the page that `end` is in; returns whether there was anything."""
        start = offset - offset % mmap.PAGESIZE
        count = min(WINDOW_BYTES, end - start + -(end - start) % mmap.PAGESIZE)
        self.clear()
        try:
            self._memory = self._memory or transfer_memory(WINDOW_BYTES)
            found = os.preadv(descriptor, [self._memory[:count]], start)
        except OSError:  # whatever it is: the other way finds it again, or can do it
            return False
        self._start, self._end = start, start + found
        return offset < self._end


class SafetensorsFile:
    """Reads a safetensors file by offset: pages of a memory map would count as memory of the process.

    It is opened at the first read, also after `close`. OSError comes from the system; ValueError names the damage.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._direct = -1
        self._map: mmap.mmap | None = None

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on; the system may give less than asked for (at most 2 GiB at once)."""
        self._open()
        while view:
            count = read_at(self._descriptor, view, offset)
            expect(count > 0, f"it ends too early, at byte {offset}: it was truncated")
            view, offset = view[count:], offset + count

    def read_past_cache(self, view: memoryview, offset: int, end: int, window: Window) -> None:
        """As `read`, out of `window`, where what the page cache does not have is put, up to `end`."""
        self._open()
        while view and self._map is not None:
            count = window.copy(view, offset)
            if not count and self._is_cached(offset, min(end, offset + READ_BYTES)):
                count = read_at(self._descriptor, view[:READ_BYTES], offset)
            if not count and not window.fill(self._direct, offset, end):
                break
            view, offset = view[count:], offset + count
        if view:
            self.read(view, offset)

    def _is_cached(self, start: int, end: int) -> bool:
        """Whether the page cache has these bytes. Reading to find out (RWF_NOWAIT) would bring them there."""
        assert self._map is not None
        first = start - start % mmap.PAGESIZE
        pages = -(-(end - first) // mmap.PAGESIZE)
        here = (ctypes.c_ubyte * pages)()
        unknown = self._system.mincore(ctypes.c_void_p(self._address + first), ctypes.c_size_t(end - first), here)
        return not unknown and bytes(here).count(1) == pages

    def _open(self) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY | BINARY)
            if hasattr(os, "O_DIRECT"):
                with suppress(OSError, ValueError):  # EINVAL where the file system has none; an empty file
                    self._direct = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
                    # Nothing is read through it, so it takes no memory; read-only, so none is set aside either.
                    self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
                    self._address = np.frombuffer(self._map, np.uint8).ctypes.data
                    self._system = ctypes.CDLL(None)

    def size(self) -> int:
        """In bytes, of a file that has been read from."""
        return os.fstat(self._descriptor).st_size

    def header(self, marks: Mapping[str, str] | None = None, crc32: int | None = None) -> dict[str, Stored]:
        """The tensors in the file by name; `marks` must not be other ones in its metadata.

        `crc32` is the checksum of the header of a file that has one for each block of its tensors.
        """
        length = bytearray(8)
        self.read(memoryview(length), 0)
        size, begin = self.size(), 8 + int.from_bytes(length, "little")
        fits = 8 < begin <= min(size, MAX_HEADER_BYTES)
        expect(fits, f"it is no safetensors file, or its header was truncated ({size} bytes)")
        text = bytearray(begin - 8)
        self.read(memoryview(text), 8)
        unchanged = crc32 in (None, zlib.crc32(text, zlib.crc32(length)))
        expect(unchanged, "its header has a wrong checksum, so it has changed")
        try:
            header = parse_json(text)
            metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
            tensors = check_header(header, begin, size, marks or {})
            return tensors if crc32 is None else with_checksums(tensors, metadata.get("crc32"), begin)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"unreadable header ({error})") from error

    def close(self) -> None:
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1
        self._map = None


def check_header(header: Any, begin: int, size: int, marks: Mapping[str, str]) -> dict[str, Stored]:
    """The tensors of a header in a file of `size` bytes, whose data begin at `begin`; ValueError if it is damaged."""
    expect(is_map(header, lambda entry: isinstance(entry, dict)), "its header is no object of objects")
    found = header.pop("__metadata__", {})
    known = all(found.get(mark, value) == value for mark, value in marks.items())  # older files have no marks
    expect(known, "it was written with another manifest")
    tensors = {}
    end = begin
    for key, entry in header.items():
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        expect(isinstance(dtype, str) and dtype in ITEM_BYTES, f"{key} has the type {dtype}, which is unknown here")
        expect(isinstance(offsets, list) and len(offsets) == 2, f"the offsets of {key}")
        expect(all(is_count(n) for n in offsets) and offsets[0] <= offsets[1], f"the offsets of {key}")
        nbytes = math.prod(shape) * ITEM_BYTES[dtype] if is_shape(shape) else -1
        expect(nbytes == offsets[1] - offsets[0], f"the shape of {key}")
        tensors[key] = Stored(dtype, tuple(shape), begin + offsets[0], nbytes)
        end = max(end, begin + offsets[1])
    problem = f"it describes {end - begin} bytes of tensors, and there are {size - begin}"
    expect(end == size, f"{problem}: it was truncated or overwritten")
    return tensors


def with_checksums(tensors: Mapping[str, Stored], text: Any, begin: int) -> dict[str, Stored]:
    """The tensors with the checksums of their blocks, which `text` holds one behind the other; no byte is in none."""
    count = sum(num_blocks(tensor.nbytes) for tensor in tensors.values())
    digits = isinstance(text, str) and len(text) == 8 * count and set(text) <= set("0123456789abcdef")
    expect(digits, "its checksums")
    numbers: list[int] = np.frombuffer(bytes.fromhex(text), ">u4").tolist()
    found = {}
    block, end = 0, begin
    for key, tensor in tensors.items():
        expect(tensor.start == end, f"{key} is not behind the tensor before it")
        last = block + num_blocks(tensor.nbytes)
        found[key] = replace(tensor, checksums=numbers[block:last])
        block, end = last, end + tensor.nbytes
    return found


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
    """In which order the file holds its tensors, which are given as name -> (element type, shape); and its header.

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


place = threading.Lock()


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view`, or its beginning, from `offset` on; returns how many bytes there were. Any thread may call."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with place:  # Windows has no read that leaves the file's place alone
        os.lseek(descriptor, offset, os.SEEK_SET)
        found = os.read(descriptor, min(len(view), CHUNK_BYTES))
    view[: len(found)] = found
    return len(found)


# -------------------------------------------------------------------- element types
def round_to_bf16(single: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even."""
    bits = single.view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    # A NaN stays one: rounding could carry its bits into the sign, or drop all of them.
    return np.where(np.isnan(single), (bits >> 16) | 0x40, rounded).astype("<u2")


def convert(raw: Raw, source: str, target: str) -> Raw:
    """Bytes of one floating-point type to fp32, bf16 or fp16, rounding as torch does: through float32.

    Raises:
        OverflowError: A finite value is too large for the target.
    """
    if source == target:
        return raw
    values = (raw.view("<u2").astype("<u4") << 16).view("<f4") if source == "BF16" else raw.view(FLOATS[source])
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype("<f4", copy=False)
        result: npt.NDArray[Any] = single.astype("<f2") if target == "F16" else single
    infinite = np.isinf(result)
    if target == "BF16":
        result = round_to_bf16(single)
        infinite = (result & 0x7FFF) == 0x7F80
    if (infinite & np.isfinite(values)).any():
        raise OverflowError(f"it holds finite values too large for {FLOATS[target]}")
    return result.view(np.uint8)


# -------------------------------------------------------------------- the output
class Content:
    """The bytes of a safetensors file, from one of them on: its header, then tensors in the type to be written.

    What `read` filled is known to be right after `finish`.
    """

    def __init__(self, header: bytes, tensors: Sequence[Tensor], files: RankFiles, first: int) -> None:
        self._header = header
        self._files = files
        self._at = first
        self._tensors = iter(tensors)
        self._end = len(header)  # of what is being read
        self._tensor: Tensor | None = None
        self._bytes: TensorBytes | None = None
        self._enter()

    def read(self, view: memoryview) -> int:
        """Fill `view` with the next bytes; returns how many bytes of rank files they are of."""
        found = 0
        while view:
            now = view[: self._end - self._at]
            if self._tensor is None:
                now[:] = self._header[self._at : self._at + len(now)]
            else:
                found += self._read_tensor(now, self._tensor)
            self._at += len(now)
            view = view[len(now) :]
            if view:
                self._enter()
        return found

    def finish(self) -> None:
        if self._bytes is not None:
            self._bytes.finish()

    def _enter(self) -> None:
        """Go on to the tensor of the next byte."""
        while self._at >= self._end:
            self._tensor = next(self._tensors)
            self._end += self._tensor.nbytes
        if self._tensor is not None:
            left = (self._end - self._at) // ITEM_BYTES[self._tensor.written]
            self.finish()
            self._bytes = TensorBytes(self._files, self._tensor, self._tensor.numel - left)

    def _read_tensor(self, view: memoryview, tensor: Tensor) -> int:
        assert self._bytes is not None
        if tensor.stored == tensor.written:
            self._bytes.read(view)
            return len(view)
        numel = len(view) // ITEM_BYTES[tensor.written]
        step = READ_BYTES // ITEM_BYTES[tensor.stored]
        for start in range(0, numel, step):  # a conversion takes several times its bytes of memory
            raw = np.empty(min(step, numel - start) * ITEM_BYTES[tensor.stored], np.uint8)
            self._bytes.read(raw.data)
            try:
                done = convert(raw, tensor.stored, tensor.written)
            except OverflowError as error:
                raise ConsolidateError(f"cannot convert {tensor.name}: {error}; choose another dtype") from None
            place = start * ITEM_BYTES[tensor.written]
            view[place : place + len(done)] = done.data
        return numel * ITEM_BYTES[tensor.stored]


class Output:
    """A new file of a size that is known before, which threads write at once: past the page cache where that works.

    A write through the page cache copies every byte, and fsync then waits for the disk; direct ones run side by side.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._direct = -1
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
        with suppress(OSError):  # EINVAL where the file system has none
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT) if hasattr(os, "O_DIRECT") else -1
        if self._direct >= 0:
            try:
                os.posix_fallocate(self._descriptor, 0, size)  # else each write finds space for itself, and waits
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    self.close()
                    raise

    def write(self, buffer: memoryview, count: int, offset: int) -> None:
        """Write the first bytes of `buffer`, which begins and ends with a page."""
        done = 0
        whole = count + -count % mmap.PAGESIZE if offset + count == self._size else count  # direct ones are of pages
        if self._direct >= 0 and whole % mmap.PAGESIZE == 0:
            with suppress(OSError):  # whatever it is: the other way finds it again, or can do it
                done = os.pwrite(self._direct, buffer[:whole], offset)
        while done < count:
            done += write_at(self._descriptor, buffer[done:count], offset + done)

    def finish(self) -> None:
        os.truncate(self._descriptor, self._size)  # the last page was written whole
        os.fsync(self._descriptor)

    def close(self) -> None:
        for descriptor in (self._direct, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)


def write_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Write `view`, or its beginning, at `offset`; returns how many bytes. Any thread may call."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with place:  # as in `read_at`
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


def write_file(
    path: Path, tensors: Sequence[Tensor], files: RankFiles, tied: Mapping[str, str], advance: Advance
) -> None:
    """Write one safetensors file; the names of tied parameters go into its metadata, as safetensors.torch does.

    Threads take one long part of the file after the other. Where parts meet inside a block of a rank file, both read
    the block to compare its checksum: so a part is many times as long as the blocks of all ranks.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    entries = {tensor.name: (tensor.written, tensor.shape) for tensor in tensors}
    ordered, header = encode_header(entries, {**tied, "format": "pt"})
    size = len(header) + sum(tensor.nbytes for tensor in tensors)
    most = CHUNK_BYTES * max(16, 2 * files.count)
    turns = -(-size // (THREADS * most))
    part = CHUNK_BYTES * -(-size // (THREADS * turns * CHUNK_BYTES))  # all threads have as many, and end together
    stop = threading.Event()

    def write_part(first: int) -> None:
        buffer = transfer_memory(CHUNK_BYTES)
        try:
            with closing(files.twin()) as own:
                content = Content(header, [by_name[name] for name in ordered], own, first)
                for offset in range(first, min(first + part, size), CHUNK_BYTES):
                    if stop.is_set():
                        return
                    count = min(CHUNK_BYTES, size - offset)
                    read = content.read(buffer[:count])
                    output.write(buffer, count, offset)
                    advance(read)
                content.finish()
        except BaseException:
            stop.set()  # the others need not go on
            raise

    with closing(Output(path, size)) as output:
        with ThreadPoolExecutor(THREADS) as pool:
            try:
                for _ in pool.map(write_part, range(0, size, part)):
                    pass
            finally:
                stop.set()
        output.finish()


def write_folder(
    folder: Path, tensors: Sequence[Tensor], shard_bytes: int, write: Callable[[Path, Sequence[Tensor]], None]
) -> list[str]:
    """Make `folder`: model.safetensors, or numbered files of `shard_bytes` (or one tensor) each and their index."""
    folder.mkdir()
    by_name = {tensor.name: tensor for tensor in tensors}
    files = split_by_size({tensor.name: tensor.nbytes for tensor in tensors}, shard_bytes, "model{}.safetensors")
    for file, names in files.items():
        write(folder / file, [by_name[name] for name in names])
    totals = {"total_parameters": sum(t.numel for t in tensors), "total_size": sum(t.nbytes for t in tensors)}
    write_index(folder / "model.safetensors.index.json", files, totals)
    return list(files)


def split_by_size(sizes: Mapping[str, int], most: int, pattern: str) -> dict[str, list[str]]:
    """File -> its tensors, of which `sizes` has the bytes: in order, as many as fit into `most` bytes, at least one.

    The "{}" in `pattern` becomes the number of the file where there are several.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, nbytes in sizes.items():
        if groups[-1] and size + nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return {pattern.format(""): groups[0]}
    return {pattern.format(f"-{i:05d}-of-{len(groups):05d}"): group for i, group in enumerate(groups, start=1)}


def write_index(path: Path, files: Mapping[str, Sequence[str]], totals: Mapping[str, int]) -> None:
    """Write which of several files holds which tensor; nothing where there is one file."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        path.write_text(json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n")


def write_bin(
    out: Path, tensors: Sequence[Tensor], tied: Mapping[str, str], write: Callable[[Path, Sequence[Tensor]], None]
) -> None:
    """Write what torch.load reads, by way of a safetensors file beside it."""
    weights = out.with_name(f"{out.name}.weights")
    try:
        write(weights, tensors)
        save_bin(weights, out, tied)
    finally:
        weights.unlink(missing_ok=True)


def write_bins(
    folder: Path,
    tensors: Sequence[Tensor],
    tied: Mapping[str, str],
    shard_bytes: int,
    write: Callable[[Path, Sequence[Tensor]], None],
) -> list[str]:
    """As `write_folder`, pytorch_model.bin: every name is in the files, those of tied parameters too."""
    folder.mkdir()
    by_name = {tensor.name: tensor for tensor in tensors}
    files = split_by_size({tensor.name: tensor.nbytes for tensor in tensors}, shard_bytes, "pytorch_model{}.bin")
    listed = {}
    for file, names in files.items():
        aliases = {alias: name for alias, name in tied.items() if name in names}
        write_bin(folder / file, [by_name[name] for name in names], aliases, write)
        listed[file] = [*names, *aliases]
    write_index(folder / "pytorch_model.bin.index.json", listed, {"total_size": sum(t.nbytes for t in tensors)})
    return list(files)


def save_bin(weights: Path, out: Path, tied: Mapping[str, str]) -> None:
    """Rewrite a safetensors file as torch.save does. Its pages are mapped, so they are no memory of the process."""
    import torch

    with closing(SafetensorsFile(weights)) as file:
        header = file.header()
    raw = np.memmap(weights, np.uint8, mode="c")
    state = {}
    for name, stored in header.items():
        dtype = getattr(torch, TORCH_NAMES[stored.dtype])
        # torch.save takes tensors at one address for one: an empty one must not point to its neighbour.
        data = raw[stored.start : stored.start + stored.nbytes]
        flat = torch.from_numpy(data).view(dtype) if stored.nbytes else torch.empty(0, dtype=dtype)
        state[name] = flat.view(stored.shape)
    with out.open("xb") as saved:
        torch.save({**state, **{alias: state[name] for alias, name in tied.items()}}, saved)
        saved.flush()
        os.fsync(saved.fileno())


def read_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        config = parse_json(path.read_bytes())
        expect(isinstance(config, dict), "it is no JSON object")
    except ValueError as error:
        raise ConsolidateError(f"{path} is damaged: {error}. Put the model's own in its place") from error
    return dict(config)


def copy_model_files(folder: Path, target: Path, config: dict[str, Any] | None, written: set[str]) -> None:
    """Copy configuration and tokenizer. The dtype in the configuration becomes that of the weights: from_pretrained
    loads in the former, and would round fp32 weights to the dtype of training."""
    for path in (path for pattern in MODEL_FILES for path in folder.glob(pattern)):
        if not any(path.match(pattern) for pattern in NOT_MODEL_FILES):
            shutil.copyfile(path, target / path.name)
    if (folder / TEMPLATES).is_dir():
        shutil.copytree(folder / TEMPLATES, target / TEMPLATES)
    widest = next((FLOATS[code] for code in FLOATS if code in written), None)
    if config is not None and widest:
        nested = [value for key, value in config.items() if key.endswith("_config") and key != "quantization_config"]
        for block in (block for block in (config, *nested) if isinstance(block, dict)):
            block.update({key: widest for key in ("dtype", "torch_dtype") if block.get(key)})
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def published(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A path beside `out`: what is there takes the name `out` on a clean exit, and is deleted on any other.

    What processes of this host that were killed have left there is deleted, too. With `replace` there may be something
    at `out`, which is deleted once it is replaced.
    """
    delete_left(out.parent, f"{out.name}.partial-")
    temporary = out.with_name(f"{out.name}.partial-{owner()}")
    old = temporary.with_name(f"{temporary.name}.replaced")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if replace and out.exists():
            os.replace(out, old)
        os.replace(temporary, out)
    except OSError as error:
        if old.exists():
            os.replace(old, out)
        raise ConsolidateError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        delete(temporary)
        delete(old)


def delete(path: Path) -> None:
    """Delete a file or folder, if it is there and can be."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def owner() -> str:
    """For names of what is deleted at the end: which process has made it."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


def delete_left(folder: Path, start: str) -> None:
    """Delete what is in `folder` under names of `start` and an `owner` that has ended, on this host."""
    if os.name == "nt" or not folder.is_dir():  # there os.kill ends the process
        return
    for path in (path for path in folder.iterdir() if path.name.startswith(start)):
        match = re.match(r"(.+)-(\d+)-[0-9a-f]{6}(\.|$)", path.name.removeprefix(start))
        if match and match[1] == socket.gethostname():
            try:
                os.kill(int(match[2]), 0)
            except ProcessLookupError:
                delete(path)
            except (OSError, OverflowError):  # it is another user's
                continue


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end what stands inside by SystemExit, so that it cleans up. For the main thread."""

    def leave(number: int, frame: Any) -> None:
        for each in before:  # once: the end is under way
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) == signal.SIG_DFL}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def counter(progress: Callable[[int, int], None] | None, total: int) -> Advance:
    """Adds up what all threads have done."""
    done = 0
    lock = threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    return advance


def consolidate(
    folder: str | Path,
    out: str | Path | None = None,
    options: Options = DEFAULTS,
    progress: Callable[[int, int], None] | None = None,
    *,
    replace: bool = False,
) -> dict[str, Any]:
    """Write the weights of a checkpoint folder to `out`: a folder, or one file that ends in .safetensors or .bin.

    Returns a summary fit for JSON. `progress` is called with the bytes done, and all bytes. With `replace` there may
    be something at `out`, which is replaced when the new output is complete.

    Raises:
        ConsolidateError: The checkpoint is not complete, `out` is in use, the disk is full; nothing is left of `out`.
    """
    folder = Path(folder)
    out = folder / "consolidated" if out is None else Path(out)
    if not replace and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise ConsolidateError(f"{out} exists already: choose another place, or delete it first")
    check_torch(out, options)
    manifest = read_manifest(folder)
    config = read_config(folder) if out.suffix not in ONE_FILE else None
    tensors = renamed(plan_tensors(manifest, options), options.names or {})
    names = {tensor.name for tensor in tensors}
    tied = {alias: name for alias, name in manifest["tied"].items() if name in names}
    total = sum(tensor.numel * ITEM_BYTES[tensor.stored] for tensor in tensors)
    verified_before = options.verify and manifest["format_version"] == 1
    total += verified_before * sum(file["size"] for file in manifest["files"])
    advance = counter(progress, total)
    written = [out.name]
    with (
        closing(RankFiles(folder, manifest, WRITTEN_KINDS, verify=options.verify)) as files,
        published(out, replace=replace) as temporary,
    ):
        write = partial(write_file, files=files, tied=tied, advance=advance)
        if verified_before:
            files.verify(range(len(manifest["files"])), advance)
        if out.suffix == ".safetensors":
            write(temporary, tensors)
        elif out.suffix == ".bin":
            write_bin(temporary, tensors, tied, write)
        elif options.bins:
            written = write_bins(temporary, tensors, tied, options.shard_bytes, write)
        else:
            written = write_folder(temporary, tensors, options.shard_bytes, write)
            copy_model_files(folder, temporary, config, {tensor.written for tensor in tensors})
    return {
        "out": str(out),
        "files": written,
        "tensors": len(tensors),
        "elements": sum(tensor.numel for tensor in tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "dtypes": sorted({TORCH_NAMES[tensor.written] for tensor in tensors}),
    }


def check_torch(out: Path, options: Options) -> None:
    if not options.bins and out.suffix != ".bin":
        return
    with suppress(ValueError):  # it is hidden
        if importlib.util.find_spec("torch") is not None:
            return
    remedy = "add --safe_serialization" if options.bins else "choose a name that ends in .safetensors"
    raise ConsolidateError(f"{out} needs torch, which is not installed: {remedy}")


def consolidate_into(
    folder: Path, out: Path, options: Options, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """As `consolidate`; but to a folder that holds other files the new ones are added, and none is replaced."""
    if out.suffix in ONE_FILE or not out.is_dir() or not any(out.iterdir()):
        return consolidate(folder, out, options, progress)
    patterns = ("pytorch_model*.bin*",) if options.bins else ("model.safetensors*", "model-*-of-*.safetensors")
    there = sorted(path.name for pattern in patterns for path in out.glob(pattern))
    if there:
        raise ConsolidateError(f"{out / there[0]} exists already: choose another place, or delete it first")
    delete_left(out, ".weights-")
    beside = out / f".weights-{owner()}"
    try:
        summary = consolidate(folder, beside, options, progress)
        for path in beside.iterdir():
            if not (out / path.name).exists():
                os.rename(path, out / path.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return summary | {"out": str(out)}


# -------------------------------------------------------------------- command line
def parse_bytes(text: str) -> int:
    """Bytes of a size such as "5GB", "500MB", "2GiB", or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    size = 0
    if match:
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MB or 2GiB")
    return size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", type=Path, help="checkpoint folder: the one with zero/manifest.json in it")
    add("out", metavar="OUT", type=Path, nargs="?", help="folder, or file in .safetensors or .bin [CKPT/consolidated]")
    add("--dtype", choices=DTYPES, help="write parameters in this type [as stored: fp32 for trained ones]")
    add("--shard-size", metavar="SIZE", type=parse_bytes, help="most in a file [5GB]")
    add("--only-trainable", action="store_true", help="leave frozen parameters out")
    add("--tag", metavar="T", help="the checkpoint is CKPT/T")
    add("--names", metavar="FILE", type=Path, help="JSON: name in the checkpoint -> name to write")
    add("--no-verify", action="store_true", help="do not compare the checksums")


def options_of(args: argparse.Namespace) -> Options:
    if args.shard_size and args.out and args.out.suffix in ONE_FILE:
        raise argparse.ArgumentError(None, f"--shard-size is for a folder, and {args.out} is one file")
    names = None if args.names is None else read_names(args.names)
    most = args.shard_size or DEFAULTS.shard_bytes
    return Options(args.dtype, most, args.only_trainable, not args.no_verify, names=names)


def add_deepspeeds_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT_DIR", type=Path, help="folder with the file `latest`, or with a checkpoint")
    add("out", metavar="OUTPUT_DIR", type=Path, help="folder for the weights, or file in .bin or .safetensors")
    add("--max_shard_size", metavar="SIZE", type=parse_bytes, default="5GB", help="most in a file [5GB]")
    add("--safe_serialization", action="store_true", help="model.safetensors instead of pytorch_model.bin")
    add("-t", "--tag", metavar="T", help="the checkpoint is CHECKPOINT_DIR/T [what `latest` names]")
    add("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    add("-d", "--debug", action="store_true", help="show where an error is raised")


def deepspeeds_options(args: argparse.Namespace) -> Options:
    bins = not args.safe_serialization and args.out.suffix not in ONE_FILE
    return Options("fp32", args.max_shard_size, args.exclude_frozen_parameters, bins=bins)


def progress_bar(title: str) -> Callable[[int, int], None]:
    """Draws on stderr if that is a terminal, once the work has taken two seconds. Leaves an empty line behind."""
    started = drawn = time.monotonic()

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if sys.stderr.isatty() and now - started > 2 and (now - drawn > 0.1 or done == total):
            drawn = now
            bar = f"{title} [{'#' * (30 * done // total):<30}] {done / 1e9:.2f} of {total / 1e9:.2f} GB"
            sys.stderr.write(CLEAR_LINE if done == total else f"\r{bar}")
            sys.stderr.flush()

    return draw


def meant(folder: Path, tag: str | None) -> Path:
    """Without a tag the checkpoint that `latest` names, if there is such a file."""
    latest = folder / "latest"
    return folder / (tag or (latest.read_text(errors="replace").strip() if latest.is_file() else ""))


def main() -> int:
    as_deepspeed = Path(sys.argv[0]).name == DEEPSPEEDS_NAME
    parser = argparse.ArgumentParser(description="Write a sharded checkpoint of hf_zero as Hugging Face weights.")
    (add_deepspeeds_arguments if as_deepspeed else add_arguments)(parser)
    args = argparse.Namespace()
    try:
        args = parser.parse_intermixed_args()
        options, write = (
            (deepspeeds_options(args), consolidate_into) if as_deepspeed else (options_of(args), consolidate)
        )
        with signals_raise():
            summary = write(meant(args.checkpoint, args.tag), args.out, options, progress_bar("consolidating"))
    except argparse.ArgumentError as error:
        parser.error(str(error))
    except (ConsolidateError, OSError) as error:
        if getattr(args, "debug", False):
            raise
        sys.stderr.write(f"{CLEAR_LINE if sys.stderr.isatty() else ''}error: {error}\n")
        return 1
    sys.stdout.write(f"{summary['tensors']} tensors, {summary['bytes'] / 1e9:.2f} GB, in {summary['out']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
