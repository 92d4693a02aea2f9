"""What scripts import from deepspeed.runtime.pipe.topology: see pipeline/topology.py."""

from hf_zero.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

PipelineParallelGrid = PipelineGrid

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
]
