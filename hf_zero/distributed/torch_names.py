"""Collectives into one tensor, by the names of torch 2.13: earlier releases have other names for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

IS_RENAMED = hasattr(dist, "all_gather_single")  # torch 2.13 and later, where the earlier names warn
all_gather_single = dist.all_gather_single if IS_RENAMED else dist.all_gather_into_tensor
reduce_scatter_single = dist.reduce_scatter_single if IS_RENAMED else dist.reduce_scatter_tensor


def all_gather_single_coalesced(group: Any) -> Any:
    """The method of a process group that gathers several tensors in one operation."""
    return group.all_gather_single_coalesced if IS_RENAMED else group.allgather_into_tensor_coalesced


def reduce_scatter_single_coalesced(group: Any) -> Any:
    """The method of a process group that reduces and scatters several tensors in one operation."""
    return group.reduce_scatter_single_coalesced if IS_RENAMED else group.reduce_scatter_tensor_coalesced
