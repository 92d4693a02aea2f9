"""Turns a sharded checkpoint of hf_zero into Hugging Face weights: `python consolidate.py --help`.

Under the name zero_to_fp32.py it answers to DeepSpeed's way of calling: `python zero_to_fp32.py CHECKPOINT_DIR OUT`.

It needs numpy and the standard library only. A copy of it, in one file with what it imports of hf_zero (see
stand_alone.py), lies in every checkpoint folder and has to work there years later, without hf_zero and without torch.

Several threads stream tensors in pieces of 1 MB from the files to the output, so memory does not depend on the model.
OUT appears by one rename when it is complete, or not at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import math
import os
import queue
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_zero.checkpoint.format import (
    BUFFER_KIND,
    CODES,
    FLOATS,
    ITEM_BYTES,
    STATE_MARK,
    TORCH_NAMES,
    WEIGHT_KINDS,
    ConsolidateError,
    Manifest,
    Segment,
    encode_header,
    expect,
    is_name,
    load_manifest,
    parse_json,
    segments,
)
from hf_zero.checkpoint.rank_reader import CHUNK_BYTES, READ_BYTES, Advance, RankFiles, RankTensor, SafetensorsFile

WRITTEN_KINDS = (*WEIGHT_KINDS, BUFFER_KIND)  # what of a checkpoint is written
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
THREADS = 4  # each has a piece in memory, and a part of the output to write
CLEAR_LINE = "\r\x1b[K"  # of a terminal that shows a progress bar

# A Hugging Face folder holds these beside the weights: configuration, tokenizer, chat templates, code of its own.
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
    segments: Callable[[int, int], list[Segment]]  # of the elements between two

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.written]


# -------------------------------------------------------------------- what to write
def plan_tensors(manifest: Manifest, options: Options) -> list[Tensor]:
    """Return the tensors to write, in the order of state_dict: parameters, then persistent buffers."""
    units = {slot.name: unit for unit in manifest.layouts for slot in unit.slots}
    tensors = []
    for info in manifest.params:
        name = info.name
        if units[name].trainable or not options.only_trainable:
            kinds = manifest.kinds.get(name, {})  # empty for a parameter of no elements
            kind = next((kind for kind in WEIGHT_KINDS if kind in kinds), "")
            if name in (manifest.frozen_digests or {}):
                raise ConsolidateError(f"frozen parameters were not saved ({name}): take --only-trainable")
            stored = CODES[kinds.get(kind, info.dtype)]
            if options.dtype and stored.startswith("F8"):
                raise ConsolidateError(f"cannot convert {name}, which is {TORCH_NAMES[stored]}: leave the dtype out")
            written = DTYPES[options.dtype] if options.dtype and stored in FLOATS else stored
            places = partial(segments, units[name], name)
            tensors.append(Tensor(name, f"{name}::{kind}", info.shape, stored, written, places))
    if not tensors:
        raise ConsolidateError(f"no {'trainable ' if options.only_trainable else ''}parameters are in the checkpoint")
    for info in manifest.buffers:
        stored, key = CODES[info.dtype], f"{info.name}::{BUFFER_KIND}"
        if STATE_MARK not in info.name:  # which is optimizer state
            tensors.append(Tensor(info.name, key, info.shape, stored, stored, buffer_segments))
    return tensors


def buffer_segments(start: int, end: int) -> list[Segment]:
    """Locate elements of a buffer, which is whole in the first file."""
    return [(0, start, end - start)]


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
    if not isinstance(names, dict) or not all(map(is_name, names.values())):
        raise ConsolidateError(f'--names: {path} is no map of names, as in {{"0.weight": "model.embed.weight"}}')
    return {str(name): str(other) for name, other in names.items()}


# -------------------------------------------------------------------- element types
def round_to_bf16(single: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even."""
    bits = single.view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    # A NaN stays one: rounding could carry its bits into the sign, or drop all of them.
    return np.where(np.isnan(single), (bits >> 16) | 0x40, rounded).astype("<u2")


def convert(raw: Raw, source: str, target: str) -> Raw:
    """Convert bytes of a floating-point type to fp32, bf16 or fp16, rounding as torch does: through float32.

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
def write_file(
    path: Path, tensors: Sequence[Tensor], files: RankFiles, tied: Mapping[str, str], advance: Advance
) -> None:
    """Write one safetensors file; the names of tied parameters go into its metadata, as safetensors.torch does.

    Threads take one part of a tensor after the other. Where parts meet inside a block of a rank file, both read the
    block to compare its checksum: so a part is many times as long as the blocks of all ranks.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    entries = {tensor.name: (tensor.written, tensor.shape) for tensor in tensors}
    ordered, header = encode_header(entries, {**tied, "format": "pt"})
    most = CHUNK_BYTES * max(16, 2 * files.count)
    parts: queue.SimpleQueue[tuple[Tensor, int, int, int]] = queue.SimpleQueue()
    end = len(header)
    for tensor in (by_name[name] for name in ordered):
        step = most // ITEM_BYTES[tensor.written]
        for first in range(0, tensor.numel, step):
            offset = end + first * ITEM_BYTES[tensor.written]
            parts.put((tensor, first, min(first + step, tensor.numel), offset))
        end += tensor.nbytes
    stop = threading.Event()

    def write_parts() -> None:
        with path.open("r+b", buffering=0) as file, suppress(queue.Empty):
            while not stop.is_set():
                try:
                    write_part(files, file, *parts.get_nowait(), advance)
                except BaseException:
                    stop.set()  # the others need not go on
                    raise

    with path.open("xb") as output:
        output.write(header)
        output.truncate(end)
        output.flush()
        with ThreadPoolExecutor(THREADS) as pool:
            try:
                for done in [pool.submit(write_parts) for _ in range(THREADS)]:
                    done.result()
            finally:
                stop.set()
        os.fsync(output.fileno())


def write_part(
    files: RankFiles, file: io.FileIO, tensor: Tensor, first: int, last: int, offset: int, advance: Advance
) -> None:
    """Write the elements [first, last) of a tensor from byte `offset` of the file on."""
    file.seek(offset)
    item = ITEM_BYTES[tensor.stored]
    step = READ_BYTES // item
    parts: dict[int, RankTensor] = {}
    for rank, start, numel in tensor.segments(first, last):
        part = parts[rank] = parts.get(rank) or files.tensor(rank, tensor.key)
        for at in range(start, start + numel, step):
            raw = np.empty(min(step, start + numel - at) * item, np.uint8)
            part.read(raw.data, at * item)
            try:
                left = convert(raw, tensor.stored, tensor.written).data
            except OverflowError as error:
                raise ConsolidateError(f"cannot convert {tensor.name}: {error}; choose another dtype") from None
            while left:
                left = left[file.write(left) :]
            advance(len(raw))
    for part in parts.values():
        part.finish()


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
    """Make `folder` as `write_folder` does, of pytorch_model.bin: names of tied parameters are in the files, too."""
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
    """Return a name for this process, of which names of temporary files are made."""
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
    be an earlier output at `out`, which is replaced when the new one is complete.

    Raises:
        ConsolidateError: The checkpoint is not complete, `out` is in use or holds other files, the disk is full.
            Nothing new is left at `out`.
    """
    folder = Path(folder)
    out = folder / "consolidated" if out is None else Path(out)
    if replace:
        _check_replaceable(out, folder)
    elif out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConsolidateError(f"{out} exists already: choose another place, or replace it with --force")
    check_torch(out, options)
    manifest = load_manifest(folder)
    config = read_config(folder) if out.suffix not in ONE_FILE else None
    tensors = renamed(plan_tensors(manifest, options), options.names or {})
    names = {tensor.name for tensor in tensors}
    tied = {alias: name for alias, name in manifest.tied.items() if name in names}
    total = sum(tensor.numel * ITEM_BYTES[tensor.stored] for tensor in tensors)
    verified_before = options.verify and not manifest.has_blocks
    total += verified_before * manifest.nbytes
    advance = counter(progress, total)
    written = [out.name]
    with (
        closing(RankFiles(folder, manifest, WRITTEN_KINDS, verify=options.verify)) as files,
        published(out, replace=replace) as temporary,
    ):
        write = partial(write_file, files=files, tied=tied, advance=advance)
        if verified_before:
            files.verify(range(files.count), advance)
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


def _check_replaceable(out: Path, folder: Path) -> None:
    if not out.is_dir():
        return
    if folder.resolve().is_relative_to(out.resolve()):
        raise ConsolidateError(f"{out} holds the checkpoint itself: choose another place")
    known = (*MODEL_FILES, "*.safetensors", TEMPLATES)
    foreign = sorted(path.name for path in out.iterdir() if not any(path.match(pattern) for pattern in known))
    if foreign:
        raise ConsolidateError(f"{out} is not only a model, it also holds {', '.join(foreign)}: choose another place")


def consolidate_into(
    folder: Path, out: Path, options: Options, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Call `consolidate`; but to a folder that holds other files the new ones are added, and none is replaced."""
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
    """Read a size in bytes, such as "5GB", "500MB", "2GiB", or a plain number."""
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
    add("--force", action="store_true", help="replace OUT if it holds an earlier output")


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
    """Return the checkpoint's folder: without a tag the one that `latest` names, if there is such a file."""
    latest = folder / "latest"
    return folder / (tag or (latest.read_text(errors="replace").strip() if latest.is_file() else ""))


def main() -> int:
    as_deepspeed = Path(sys.argv[0]).name == DEEPSPEEDS_NAME
    parser = argparse.ArgumentParser(description="Write a sharded checkpoint of hf_zero as Hugging Face weights.")
    (add_deepspeeds_arguments if as_deepspeed else add_arguments)(parser)
    args = argparse.Namespace()
    try:
        args = parser.parse_intermixed_args()
        with signals_raise():
            folder, progress = meant(args.checkpoint, args.tag), progress_bar("consolidating")
            if as_deepspeed:
                summary = consolidate_into(folder, args.out, deepspeeds_options(args), progress)
            else:
                summary = consolidate(folder, args.out, options_of(args), progress, replace=args.force)
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
