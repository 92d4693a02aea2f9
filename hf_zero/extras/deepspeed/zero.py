"""`hf_zero.zero`: deepspeed.zero's names. New code takes sharded_init and gathered_params."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.access.full import gathered_params
from hf_zero.config import ZeroConfig
from hf_zero.distributed.processes import init_distributed
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.initialize import shard
from hf_zero.errors import ConfigError
from hf_zero.hf.models.patches import sharded_init

logger = logging.getLogger(__name__)


class _Block(contextlib.AbstractContextManager["_Block"]):
    """A `with` block that a class of DeepSpeed's name stands for. It can be entered again."""

    _open: Callable[[], contextlib.AbstractContextManager[None]]

    def __enter__(self) -> _Block:
        self._block = self._open()
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)


class ZeroParamStatus(enum.Enum):
    """deepspeed's: where the values of a parameter are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init(_Block):
    """deepspeed.zero.Init: modules built inside the block come out in shards. See hf_zero.sharded_init.

    Args:
        module: A model that is built already: it is put into shards at once, and frozen until `initialize`.
        config_dict_or_path, config: Path, dict or JSON string of stage 3; None means stage 3 with its defaults.
        dtype: torch.bfloat16, torch.float16 or torch.float32, instead of what the configuration sets.
        enabled: False makes the block do nothing.
        data_parallel_group, mpu: Taken where they are None.
        remote_device, pin_memory: "cpu" is an offload_param of that device and pin_memory, where the configuration has
            none.
        mem_efficient_linear: torch's linear is left as it is, whatever this says.
    All ranks must enter and leave together and build the same.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
        config: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        for name, value in (("data_parallel_group", data_parallel_group), ("mpu", mpu)):
            if value is not None:
                raise ConfigError(f"zero.Init({name}=...): parameters are shared by all ranks; remove {name}")
        if remote_device not in (None, "none", "cpu"):
            raise ConfigError(
                f'zero.Init(remote_device={remote_device!r}): set it in "offload_param" of the configuration'
            )
        if pin_memory and remote_device != "cpu":
            logger.warning("zero.Init(pin_memory=True) has no effect: offload_param.pin_memory decides")
        if enabled:
            init_distributed()
        given = config_dict_or_path if config is None else config
        if remote_device == "cpu":
            given = _offloaded(given, pin_memory)
        self._open = lambda: sharded_init(given, enabled=enabled and module is None, dtype=dtype)
        if module is not None and enabled:
            trainable = [param for param in module.parameters() if param.requires_grad]
            shard(module, given)
            for param in trainable:
                param.requires_grad_(True)


class GatheredParameters(_Block):
    """deepspeed.zero.GatheredParameters: see hf_zero.gathered_params.

    Args:
        params: A parameter, a module, or an iterable of these. Other tensors in it, as buffers, are left as they are.
        modifier_rank: Rank whose edits are kept; None is for reading.
        fwd_module: Taken for DeepSpeed's sake; nothing needs to be registered.
        enabled: False makes the block do nothing.
    All ranks must enter and leave together.
    """

    def __init__(
        self,
        params: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, nn.Module | nn.Parameter) else params
        held = [one for one in given if isinstance(one, nn.Module | nn.Parameter)]
        self._open = lambda: gathered_params(held, write_rank=modifier_rank) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Give the model itself, with whole parameters until the end of the block. All ranks must enter and leave."""
    with gathered_params(model):
        yield model.module if isinstance(model, ZeroEngine) else model


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter that is read outside of its module's forward is gathered by itself."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do, as for register_external_parameter."""


def _offloaded(given: Any, pin_memory: bool) -> ZeroConfig:
    raw = {"zero_optimization": {"stage": 3}} if given is None else ZeroConfig.load(given).raw
    zero = {**raw.get("zero_optimization", {})}
    zero.setdefault("offload_param", {"device": "cpu", "pin_memory": pin_memory})
    return ZeroConfig.load({**raw, "zero_optimization": zero})
