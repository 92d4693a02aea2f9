"""`hf_zero.pipe`: deepspeed.pipe's names, and the topologies. See hf_zero.pipeline."""

from hf_zero.extras.pipeline.layer_spec import LayerSpec, TiedLayerSpec
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.extras.pipeline.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]
