"""The methods of PreTrainedModel that make models, in shards where a configuration of stage 3 is in force."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, conversion_mapping, core_model_loading, modeling_utils
from transformers.models.auto import modeling_auto

from hf_zero.config import ResolvedConfig, ZeroConfig
from hf_zero.config.conditions import OFFLOAD_PARAM, medium
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.processes import join_processes
from hf_zero.engine.sharded_init import ShardedConstruction
from hf_zero.errors import ConfigError
from hf_zero.hf.models.from_pretrained import SETTER, ShardedLoad
from hf_zero.hf.patching import ACTIVATION, Foreign, PatchPoint, replaced


def shards_on(config: ZeroConfig | None) -> bool:
    """Whether parameters are to be in shards from the start. All ranks must call."""
    if config is None or not config.shards_parameters:
        return False
    # One rank alone has nothing to shard, unless the parameters are offloaded.
    return join_processes() > 1 or not medium(config.get, OFFLOAD_PARAM).is_device


def resolve_for(config: ZeroConfig, model: Any) -> ResolvedConfig:
    """Resolve what concerns the parameters of `model` in `config`."""
    kept = config.for_parameters(types=not _DTYPE_GIVEN.get())
    return kept.resolve(model=model, world_size=join_processes(), client_optimizer=True)


# Whether the caller of from_pretrained or from_config named a type, which counts for more than bf16 or fp16 blocks.
_DTYPE_GIVEN: ContextVar[bool] = ContextVar("hf_zero.dtype_given", default=False)
# Whether models are being built in shards right now: a context inside another one leaves it to the outer one.
_BUILDING: ContextVar[bool] = ContextVar("hf_zero.sharded_init", default=False)


@contextlib.contextmanager
def sharded_init(
    config: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """Modules built inside the block come out in shards, with the values of a plain build (DeepSpeed: `zero.Init`).

    All ranks must enter and leave together and build the same; rank 0's values win. Peak extra memory: the largest
    module, its children and grandchildren. What was built is for inference, until `hf_zero.initialize`, a Trainer or
    accelerator.prepare makes it trainable. Contexts may be nested: the outermost one counts.

    Args:
        config: A path, a dict, a JSON string or a ZeroConfig of stage 3; None means stage 3 with its defaults.
            `bf16.enabled` or `fp16.enabled` gives parameters that type when the block ends, where `keep_fp32` or the
            model does not keep them in fp32; masters start from there, as with DeepSpeed.
        enabled: False makes the block do nothing.
        dtype: torch.bfloat16, torch.float16, or torch.float32 (as constructed), instead of what `config` sets.
    Raises:
        ConfigError: The configuration is wrong.
        StateError: A constructor initialises parameters that are further below it than its children, outside of
            `gathered_params(child, write_rank=0)`.
    """
    loaded = ZeroConfig.load({"zero_optimization": {"stage": 3}} if config is None else config)
    builds_on_meta = torch.get_default_device().type == "meta"  # without values, as from_pretrained does
    if _BUILDING.get() or not enabled or builds_on_meta or not shards_on(loaded):
        yield
        return
    if dtype is not None:
        loaded = _with_dtype(loaded, dtype)
    construction = ShardedConstruction(Comm.join(), functools.partial(resolve_for, loaded))
    token = _BUILDING.set(True)
    try:
        with construction.watching(), _unsharded_for_initialization(construction):
            yield
        construction.finish()
    finally:
        _BUILDING.reset(token)


@contextlib.contextmanager
def _unsharded_for_initialization(construction: ShardedConstruction) -> Iterator[None]:
    """Inside, `_init_weights` finds unsharded parameters: of the module that it initializes, and of its children."""
    original: Callable[..., None] = PreTrainedModel.__dict__["_initialize_weights"]

    @functools.wraps(original)
    def _initialize_weights(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if getattr(module, "_is_hf_initialized", False):
            return
        with construction.unsharded([module, *module.children()]):
            original(self, module, *args, **kwargs)

    with replaced(PreTrainedModel, "_initialize_weights", _initialize_weights):
        yield


def _with_dtype(config: ZeroConfig, dtype: torch.dtype) -> ZeroConfig:
    blocks = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in (*blocks.values(), torch.float32):
        raise ConfigError(f"sharded_init(dtype={dtype}): expected torch.bfloat16, torch.float16 or torch.float32")
    kept = {name: value for name, value in config.for_parameters().raw.items() if name not in (*blocks, "bfloat16")}
    return ZeroConfig.load({**kept, **{name: {"enabled": dtype == kind} for name, kind in blocks.items()}})


# Between the two steps of transformers' from_pretrained.
_LOADS: weakref.WeakKeyDictionary[nn.Module, ShardedLoad] = weakref.WeakKeyDictionary()


def _load_pretrained_model(
    original: Callable[..., Any],
    model: PreTrainedModel,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    expected_keys: Any = None,
) -> Any:
    config = ACTIVATION.config
    if config is None or expected_keys is not None or not shards_on(config):
        return original(model, state_dict, checkpoint_files, load_config, expected_keys)
    load = ShardedLoad(model, resolve_for(config, model), load_config)
    outcome = load.load(original, state_dict, checkpoint_files)
    _LOADS[model] = load
    return outcome


def _finalize_model_loading(original: Callable[..., Any], model: Any, load_config: Any, loading_info: Any) -> Any:
    load = _LOADS.pop(model, None)
    return original(model, load_config, loading_info) if load is None else load.finish(original, loading_info)


@contextlib.contextmanager
def _dtype_of(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Set the default type while a model is made with these arguments; "auto" names no type."""
    given = [kwargs.get(name) for name in ("dtype", "torch_dtype")]
    token = _DTYPE_GIVEN.set(_DTYPE_GIVEN.get() or any(one not in (None, "auto") for one in given))
    try:
        yield
    finally:
        _DTYPE_GIVEN.reset(token)


def _from_pretrained(original: Callable[..., Any], cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    with _dtype_of(kwargs):
        return original(cls, *args, **kwargs)


def _from_config(original: Callable[..., Any], cls: type[PreTrainedModel], config: Any, **kwargs: Any) -> Any:
    with _dtype_of(kwargs), sharded_init(ACTIVATION.config, enabled=ACTIVATION.config is not None):
        return original(cls, config, **kwargs)


def model_functions() -> list[Foreign]:
    """Return the patch points that `from_pretrained` and `from_config` go through, and what handles weights."""
    files = ("state_dict", "checkpoint_files", "load_config")
    loading = ("load_config", "loading_info")
    # The Auto classes of transformers 5.6 put a type that the caller names into the configuration, like one of a file.
    autos = [one for one in vars(modeling_auto).values() if isinstance(one, type) and "from_pretrained" in vars(one)]
    return [
        PatchPoint(PreTrainedModel, "_load_pretrained_model", files, _load_pretrained_model),
        PatchPoint(PreTrainedModel, "_finalize_model_loading", loading, _finalize_model_loading),
        PatchPoint(PreTrainedModel, "from_pretrained", ("pretrained_model_name_or_path",), _from_pretrained),
        *(PatchPoint(auto, "from_pretrained", (), _from_pretrained) for auto in autos),
        PatchPoint(PreTrainedModel, "_from_config", ("config",), _from_config),
        Foreign(PreTrainedModel, "_initialize_weights", ()),
        Foreign(PreTrainedModel, "tie_weights", ("missing_keys", "recompute_mapping")),
        Foreign(core_model_loading, SETTER, ("target_name", "param_value", "loading_info")),
        Foreign(core_model_loading, "tqdm", ()),
        Foreign(core_model_loading, "build_glob_alternation", ()),
        Foreign(core_model_loading, "dot_natural_key", ()),
        Foreign(core_model_loading, "rename_source_key", ("weight_renamings", "weight_converters")),
        Foreign(core_model_loading.WeightTransform, "add_tensor", ("target_key", "source_key", "source_pattern")),
        Foreign(core_model_loading.WeightConverter, "convert", ("layer_name", "model", "config")),
        Foreign(conversion_mapping, "get_model_conversion_mapping", ("key_mapping", "hf_quantizer", "add_legacy")),
        Foreign(modeling_utils, "load_state_dict", ("map_location", "weights_only")),
        Foreign(modeling_utils, "safe_save_file", ("filename", "metadata")),
        Foreign(modeling_utils, "split_torch_state_dict_into_shards", ()),
    ]
