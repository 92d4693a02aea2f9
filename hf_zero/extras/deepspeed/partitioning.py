"""Names of `deepspeed.runtime.zero.partition_parameters` that transformers replaces while it builds a model.

It keeps `zero.Init` from casting `torch.arange`. No constructor is cast here, so nothing reads the replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return `fn`: tensors are made as the caller says."""
    return fn
