"""One parameter's optimizer state in the files: what is sharded as the parameter is, numbers, tensors of other shapes.

The last are those of optimizers that need unsharded parameters, such as Adafactor's row and column means. They are
small, and are stored unsharded among the buffers, under names with STATE_MARK, which no buffer of a model has.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from hf_zero.checkpoint.format import CODES, STATE_MARK, WEIGHT_KINDS, Manifest
from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.checkpoint.scheduler_state import like, plain
from hf_zero.checkpoint.writer import Chunked, Scalar, dtype_name
from hf_zero.errors import CheckpointError
from hf_zero.layout import Piece, Slice
from hf_zero.optim.param_groups import OwnedSlice
from hf_zero.optim.sharded import ShardedOptimizer

# Optimizer state that is a Python number, not a tensor of one element, keeps its kind through a file by this suffix.
_PYTHON_NUMBER = "@python"
# A tensor of one element that is not a 0-dim float32 keeps type and shape by one as this: step@int64[1].
_AS_IT_WAS = re.compile(r"(?P<key>.+)@(?P<dtype>[a-z0-9_]+)\[(?P<ones>(1(, 1)*)?)\]")
# Kinds that the optimizer does not know, such as an average of the weights.
ATTACHED = "attached."
# Optimizers that keep the same state under the same names: one goes on where the other stopped.
_SAME_STATE = frozenset(["Adam", "AdamW", "CPUAdam", "DeepSpeedCPUAdam", "FusedAdam", "UncorrectedAdam"])
# Hyperparameters of how an update is computed, not of which: another device or torch may have other ways.
_OWN_CHOICE = frozenset(["fused", "foreach", "capturable", "differentiable"])


def collect(
    states: Sequence[Mapping[str, Any]], owned: OwnedSlice, odd: Container[tuple[str, str]]
) -> tuple[dict[str, torch.Tensor | Chunked], dict[str, Scalar]]:
    """Collect the optimizer state of one slice: each kind as one, scalars once.

    Args:
        states: For each tensor that the optimizer holds of the slice.
        odd: (parameter, kind) of what is saved elsewhere.
    """
    tensors: dict[str, torch.Tensor | Chunked] = {}
    scalars: dict[str, Scalar] = {}
    for key, first in states[0].items():
        values = [state[key] for state in states]
        if (owned.slice.name, key) in odd:
            continue
        if isinstance(first, torch.Tensor) and first.shape == owned.masters[0].shape and first.dim():
            tensors[key] = _joined([value.reshape(-1) for value in values])
        elif (scalar := stored_scalar(key, first)) is not None:
            scalars[scalar[0]] = scalar[1]
        elif first is not None:
            raise CheckpointError(
                f"optimizer state {key!r} of {owned.slice.name} is a {type(first).__name__}, which a checkpoint "
                "cannot shard for another world size; use an optimizer whose state is elementwise"
            )
    return tensors, scalars


def stored_scalar(key: str, value: Any) -> tuple[str, Scalar] | None:
    """Return the name and the number under which a file holds a value; None for what is no number. See `restored`."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        is_usual = value.dim() == 0 and value.dtype == torch.float32
        return key if is_usual else f"{key}@{dtype_name(value.dtype)}{list(value.shape)}", value.item()
    return (key + _PYTHON_NUMBER, value) if isinstance(value, bool | int | float) else None


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | Chunked:
    """Join parts of one slice without a copy, which would be as large as the optimizer's state."""
    return parts[0] if len(parts) == 1 else Chunked(sum(map(len, parts)), parts[0].dtype, lambda: iter(parts))


def read_states(
    reader: CheckpointReader,
    name: str,
    pieces: Slice | Sequence[Piece],
    tensors: Sequence[torch.Tensor],
    group: Mapping[str, Any],
    earlier: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """The saved optimizer state of a parameter, for each of `tensors`, which together hold its `pieces`.

    Args:
        group: The run's own hyperparameters of these tensors.
        earlier: The states so far, whose memory is used again: as much that is fresh costs more than the read.
    """
    states: list[dict[str, Any]] = [{} for _ in tensors]
    sizes = [tensor.numel() for tensor in tensors]
    device = tensors[0].device
    if not reader.holds(name):
        return states
    for kind in reader.kinds(name):
        if kind not in WEIGHT_KINDS and not kind.startswith(ATTACHED):
            chunks: Sequence[torch.Tensor] = [state[kind] for state in earlier if torch.is_tensor(state.get(kind))]
            if [one.numel() for one in chunks] == sizes and reader.fits(chunks, name, kind):
                reader.read_into(chunks, name, kind, pieces)
            else:
                chunks = torch.split(reader.read(name, kind, pieces), sizes)
            for state, tensor, chunk in zip(states, tensors, chunks, strict=True):
                state[kind] = chunk.to(device, tensor.dtype).view(tensor.shape)
    for saved_as, value in reader.scalars(name).items():
        key, scalar = restored(saved_as, value)
        # Kernels read `step` where the parameter is, Python on the CPU: see torch's Optimizer.load_state_dict.
        is_on_device = key != "step" or group.get("fused") or group.get("capturable")
        if isinstance(scalar, torch.Tensor) and is_on_device:
            scalar = scalar.to(device)
        for state in states:
            state[key] = scalar.clone() if isinstance(scalar, torch.Tensor) else scalar
    for info in reader.manifest.buffers:
        owner, mark, kind = info.name.partition(STATE_MARK)
        if mark and owner == name:  # the optimizer needs full parameters, so it holds one tensor
            states[0][kind] = reader.read_buffer(info.name).to(device)
    return states


def restored(saved_as: str, value: Scalar) -> tuple[str, torch.Tensor | Scalar]:
    """The optimizer's key, and its value of the kind, type and shape that it had."""
    if saved_as.endswith(_PYTHON_NUMBER):
        return saved_as.removesuffix(_PYTHON_NUMBER), value
    match = _AS_IT_WAS.fullmatch(saved_as)
    if match is None or match["dtype"] not in CODES:
        return saved_as, torch.tensor(value, dtype=torch.float32)
    dtype: torch.dtype = getattr(torch, match["dtype"])
    try:
        return match["key"], torch.tensor(value, dtype=dtype).view([1] * match["ones"].count("1"))
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(f"optimizer state {saved_as!r} is {value!r}, which its type cannot hold") from error


# -------------------------------------------------------------------- does it fit, and hyperparameters
def check_optimizer_fits(optimizer: ShardedOptimizer, manifest: Manifest) -> None:
    """Raise CheckpointError unless the state in a checkpoint is that of such an optimizer, with as many groups."""
    saved_class, mine = manifest.optimizer, type(optimizer.optimizer).__name__
    if saved_class is not None and saved_class != mine and not {saved_class, mine} <= _SAME_STATE:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved_class}, this run uses {mine}: use the same optimizer, or load "
            "with load_optimizer_states=False"
        )
    packages = manifest.optimizer_package, package_of(optimizer)
    if saved_class == mine and None not in packages and len(set(packages)) > 1:
        raise CheckpointError(
            f"the checkpoint holds the state of {packages[0]}'s {mine}, this run uses that of {packages[1]}, with "
            "another state: use the same optimizer, or load with load_optimizer_states=False"
        )
    saved, own = len(manifest.param_groups), len(optimizer.param_groups)
    trains = any(group["params"] for group in optimizer.param_groups)  # all of a pipeline's stage may be frozen
    if saved_class is not None and saved != own and trains:
        raise CheckpointError(
            f"the checkpoint holds {saved} parameter group(s), this run's optimizer has {own}: which rate belongs to "
            "which parameter is not known.\nBuild the optimizer with the same groups, or load with "
            "load_optimizer_states=False."
        )
    _check_groups_of_parameters(optimizer, manifest)


def _check_groups_of_parameters(optimizer: ShardedOptimizer, manifest: Manifest) -> None:
    """A parameter that is in another group now would get the hyperparameters of a stranger."""
    groups = manifest.param_groups
    moved = []
    for name, mine in group_numbers(optimizer).items():
        saved = manifest.param_group_of.get(name, mine)
        if saved != mine and groups[saved] != groups[mine]:
            moved.append(f"{name} was in group {saved} and is in group {mine}")
    if moved:
        raise CheckpointError(
            f"{len(moved)} parameters are in another parameter group than in the checkpoint, with other "
            f"hyperparameters: {'; '.join(moved[:3])}.\nBuild the optimizer with the same groups in the same order, "
            "or load with load_optimizer_states=False."
        )


def group_numbers(optimizer: ShardedOptimizer) -> dict[str, int]:
    """Parameter -> index of its group, for those that this rank updates; {} where there is but one group."""
    if len(optimizer.param_groups) < 2:
        return {}
    group_of = {id(tensor): n for n, group in enumerate(optimizer.param_groups) for tensor in group["params"]}
    slices = optimizer.owned
    tensors: dict[str, Sequence[torch.Tensor]] = {owned.slice.name: owned.masters for owned in slices if owned.native}
    tensors.update({name: held for name, _, held in optimizer.strategy.places(slices)})
    return {name: group_of[id(held[0])] for name, held in tensors.items() if held}


def package_of(optimizer: ShardedOptimizer) -> str | None:
    """Return the package of the optimizer's class, among those that have different classes of one name."""
    package = type(optimizer.optimizer).__module__.partition(".")[0]
    known = type(optimizer.optimizer).__name__ not in _SAME_STATE and package in ("torch", "transformers", "hf_zero")
    return package if known else None


def load_groups(
    groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]], *, is_scheduled: bool
) -> list[str]:
    """Take over the saved hyperparameters, as torch does; how an update is computed stays this run's own choice.

    Args:
        is_scheduled: A scheduler sets the rates next, so those of the two runs need not be equal.
    Returns:
        What was set otherwise in this run, a text each; rates that schedulers set are compared as they began.
    Raises:
        CheckpointError: A value is of another kind than the optimizer's.
    """
    remedy = "Use the same optimizer over the same parameter groups, or load with load_optimizer_states=False"
    taken = [
        (number, group, key, like(group[key], value, f"parameter group {number}: {key}", remedy))
        for number, (group, values) in enumerate(zip(groups, saved, strict=False))
        for key, value in values.items()
        if key in group and value is not None and key not in _OWN_CHOICE
    ]
    changed = []
    for place, group, key, value in taken:
        if group[key] != value and not _is_set_by_scheduler(group, key, is_scheduled):
            number = f" of group {place}" if len(groups) > 1 else ""
            changed.append(f"{key}{number} is {plain(value)}, not {plain(group[key])}")
        if isinstance(group[key], torch.Tensor):  # a captured graph reads it where it is
            group[key].fill_(value)
        else:
            group[key] = value
    return changed


def _is_set_by_scheduler(group: Mapping[str, Any], key: str, is_scheduled: bool) -> bool:
    """Whether a scheduler of torch sets this: all keep the first rate as `initial_lr`, some also `max_momentum`."""
    if key == "lr":
        return is_scheduled or "initial_lr" in group
    return key in ("betas", "momentum") and "max_momentum" in group
