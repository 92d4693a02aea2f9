"""Writes converted parameters, optimizer states and buffers as a checkpoint folder of hf_zero, through its own writer.

There is one rank file, whatever wrote the source: hf_zero loads a checkpoint at any world size and stage.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from hf_zero.checkpoint.format import SaveInfo, TensorInfo
from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.checkpoint.stand_alone import scripts
from hf_zero.checkpoint.writer import (
    Chunked,
    Scalar,
    SliceState,
    build_manifest,
    check_info,
    commit,
    dtype_name,
    prepare_folder,
    write_rank_file,
)
from hf_zero.errors import CheckpointError
from hf_zero.layout import UnitLayout


@dataclass(frozen=True)
class ConvertedParam:
    """A parameter, and what the optimizer holds of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in the model
    trainable: bool
    tensors: Mapping[str, Chunked]  # "master" or "param", "exp_avg", ...
    scalars: Mapping[str, Scalar] = field(default_factory=dict)


# Conversions replace the fields of this that they know of a run.
NOTHING_KNOWN = SaveInfo(world_size=1, stage=0, layouts=(), params=())


def write_checkpoint(
    target: Path,
    params: Sequence[ConvertedParam],
    buffers: Mapping[str, torch.Tensor],
    run: SaveInfo,
    *,
    beside: Sequence[Path] = (),
) -> None:
    """Write the folder `target`, which appears complete or not at all.

    Args:
        run: What is known of the run; layouts and params are filled in.
        beside: Files that are copied into it as they are.
    Raises:
        CheckpointError: `target` exists, or the operating system refused.
    """
    layouts = tuple(_layouts(params))
    infos = tuple(TensorInfo(one.name, one.shape, dtype_name(one.dtype)) for one in params)
    info = replace(run, layouts=layouts, params=infos)
    check_info(info)
    by_name = {one.name: one for one in params}
    slices = [slice_ for layout in layouts for slice_ in layout.slices(0)]
    states = [SliceState(slice_, by_name[slice_.name].tensors, by_name[slice_.name].scalars) for slice_ in slices]
    with new_folder(target) as folder:
        save_id = prepare_folder(folder)
        bar = f"Writing {target.name}"
        record = write_rank_file(folder, 0, states, buffers, save_id=save_id, info=info, bar=bar)
        commit(folder, build_manifest(info, [record]), scripts(folder))
        for path in beside:
            shutil.copyfile(path, folder / path.name)


def check_frozen_are_there(reader: CheckpointReader) -> None:
    """Raise CheckpointError where the checkpoint was saved without its frozen parameters."""
    if reader.manifest.frozen_digests:
        raise CheckpointError(
            f"{reader.folder} holds no frozen parameters: save it with exclude_frozen_parameters=False."
        )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into; it gets the name when the block is done, and is gone after an error.

    Raises:
        CheckpointError: There is something at `target`, or the operating system refused.
    """
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise CheckpointError(f"{target} exists: name a new folder. Nothing is overwritten.")
    beside = target.with_name(f"{target.name}.partial-{secrets.token_hex(3)}")
    try:
        beside.mkdir(parents=True)
        yield beside
        beside.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _layouts(params: Sequence[ConvertedParam]) -> Iterator[UnitLayout]:
    """One unit for each element type of trainable and of frozen parameters, as a flat parameter has but one."""
    kinds = dict.fromkeys((one.dtype, one.trainable) for one in params)
    for dtype, trainable in kinds:
        shapes = {one.name: one.shape for one in params if (one.dtype, one.trainable) == (dtype, trainable)}
        name = f"converted/{dtype_name(dtype)}{'' if trainable else '/frozen'}"
        yield UnitLayout.build(name, shapes, dtype=dtype_name(dtype), trainable=trainable, world_size=1)
