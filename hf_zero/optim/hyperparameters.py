"""The numbers of the param groups (learning rates, decay, ...), which must be the same on all ranks.

A scheduler that reads something of its own rank (ReduceLROnPlateau on that rank's loss) makes them differ; every shard
of the model would then be updated by another rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.distributed.digests import digest_of
from hf_zero.errors import StateError


def numbers_of(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of each group, by name, without tensors on a device: reading them would wait for it."""
    return [
        {key: _number(value) for key, value in group.items() if key != "params" and _number(value) is not None}
        for group in param_groups
    ]


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, (tuple, list)):
        return tuple(_number(one) for one in value)
    return value if isinstance(value, (int, float)) else None


def learning_rates(param_groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """The learning rate of each group. Waits for a device that holds one."""
    return [float(group["lr"]) for group in param_groups]


def momenta(param_groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The betas of each group, or its momentum; 0.0 if the optimizer has neither."""
    return [list(group["betas"]) if "betas" in group else float(group.get("momentum", 0.0)) for group in param_groups]


def groups_digest(param_groups: Sequence[Mapping[str, Any]]) -> float:
    """A digest of the groups' numbers, an integer, for the ballot of a step."""
    return digest_of(repr(numbers_of(param_groups)).encode())


def refuse_different(param_groups: Sequence[Mapping[str, Any]], comm: Comm) -> None:
    """Raise StateError with what differs between the ranks. All ranks must call."""
    everyone = comm.all_gather_object(numbers_of(param_groups), "hyperparameters")
    found = []
    for index in range(max(map(len, everyone))):
        by_rank = [groups[index] if index < len(groups) else {} for groups in everyone]
        for key in sorted(set().union(*by_rank)):
            values = [group.get(key) for group in by_rank]
            if any(repr(value) != repr(values[0]) for value in values):
                found.append(f"param group {index}, {key}: {', '.join(map(str, values))}")
    raise StateError(
        "the optimizer's numbers differ between ranks, so each would update its part of the model by another rule. "
        f"In rank order:\n  {'; '.join(found[:5])}\n"
        "Give schedulers a value that is the same on all ranks: the mean of the loss over ranks, not this rank's own."
    )
