"""Which tensors one call of a torch optimizer updates (`sub_group_size`).

torch's foreach updates make several temporaries as large as everything they update. Called once for each group of
tensors, they make them as large as a group: torch leaves tensors without a gradient alone. As in DeepSpeed, the user's
step hooks run once per call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hf_zero.optim.param_groups import OwnedRun

Pair = tuple[torch.Tensor, torch.Tensor]  # a tensor that the optimizer holds, and its gradient


def sub_groups(
    optimizer: torch.optim.Optimizer, owned: Sequence[OwnedRun], has_grad: Mapping[int, Sequence[bool]]
) -> list[list[Pair]]:
    """What this rank updates, in groups of at most `sub_group_size` elements; a larger tensor is a group of its own.

    There is always a group, perhaps an empty one: the optimizer is called in every step. Other optimizers than torch's
    get everything in one: they may count their calls, or look at all tensors together.

    Args:
        has_grad: By id of the gradient buffer: whether each of its parameters had a gradient on any rank.
    """
    present = [run for run in owned if has_grad[id(run.buffer)][run.index]]
    pairs = [(run, pair) for run in present for pair in zip(run.masters, run.grads, strict=False)]
    if not type(optimizer).__module__.startswith("torch.optim."):
        return [[pair for _, pair in pairs]]
    groups: list[list[Pair]] = [[]]
    size = 0
    for run, pair in pairs:
        numel = pair[0].numel()
        if groups[-1] and size + numel > run.buffer.flat.home.sub_group_numel:
            groups.append([])
            size = 0
        groups[-1].append(pair)
        size += numel
    return groups
