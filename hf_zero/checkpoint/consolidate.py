"""Turns a sharded checkpoint of hf_zero into Hugging Face weights: `python consolidate.py --help`.

Stand-alone, numpy and the standard library only: a copy of this very file lies in every checkpoint folder and has to
work there years later, without hf_zero and without torch. That is why it repeats the few lines that read a manifest
and the arithmetic of hf_zero/layout.py; a test proves them equal.

Tensors are streamed in chunks of a few MB from preads to the output and never held whole, so memory does not depend
on the model. OUT appears by one rename when it is complete, or not at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FORMAT_VERSION = 1
WEIGHT_KINDS = ("master", "param")  # of a trainable parameter the master is stored, of a frozen one the parameter
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
TORCH_NAMES = {**FLOATS, "C64": "complex64", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
TORCH_NAMES |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
TORCH_NAMES |= {f"{k}{bits}": f"{t}{bits}" for k, t in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)}
CODES = {name: code for code, name in TORCH_NAMES.items()}
ITEM_BYTES = {code: int((re.findall(r"\d+", code) or ["8"])[0]) // 8 for code in TORCH_NAMES}
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
CHUNK_BYTES = 4 << 20
MAX_OPEN_FILES = 256  # a process may open 1024 by default, and there may be more ranks than that

# What a Hugging Face folder holds beside the weights: configuration, tokenizer, chat template, code of its own.
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "*.bpe", "*.py")
NOT_MODEL_FILES = ("*.index.json", "trainer_state.json", "*_results.json", "consolidate.py")
TEMPLATE_FOLDER = "additional_chat_templates"

Raw = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]  # called with the bytes done so far, and all bytes


class ConsolidateError(RuntimeError):
    """The checkpoint is not whole, or the output cannot be written; the message names the file."""


@dataclass(frozen=True)
class Options:
    dtype: str | None = None  # "fp32", "bf16", "fp16"; None writes every tensor in its stored type
    shard_bytes: int = 5 * 10**9
    only_trainable: bool = False  # leaves frozen parameters out; buffers stay
    verify: bool = True  # compare the checksums first


DEFAULTS = Options()


@dataclass(frozen=True)
class Result:
    out: str
    tensors: int
    elements: int
    bytes: int
    dtypes: list[str]
    files: list[str] = field(default_factory=list)  # with weights


class Segment(NamedTuple):
    """Elements of one parameter that lie without a gap in one rank's file."""

    rank: int
    start: int  # elements from the start of that rank's run of the parameter
    numel: int


@dataclass(frozen=True)
class Tensor:
    name: str
    key: str  # in the rank files
    shape: tuple[int, ...]
    stored: str  # element type, as safetensors names it
    written: str
    segments: list[Segment]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.written]


# -------------------------------------------------------------------- the checkpoint
def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "zero" / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        crc32, version = manifest.pop("crc32"), manifest["format_version"]
    except (FileNotFoundError, NotADirectoryError):
        found = [*folder.glob("*/zero/manifest.json")] or [*folder.resolve().parent.glob("*/zero/manifest.json")]
        hint = ", ".join(sorted(str(other.parent.parent) for other in found))
        hint = f". There are checkpoints in {hint}" if hint else ""
        raise ConsolidateError(f"{folder} holds no complete checkpoint: {path} is missing{hint}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConsolidateError(f"{path} is damaged: {error!r}") from error
    if version > FORMAT_VERSION:
        needed = f"the consolidate.py in {folder}, or hf_zero {manifest.get('hf_zero_version')} or later"
        raise ConsolidateError(f"{path} has format {version}, this script reads up to {FORMAT_VERSION}: use {needed}")
    if crc32 != zlib.crc32(json.dumps(manifest, sort_keys=True).encode("ascii")):
        raise ConsolidateError(f"{path} is damaged: its checksum is wrong")
    return manifest


def segments(unit: Mapping[str, Any], offset: int, numel: int) -> list[Segment]:
    """Where the elements at [offset, offset + numel) of a unit's flat buffer lie, in order.

    The flat buffer is cut into buckets, and rank r owns the r-th of `world_size` equal parts of each. What a rank owns
    of one parameter is one contiguous run in its file, so a cursor per rank gives the place in it.
    """
    found: list[Segment] = []
    used = [0] * unit["world_size"]
    position, end = offset, offset + numel
    while position < end:
        bucket_start = position - position % unit["bucket_numel"]
        part = min(unit["bucket_numel"], unit["padded_numel"] - bucket_start) // unit["world_size"]
        rank, inside = divmod(position - bucket_start, part)
        count = min(part - inside, end - position)
        found.append(Segment(rank, used[rank], count))
        used[rank] += count
        position += count
    return found


def plan_tensors(manifest: Mapping[str, Any], options: Options) -> list[Tensor]:
    """What to write, in the order of state_dict: parameters, then persistent buffers."""
    slots = {slot[0]: (unit, slot[2]) for unit in manifest["layouts"] for slot in unit["slots"]}
    tensors = []

    def add(info: Mapping[str, Any], kind: str, stored: str, where: list[Segment]) -> None:
        if options.dtype and stored.startswith("F8"):
            raise ConsolidateError(f"cannot convert {info['name']}, which is {TORCH_NAMES[stored]}: leave the dtype out")
        written = DTYPES[options.dtype] if options.dtype and stored in FLOATS else stored
        tensors.append(Tensor(info["name"], f"{info['name']}::{kind}", tuple(info["shape"]), stored, written, where))

    for info in manifest["params"]:
        unit, offset = slots[info["name"]]
        if unit["trainable"] or not options.only_trainable:
            kinds = manifest["kinds"].get(info["name"], {})  # empty for a parameter of no elements
            kind = next((kind for kind in WEIGHT_KINDS if kind in kinds), "")
            where = segments(unit, offset, math.prod(info["shape"]))
            add(info, kind, CODES[kinds.get(kind, info["dtype"])], where)
    if not tensors:
        raise ConsolidateError(f"no {'trainable ' if options.only_trainable else ''}parameters are in the checkpoint")
    for info in manifest["buffers"]:
        add(info, "buffer", CODES[info["dtype"]], [Segment(0, 0, math.prod(info["shape"]))])
    return tensors


class RankFiles:
    """The rank files of one checkpoint, opened at need; reads ranges of bytes into buffers."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._paths = [folder / "zero" / file["name"] for file in manifest["files"]]
        self._files: list[dict[str, Any]] = manifest["files"]
        self._open: dict[int, int] = {}  # rank -> descriptor
        self._starts: dict[int, dict[str, int]] = {}  # rank -> key -> bytes from the start of the file
        sizes = [path.stat().st_size if path.exists() else None for path in self._paths]
        wrong = [(p, size, f["size"]) for p, size, f in zip(self._paths, sizes, self._files) if size != f["size"]]
        if wrong:
            texts = [f"{p} is missing" if n is None else f"{p} has {n} bytes instead of {m}" for p, n, m in wrong]
            raise ConsolidateError(f"the checkpoint is not whole: {'; '.join(texts)}")

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def verify(self, advance: Callable[[int], None]) -> None:
        damaged = []
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for rank, file in enumerate(self._files):
            crc = 0
            for offset in range(0, file["size"], CHUNK_BYTES):
                view = buffer[: file["size"] - offset]
                self._pread(rank, view, offset)
                crc = zlib.crc32(view, crc)
                advance(len(view))
            if crc != file["crc32"]:
                damaged.append(str(self._paths[rank]))
        if damaged:
            raise ConsolidateError(f"wrong checksum, the content has changed: {', '.join(damaged)}")

    def chunks(self, tensor: Tensor) -> Iterator[Raw]:
        """The stored bytes of a tensor in order; a chunk is valid until the next one is asked for."""
        item = ITEM_BYTES[tensor.stored]
        buffer = memoryview(bytearray(min(CHUNK_BYTES, math.prod(tensor.shape) * item)))
        filled = 0
        for rank, start, numel in tensor.segments:
            offset, left = start * item, numel * item
            while left:
                view = buffer[filled : filled + left]
                self._pread(rank, view, self._start(rank, tensor.key) + offset)
                offset, left, filled = offset + len(view), left - len(view), filled + len(view)
                if filled == len(buffer):
                    yield np.frombuffer(buffer, np.uint8)
                    filled = 0
        if filled:
            yield np.frombuffer(buffer[:filled], np.uint8)

    def _pread(self, rank: int, view: memoryview, offset: int) -> None:
        try:
            if rank not in self._open:
                if len(self._open) >= MAX_OPEN_FILES:
                    self.close()
                self._open[rank] = os.open(self._paths[rank], os.O_RDONLY)
            while view:
                count = os.preadv(self._open[rank], [view], offset)
                if count == 0:
                    raise ConsolidateError(f"{self._paths[rank]} is damaged: it ends too early")
                view, offset = view[count:], offset + count
        except OSError as error:
            raise ConsolidateError(f"cannot read {self._paths[rank]}: {error.strerror}") from error

    def _start(self, rank: int, key: str) -> int:
        try:
            if rank not in self._starts:
                length = bytearray(8)
                self._pread(rank, memoryview(length), 0)
                text = bytearray(min(int.from_bytes(length, "little"), self._files[rank]["size"]))
                self._pread(rank, memoryview(text), 8)
                entries = json.loads(text)
                entries.pop("__metadata__", None)
                self._starts[rank] = {name: 8 + len(text) + e["data_offsets"][0] for name, e in entries.items()}
            return self._starts[rank][key]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConsolidateError(f"{self._paths[rank]} is damaged: {error!r}") from error


# -------------------------------------------------------------------- the output
def convert(raw: Raw, source: str, target: str) -> Raw:
    """Bytes of one floating-point type to another, rounding as torch does: to float32 first, then to nearest even.

    Raises:
        OverflowError: A finite value is too large for the target type.
    """
    if source == target:
        return raw
    values = (raw.view("<u2").astype("<u4") << 16).view("<f4") if source == "BF16" else raw.view(FLOATS[source])
    with np.errstate(over="ignore", invalid="ignore"):
        result: npt.NDArray[Any] = values.astype("<f2" if target == "F16" and source != "F64" else "<f4", copy=False)
        ...
