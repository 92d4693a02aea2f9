"""What scripts import from deepspeed.runtime.pipe: see hf_zero.pipeline."""

from hf_zero.pipeline.layer_spec import LayerSpec, TiedLayerSpec
from hf_zero.pipeline.module import PipelineModule
from hf_zero.pipeline.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
