"""`hf_zero.checkpointing`: deepspeed.checkpointing's names. Everything else calls torch.utils.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from hf_zero.config import ZeroConfig
from hf_zero.config.resolved import ActivationCheckpointing
from hf_zero.distributed.processes import default_device
from hf_zero.errors import ConfigError
from hf_zero.extras.activations import active
from hf_zero.extras.activations.checkpoint import checkpoint as _checkpoint
from hf_zero.extras.activations.rng_tracker import TRACKER, RNGStates, reseed_model_parallel, seed_model_parallel

_BLOCK = "activation_checkpointing"
# The last `configure` has set these: the group that it was given, and the function that ends it.
_mpu: Any = None
_end: Callable[[], None] | None = None


def configure(
    mpu_: Any = None,
    deepspeed_config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set activation checkpointing for this process: of `checkpoint` here, of torch's own, of models that call it.

    A model's engine does it for the block of its configuration; this is for scripts without one, to change single
    keys, and to name a group. The last call counts, or the last engine with the block.

    Args:
        mpu_: Knows which ranks share the inputs of checkpointed regions: an object with get_model_parallel_group (or
            get_tensor_model_parallel_group), or the process group itself. None: the one that was named before; where
            there was none, no ranks do.
        deepspeed_config: A configuration with an activation_checkpointing block; None: what holds now.
        partition_activations, ...: The keys of the block in DeepSpeed's order; None leaves a key as it is.
    Raises:
        ConfigError: Everything that is wrong with the keys, at once.
    """
    global _end, _mpu
    given = {
        "partition_activations": partition_activations,
        "cpu_checkpointing": checkpoint_in_cpu,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    keys = {**_keys_now(deepspeed_config), **{name: value for name, value in given.items() if value is not None}}
    checked = ZeroConfig.load({_BLOCK: keys}, defer=True)
    if problems := checked.check():
        raise ConfigError("hf_zero.checkpointing.configure: " + "\n".join(map(str, problems)))
    if mpu_ is not None:
        active.share_inputs(_group_of(mpu_))
        _mpu = mpu_
    settings = ActivationCheckpointing(**checked.get(_BLOCK, {}))
    if _end is not None:
        _end()
    _end = active.use(settings, default_device(), dist.get_rank() if dist.is_initialized() else 0)


def set_num_layers(nlayers: int) -> None:
    """Set how many regions of a forward the memory for saved inputs is made for: `configure(num_checkpoints=...)`."""
    configure(num_checkpoints=nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn it on or off that each rank of the group keeps its part: `configure(partition_activations=...)`."""
    configure(partition_activations=partition_activation)


def is_configured() -> bool:
    """Whether `configure` was called, or an engine has an activation_checkpointing block."""
    return active.current() is not None


def reset() -> None:
    """Give back memory of saved inputs that no backward is going to need, as after an evaluation."""
    if (now := active.current()) is not None:
        now.saved.release_idle()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, which keeps only its inputs and is computed again in backward. Reentrant.

    Tensors in tuples, lists and dicts, and those given by keyword, are inputs too. All else is given as it is.
    """
    return _checkpoint(function, args, kwargs, use_reentrant=True)


def get_cuda_rng_tracker() -> RNGStates:
    """The named states of the random number generator of this process's device."""
    return TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the ranks of a tensor-parallel group: `seed` for what they compute alike, a state of its own for each.

    The group is that of `configure`; without one this is its rank 0. Inside of `get_cuda_rng_tracker().fork()` random
    numbers are the rank's own.
    """
    seed_model_parallel(seed, _rank_in_group())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the rank's own state anew, after `model_parallel_cuda_manual_seed`; what ranks compute alike goes on."""
    reseed_model_parallel(seed, _rank_in_group())


def _rank_in_group() -> int:
    group = _group_of(_mpu)
    return 0 if group is None else dist.get_rank(group)


def _keys_now(config: Any) -> dict[str, Any]:
    """Return the block of `config`, or where there is none the keys that hold now."""
    if config is not None:
        return dict(ZeroConfig.load(config).get(_BLOCK, {}))
    now = active.current()
    return {} if now is None else {name: value for name, value in vars(now.settings).items() if value is not None}


def _group_of(mpu: Any) -> dist.ProcessGroup | None:
    """Return the group that `mpu` names; DeepSpeed asks for these names in this order."""
    if mpu is None or isinstance(mpu, dist.ProcessGroup):
        return mpu
    for name in ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            group: dist.ProcessGroup | None = getattr(mpu, name)()
            return group
    raise ConfigError(
        f"hf_zero.checkpointing.configure: {type(mpu).__name__} names no group: expected a process group, or an "
        "object with get_model_parallel_group() or get_tensor_model_parallel_group()"
    )
