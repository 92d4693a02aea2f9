"""`init_inference` and `OnDevice`: a model for generation, with torch's own layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.config.schema import DTYPES
from hf_zero.distributed.processes import default_device
from hf_zero.engine.initialize import shard
from hf_zero.engine.module_wrapper import ModuleWrapper
from hf_zero.errors import ConfigError

_REFUSED = """replace_with_kernel_inject kernel_inject injection_policy checkpoint save_mp_checkpoint_path quant moe
    enable_cuda_graph""".split()
# These keys set the sizes of kernels and their buffers.
_OF_KERNELS = """max_out_tokens max_tokens min_out_tokens replace_method return_tuple set_empty_params
    triangular_masking transposed_mode use_triton""".split()


def init_inference(model: nn.Module, config: Mapping[str, Any] | None = None, **kwargs: Any) -> ModuleWrapper:
    """deepspeed.init_inference: `model` in the type and place of inference, behind a wrapper. All ranks must call.

    Args:
        config, kwargs: `dtype` (torch's or a name; fp16 by default, as in DeepSpeed), and `zero`, a block
            zero_optimization that shards the model (ZeRO-Inference), which keeps the type that it has.
    Raises:
        NotImplementedError: Kernels, tensor parallelism or quantization are asked for.
        ConfigError: A key or type is unknown.
    """
    given = {**(config or {}), **kwargs}
    parallel = given.pop("tensor_parallel", given.pop("tp", {}))
    size = given.pop("mp_size", parallel.get("tp_size", 1) if isinstance(parallel, Mapping) else parallel)
    asked = [name for name in _REFUSED if given.pop(name, None)]
    if asked or size > 1:
        what = ", ".join(asked) or f"tensor parallelism over {size} ranks"
        raise NotImplementedError(f"init_inference: hf_zero has no {what}: leave it out, or use vLLM.")
    dtype, zero = DTYPES.get(str(given.pop("dtype", torch.float16))), given.pop("zero", {})
    if unknown := sorted(set(given) - set(_OF_KERNELS)):
        raise ConfigError(f"init_inference: unknown key(s) {', '.join(unknown)}: leave them out")
    if dtype is None:
        raise ConfigError(f"init_inference: dtype is none of {', '.join(DTYPES)}")
    if zero:
        return ModuleWrapper(shard(model, {"zero_optimization": zero})).eval()
    return ModuleWrapper(model.to(device=default_device(), dtype=getattr(torch, dtype))).eval()


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> Iterator[None]:
    """deepspeed.OnDevice: what is made inside is on `device`, and floats are of `dtype` where no type is given."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype.is_floating_point else before)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
