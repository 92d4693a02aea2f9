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
from hf_zero.checkpoint.consolidate import ONE_FILE, Options, consolidate_into, parse_bytes
from hf_zero.checkpoint.folders import chosen
from hf_zero.checkpoint.format import ConsolidateError
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
        bins = not safe_serialization and out.suffix not in ONE_FILE
        consolidate_into(folder, out, Options("fp32", most, exclude_frozen_parameters, bins=bins))
    except (ConsolidateError, OSError) as error:
        raise CheckpointError(str(error)) from error
