"""Weights of a Hugging Face folder as a checkpoint of hf_zero; the optimizer starts anew. Back: `hf-zero consolidate`.

One tensor is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_zero.checkpoint.format import parse_json
from hf_zero.checkpoint.writer import Chunked
from hf_zero.conversion.dcp import STATISTICS
from hf_zero.conversion.target import NOTHING_KNOWN, ConvertedParam, write_checkpoint
from hf_zero.errors import CheckpointError

_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"


def from_hf(src: str | Path, dst: str | Path, buffers: Sequence[str] = ()) -> int:
    """Write the weights in `src` as the checkpoint `dst`, which appears complete or not at all.

    safetensors does not tell buffers from parameters. Integers and statistics of batch norms are taken for buffers;
    where that is wrong for a model, loading says so.

    Args:
        src: A folder with model.safetensors or its parts and their index, or one such file.
        buffers: Names of further persistent buffers.
    Returns:
        The number of parameters.
    Raises:
        CheckpointError: There is no such file, or one is missing or damaged; `dst` exists.
    """
    files = _files(Path(src))
    with ExitStack() as stack:
        tensors = _opened(files, stack)
        unknown = [name for name in buffers if name not in tensors]
        if unknown:
            raise CheckpointError(
                f"{src} holds no {', '.join(unknown)}: name buffers as the model's state_dict() does."
            )
        params, kept = [], {}
        for name, opened in tensors.items():
            dtype, shape = _kind(opened, name)
            if name in buffers or not dtype.is_floating_point or name.rpartition(".")[2] in STATISTICS:
                kept[name] = opened.get_tensor(name)
            elif dtype.itemsize < 2:
                raise CheckpointError(f"{src}: {name} has type {dtype}: quantized weights cannot be converted.")
            else:
                params.append(_param(opened, name, dtype, shape))
        tied = {alias: name for opened in tensors.values() for alias, name in _aliases(opened) if name in tensors}
        names = {one.name for one in params}
        run = replace(
            NOTHING_KNOWN,
            tied={alias: name for alias, name in tied.items() if alias not in tensors and name in names},
            converted_from="Hugging Face",
        )
        write_checkpoint(Path(dst), params, kept, run)
    return len(params)


def _files(src: Path) -> list[Path]:
    if src.is_file():
        return [src]
    index = src / _INDEX
    if not index.is_file():
        if (src / _ONE).is_file():
            return [src / _ONE]
        raise CheckpointError(f"{src} holds neither {_ONE} nor {_INDEX}: name the folder of save_pretrained.")
    try:
        names = sorted({*parse_json(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {index}: it is not as save_pretrained writes it") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{index} names files that are not beside it. Copy the folder again.")
    return [src / name for name in names]


def _opened(files: Sequence[Path], stack: ExitStack) -> dict[str, Any]:
    """Tensor -> the open file that holds it."""
    tensors: dict[str, Any] = {}
    for path in files:
        try:
            opened = stack.enter_context(safe_open(path, "pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}. Copy the file again.") from error
        twice = tensors.keys() & opened.keys()
        if twice:
            raise CheckpointError(f"{path} holds {min(twice)}, and so does another file: these are of two saves.")
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors


def _kind(opened: Any, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    found = opened.get_slice(name)
    shape = tuple(found.get_shape())
    empty = found[:0] if shape else opened.get_tensor(name)  # its type without its data
    return empty.dtype, shape


def _aliases(opened: Any) -> Iterator[tuple[str, str]]:
    """Yield names of tied weights, as safetensors.torch.save_model notes them."""
    yield from ((key, value) for key, value in (opened.metadata() or {}).items() if key != "format")


def _param(opened: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> ConvertedParam:
    def chunks() -> Iterator[torch.Tensor]:
        yield opened.get_tensor(name).reshape(-1).float()

    numel = math.prod(shape)
    return ConvertedParam(name, shape, dtype, True, {"master": Chunked(numel, torch.float32, chunks)} if numel else {})
