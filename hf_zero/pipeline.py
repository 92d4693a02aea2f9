"""Pipeline parallelism: layers in a row, split into stages that run on different ranks.

The public names are loaded at first use, so that nothing imports torch before.
"""

from __future__ import annotations

from hf_zero.lazy import lazy_names

_EXPORTS = {
    "LayerSpec": "hf_zero.extras.pipeline.layer_spec",
    "PipeDataParallelTopology": "hf_zero.extras.pipeline.topology",
    "PipeModelDataParallelTopology": "hf_zero.extras.pipeline.topology",
    "PipelineGrid": "hf_zero.extras.pipeline.topology",
    "PipelineModule": "hf_zero.extras.pipeline.module",
    "ProcessTopology": "hf_zero.extras.pipeline.topology",
    "TiedLayerSpec": "hf_zero.extras.pipeline.layer_spec",
    "from_transformers": "hf_zero.extras.pipeline.from_transformers",
}

__getattr__ = lazy_names(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
