"""Full tensors of a checkpoint folder, read one by one as they are asked for.

Needs no engine and no process group. Which name of a model takes which name of the checkpoint is decided here, too;
who writes the values into the model is not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hf_zero.checkpoint.folders import chosen
from hf_zero.checkpoint.format import STATE_MARK, TensorInfo
from hf_zero.checkpoint.reader import CheckpointReader, open_checkpoint
from hf_zero.errors import CheckpointError

logger = logging.getLogger(__name__)


def load_fp32_state_dict(
    folder: str | Path, tag: str | None = None, *, exclude_frozen_parameters: bool = False
) -> LazyStateDict:
    """The weights of a checkpoint in fp32, under the names that the model's `state_dict()` has.

    Each tensor is read, onto the CPU, when it is asked for. Any process may call. What is read is compared
    with its checksums, but in checkpoints of format version 1 (`hf-zero inspect --verify` does that).

    Args:
        folder: `checkpoint-N` of the Trainer, or what was given to `engine.save_checkpoint`.
        tag: The checkpoint is `folder/tag`; without one it is what `folder/latest` names, or `folder` itself.
        exclude_frozen_parameters: Leave out parameters that were not trained. Buffers stay.
    Raises:
        CheckpointError: No manifest, a damaged one, files missing or truncated (all are listed); later, when a tensor
            is read, a damaged file.
    """
    reader = open_checkpoint(chosen(folder, tag))
    return LazyStateDict(reader, with_frozen=not exclude_frozen_parameters)


class LazyStateDict(Mapping[str, torch.Tensor]):
    """Weights and persistent buffers of an open checkpoint; names, `len`, `in` and `shape` read no tensor.

    Parameters come first, in the model's order, then the further names of tied ones, then buffers. A parameter is
    read from its fp32 master where there is one; one kept in 16 bits or fewer is widened to fp32, a wider one stays as
    it is. Buffers keep their element type.

    While the caller holds a tensor, asking for it again gives the same object, under each of its tied names. Nothing
    is kept here, so going through `items()` takes the memory of one tensor.

    Files stay open until `close()`, the end of a `with` block, or until the mapping is forgotten.
    """

    def __init__(self, reader: CheckpointReader, *, with_frozen: bool = True) -> None:
        self._reader = reader
        manifest = reader.manifest
        trainable = {slot.name for layout in manifest.layouts if layout.trainable for slot in layout.slots}
        self._params = {info.name: info for info in manifest.params if with_frozen or info.name in trainable}
        self._buffers = {info.name: info for info in manifest.buffers if STATE_MARK not in info.name}
        tied = {name: first for name, first in manifest.tied.items() if first in self._params}
        self._stored_as = {name: name for name in self._params} | tied | {name: name for name in self._buffers}
        self._given: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        weakref.finalize(self, reader.close)

    @property
    def folder(self) -> Path:
        return self._reader.folder

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._stored_as[name]
        tensor = self._given.get(stored)
        if tensor is None:
            tensor = self._given[stored] = self._read(stored)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_as)

    def __len__(self) -> int:
        return len(self._stored_as)

    def __contains__(self, name: object) -> bool:
        return name in self._stored_as  # the default of Mapping would read the tensor

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, {len(self)} names)"

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored_as[name]
        return (self._params.get(stored) or self._buffers[stored]).shape

    def __enter__(self) -> LazyStateDict:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; a tensor that is asked for later opens them again."""
        self._reader.close()

    def _read(self, stored: str) -> torch.Tensor:
        info = self._params.get(stored)
        return self._reader.read_buffer(stored) if info is None else self._reader.read_full(stored, self._dtype(info))

    def _dtype(self, info: TensorInfo) -> torch.dtype:
        kind = self._reader.weight_kind(info.name)
        dtype: torch.dtype = getattr(torch, info.dtype if kind is None else self._reader.kinds(info.name)[kind])
        return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def match_names(own: Mapping[str, torch.Tensor], state: LazyStateDict, *, strict: bool) -> dict[str, str]:
    """Decide which name of `state` each tensor of a model is loaded from. Reads no tensor.

    Args:
        own: The model's tensors under their `state_dict()` names; a tensor with several names is listed under each.
        strict: Names on one side only are errors, else they are left out with a warning.
    Returns:
        The first name of a tensor in `own` -> its name in `state`; each tensor once.
    Raises:
        CheckpointError: Lists every name that is missing or unexpected (if strict), has another shape, or whose tensor
            in the model has no memory.
    """
    first_names: dict[int, str] = {}
    matched: dict[str, str] = {}
    problems = []
    for name, tensor in own.items():
        first = first_names.setdefault(id(tensor), name)
        if name not in state:
            continue
        matched.setdefault(first, name)
        if state.shape(name) != tuple(tensor.shape):
            problems.append(f"{name}: shape {tuple(tensor.shape)} in the model, {state.shape(name)} in the checkpoint")
        elif tensor.is_meta:
            problems.append(f"{name}: on the meta device, give it memory first (model.to_empty(device=...))")
    # One that is stored under another of its names is there.
    missing = [name for name, tensor in own.items() if first_names[id(tensor)] not in matched]
    unexpected = [name for name in state if name not in own]
    if strict:
        problems += [f"{name}: not in the checkpoint" for name in missing]
        problems += [f"{name}: not in the model" for name in unexpected]
    if problems:
        raise CheckpointError(
            f"{state.folder} does not fit the model ({len(problems)} differences):\n  " + "\n  ".join(problems)
        )
    if missing or unexpected:
        logger.warning(
            "%s: %d names of the model are not in it and stay as they are, %d of its names are not in the model",
            state.folder,
            len(missing),
            len(unexpected),
        )
    return matched
