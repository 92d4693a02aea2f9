"""What scripts import from deepspeed.runtime.pipe: see hf_zero.pipeline."""

from hf_zero.extras.pipeline.layer_spec import LayerSpec, TiedLayerSpec
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.extras.pipeline.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
