"""DeepSpeed's functions that take fp32 weights out of a checkpoint, under its import path and with its signatures.

`from deepspeed.utils.zero_to_fp32 import ...` becomes `from hf_zero.utils.zero_to_fp32 import ...`. They read
checkpoints of hf_zero; folder and tag are those of `hf_zero.load_fp32_state_dict`. No process group is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch

from hf_zero.access.load_fp32 import ModelT, load_fp32_into
from hf_zero.checkpoint.consolidate import (
    ONE_FILE,
    ConsolidateError,
    Options,
    consolidate,
    parse_bytes,
    split_by_size,
    write_index,
)
from hf_zero.checkpoint.latest import chosen
from hf_zero.checkpoint.lazy_state_dict import load_fp32_state_dict
from hf_zero.errors import CheckpointError, ConfigError


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> Mapping[str, torch.Tensor]:
    """All weights in fp32 on the CPU, as a dict; with `lazy_mode` each tensor is read when it is asked for.

    Raises CheckpointError as `hf_zero.load_fp32_state_dict` does.
    """
    state = load_fp32_state_dict(checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters)
    if lazy_mode:
        return state
    with state:
        return dict(state)


def load_state_dict_from_zero_checkpoint(model: ModelT, checkpoint_dir: str | Path, tag: str | None = None) -> ModelT:
    """Load the fp32 weights into `model`, cast to its own types and put on its devices; returns the model.

    Names on one side only are left out, with a warning. A model that hf_zero manages goes on being managed; all ranks
    must call for it, and its masters start from these values. See `hf_zero.load_fp32_into`.
    """
    return load_fp32_into(model, checkpoint_dir, tag, strict=False)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights to `output_dir`: pytorch_model.bin, or model.safetensors with `safe_serialization`.

    More than `max_shard_size` goes into several files and an index. An `output_dir` that ends in .bin or .safetensors
    is one file, as it was for older releases of DeepSpeed. Call on one rank.

    Raises:
        ConfigError: `max_shard_size` is no size.
        CheckpointError: The checkpoint is not complete, or the output cannot be written.
    """
    folder, out = chosen(checkpoint_dir, tag), Path(output_dir)
    try:
        most = parse_bytes(max_shard_size) if max_shard_size else 1 << 62
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"max_shard_size={error}") from error
    try:
        if safe_serialization or out.suffix in ONE_FILE:
            consolidate(folder, out, Options("fp32", most, exclude_frozen_parameters))
            return
        out.mkdir(parents=True, exist_ok=True)
        with load_fp32_state_dict(folder, exclude_frozen_parameters=exclude_frozen_parameters) as state:
            _write_bins(state, out, most)
    except (ConsolidateError, OSError) as error:
        raise CheckpointError(str(error)) from error


def _write_bins(state: Mapping[str, torch.Tensor], out: Path, most: int) -> None:
    """pytorch_model.bin, or numbered files and their index. Holds one file's tensors at a time."""
    sizes = {name: tensor.nbytes for name, tensor in state.items()}
    files = split_by_size(sizes, most, "pytorch_model{}.bin")
    for file, names in files.items():
        torch.save({name: state[name] for name in names}, out / file)
    write_index(out / "pytorch_model.bin.index.json", files, {"total_size": sum(sizes.values())})
