"""What a flat parameter is to be, and where its data lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.layout import UnitLayout
from hf_zero.storage.base import ShardStore
from hf_zero.storage.copy_stream import CopyStream


@dataclass(frozen=True)
class FlatParamSpec:
    """A flat parameter that is to be made."""

    layout: UnitLayout
    dtype: torch.dtype
    on_demand: bool


@dataclass(frozen=True)
class Placement:
    """Where the data of one flat parameter lives between uses, and how ranks share it after an update."""

    param: ShardStore  # its shard, where parameters are unsharded around their use only
    master: ShardStore  # master weights, and the moments of a native update
    copies: CopyStream  # for what goes between host and device; one for all buffers
    native: bool  # the native rule updates the masters tile by tile; else torch does, and they stay in memory
    tile_numel: int
    sub_group_numel: int = 1 << 62  # elements that one call of a torch optimizer updates
    broadcasts: bool = False  # what is never sharded comes from each owner by a broadcast (`allgather_partitions`)
