"""What scripts import from deepspeed.runtime.pipe.topology: see pipeline/topology.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hf_zero.distributed.processes import join_processes
from hf_zero.errors import ConfigError
from hf_zero.extras.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


class PipelineParallelGrid(PipelineGrid):
    """This process's place in a topology of all processes. See PipelineGrid."""

    def __init__(self, topology: ProcessTopology, process_group: Any = None) -> None:
        if process_group not in (None, dist.group.WORLD):
            raise ConfigError("PipelineParallelGrid(process_group=...): stages span all ranks; remove it")
        world_size = join_processes()
        super().__init__(topology, dist.get_rank() if dist.is_initialized() else 0, world_size)


__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
]
