"""What scripts import from deepspeed.runtime.pipe.module: see hf_zero.pipeline."""

from hf_zero.extras.pipeline.layer_spec import LayerSpec, TiedLayerSpec
from hf_zero.extras.pipeline.module import PipelineModule

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
