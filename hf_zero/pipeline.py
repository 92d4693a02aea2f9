"""Pipeline parallelism: layers in a row, split into stages that run on different ranks.

The public names are loaded at first use, so that nothing imports torch before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_EXPORTS = {
    "LayerSpec": "hf_zero.extras.pipeline.layer_spec",
    "PipeDataParallelTopology": "hf_zero.extras.pipeline.topology",
    "PipeModelDataParallelTopology": "hf_zero.extras.pipeline.topology",
    "PipelineGrid": "hf_zero.extras.pipeline.topology",
    "PipelineModule": "hf_zero.extras.pipeline.module",
    "ProcessTopology": "hf_zero.extras.pipeline.topology",
    "TiedLayerSpec": "hf_zero.extras.pipeline.layer_spec",
}
_offered: dict[str, Callable[[], Any]] = {}


def offer(name: str, load: Callable[[], Any]) -> None:
    """Have `hf_zero.pipeline.NAME`, which a room above this one makes, given by `load()`."""
    _offered[name] = load


def __getattr__(name: str) -> Any:
    if name in _offered:
        value = _offered[name]()
    elif name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    else:
        raise AttributeError(f"module 'hf_zero.pipeline' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_EXPORTS, *_offered])
