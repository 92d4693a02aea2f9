"""The functions of deepspeed.utils and deepspeed.runtime that scripts import, and its grid of processes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from packaging.version import Version
from torch import nn

from hf_zero.distributed.processes import join_processes
from hf_zero.errors import ConfigError
from hf_zero.extras.monitors.memory_usage import log_memory_usage
from hf_zero.extras.pipeline.layer_partition import split_balanced, split_uniform
from hf_zero.extras.pipeline.topology import PipelineGrid, ProcessTopology

# A release of DeepSpeed says 0.0 of what no kernel of it was built for, and no kernel is here.
_NOT_BUILT = "0.0"
TORCH_INFO = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    **dict.fromkeys(("cuda_version", "nccl_version", "hip_version"), _NOT_BUILT),
    "bf16_support": True,
}

logger = logging.getLogger("hf_zero")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks, with the rank before it; [-1] means all of them. Any rank may call.

    Without a process group every process logs, as rank -1; with one and no `ranks` nobody does, as with DeepSpeed.
    """
    rank = dist.get_rank() if dist.is_initialized() else -1
    chosen = ranks or []
    if rank == -1 or -1 in chosen[:1] or rank in chosen:
        logger.log(level, "[Rank %d] %s", rank, message)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Return the modules of these classes, marked for `get_z3_leaf_modules`. Stage 3 gathers whole layers anyway.

    Raises:
        ConfigError: There is none.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Return the modules of these classes, unmarked. Raises as `set_z3_leaf_modules`."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in `model.named_modules()`; returns (them, names that no module has).

    Raises:
        ConfigError: There is none.
    """
    return _mark_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so. Returns and raises as `set_z3_leaf_modules_by_name`."""
    return _mark_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module, or take its mark away."""
    model._z3_leaf = flag  # type: ignore[assignment]


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return getattr(model, "_z3_leaf", False)


def _mark(model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, required: bool) -> list[nn.Module]:
    kinds = tuple(one for one in classes if not isinstance(one, str))
    names = [one for one in classes if isinstance(one, str)]
    found = [module for module in model.modules() if isinstance(module, kinds) or type(module).__name__ in names]
    return _marked(model, found, [*names, *(one.__name__ for one in kinds)], flag, required)


def _mark_named(
    model: nn.Module, wanted: Sequence[str], fits: Callable[[str, str], bool], flag: bool, required: bool
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    found = {module: None for text in wanted for name, module in modules.items() if fits(name, text)}
    missing = [text for text in wanted if not any(fits(name, text) for name in modules)]
    return _marked(model, list(found), wanted, flag, required), missing


def _marked(
    model: nn.Module, found: list[nn.Module], wanted: Sequence[str], flag: bool, required: bool
) -> list[nn.Module]:
    if required and not found:
        raise ConfigError(f"set_z3_leaf_modules: {type(model).__name__} has no module of {', '.join(wanted)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and what the device and the host hold now. Any rank may call; rank 0 logs.

    Without `force` it does nothing. Max_MA and Max_CA are the peaks since the last call on an accelerator, and since
    the process began without one.
    """
    if force and not (dist.is_initialized() and dist.get_rank() != 0):
        log_memory_usage(message)


class PipelineParallelGrid(PipelineGrid):
    """This process's place in a topology of all processes. See PipelineGrid."""

    def __init__(self, topology: ProcessTopology, process_group: Any = None) -> None:
        if process_group not in (None, dist.group.WORLD):
            raise ConfigError("PipelineParallelGrid(process_group=...): stages span all ranks; remove it")
        world_size = join_processes()
        super().__init__(topology, dist.get_rank() if dist.is_initialized() else 0, world_size)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of contiguous parts, the heaviest as light as can be; the last ones are empty if need be."""
    enough = len(weights) >= num_parts
    return split_balanced(weights, num_parts) if enough else split_uniform(len(weights), num_parts)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func`, whose calls torch's profiler shows by its name."""
    decorated: Callable[..., Any] = torch.profiler.record_function(func.__qualname__)(func)
    return decorated


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """Return the sums of the first 1, 2, ... weights."""
    return list(itertools.accumulate(weights))


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return the text of a call of `base` with these arguments."""
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(given)})"


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether the installed torch is not older than `min_version` and not newer than `max_version`."""
    installed = Version(torch.__version__)
    return not (
        (min_version is not None and installed < Version(str(min_version)))
        or (max_version is not None and installed > Version(str(max_version)))
    )


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """Return `item` with copies of the tensors in its lists, tuples and dicts, each with memory of its own.

    Tensors that are the same memory have one copy: transformers saves tied weights once. `device` None leaves them
    where they are.
    """
    copies: dict[Any, torch.Tensor] = {}

    def copy(one: torch.Tensor) -> torch.Tensor:
        same = one.data_ptr() or id(one), one.dtype, one.shape, one.stride()
        if same not in copies:
            copies[same] = one.detach().to(device, copy=True)
        return copies[same]

    return pytree.tree_map_only(torch.Tensor, copy, item)


def recursive_setattr(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` into the place of the submodule of `model` with this dotted name."""
    model.set_submodule(name, module)
