"""One parameter's optimizer state in the files: what of it is cut as the parameter is, numbers, and tensors of other
shapes.

The last are those of optimizers that need whole parameters, such as Adafactor's row and column means. They are small,
and stand whole among the buffers, under names that no buffer of a model has.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from hf_zero.checkpoint.load import CheckpointReader
from hf_zero.checkpoint.manifest import STATE_MARK
from hf_zero.checkpoint.state import Chunked, Scalar
from hf_zero.errors import CheckpointError
from hf_zero.layout import Piece, Run
from hf_zero.optim.owned import OwnedRun

# Optimizer state that is a Python number, not a tensor of one element, keeps its kind through a file by this suffix.
_PYTHON_NUMBER = "@python"
# Kinds that the optimizer does not know, such as an average of the weights.
ATTACHED = "attached."


def state_name(name: str, kind: str) -> str:
    """Among the buffers: a state of the parameter `name` whose shape is not the parameter's."""
    return f"{name}{STATE_MARK}{kind}"


def collect(
    states: Sequence[Mapping[str, Any]], owned: OwnedRun, odd: Container[tuple[str, str]]
) -> tuple[dict[str, torch.Tensor | Chunked], dict[str, Scalar]]:
    """The optimizer state of one run: its tensors joined, its scalars once.

    Args:
        states: For each tensor that the optimizer holds of the run.
        odd: (parameter, kind) of what is saved elsewhere.
    """
    tensors: dict[str, torch.Tensor | Chunked] = {}
    scalars: dict[str, Scalar] = {}
    for key, first in states[0].items():
        values = [state[key] for state in states]
        if (owned.run.name, key) in odd:
            continue
        if isinstance(first, torch.Tensor) and first.shape == owned.masters[0].shape and first.dim():
            flat = [value.reshape(-1) for value in values]
            tensors[key] = flat[0] if len(flat) == 1 else torch.cat(flat)
        elif isinstance(first, torch.Tensor) and first.numel() == 1:
            scalars[key] = first.item()
        elif isinstance(first, bool | int | float):
            scalars[key + _PYTHON_NUMBER] = first
        elif first is not None:
            raise CheckpointError(
                f"optimizer state {key!r} of {owned.run.name} is a {type(first).__name__}, which a checkpoint cannot "
                "cut to another world size; use an optimizer whose state is elementwise"
            )
    return tensors, scalars


def read_states(
    reader: CheckpointReader, name: str, pieces: Run | Sequence[Piece], tensors: Sequence[torch.Tensor]
) -> list[dict[str, Any]]:
    """The saved optimizer state of a parameter, for each of `tensors`, which together hold its `pieces`."""
    states: list[dict[str, Any]] = [{} for _ in tensors]
    sizes = [tensor.numel() for tensor in tensors]
    device = tensors[0].device
    for kind in reader.kinds(name):
        if kind not in ("master", "param") and not kind.startswith(ATTACHED):
            chunks = torch.split(reader.read(name, kind, pieces), sizes)
            for state, tensor, chunk in zip(states, tensors, chunks, strict=True):
                state[kind] = chunk.to(device, tensor.dtype, copy=True).view(tensor.shape)
    for key, value in reader.scalars(name).items():
        for state in states:
            if key.endswith(_PYTHON_NUMBER):
                state[key.removesuffix(_PYTHON_NUMBER)] = value
            else:
                state[key] = torch.tensor(value, dtype=torch.float32)
    for info in reader.manifest.buffers:
        owner, mark, kind = info.name.partition(STATE_MARK)
        if mark and owner == name:  # the optimizer needs whole parameters, so it holds one tensor
            states[0][kind] = reader.read_buffer(info.name).to(device)
    return states
