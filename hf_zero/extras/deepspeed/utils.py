"""The functions of deepspeed.utils and deepspeed.runtime that scripts import, and its grid of processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn

from hf_zero.distributed.processes import join_processes
from hf_zero.errors import ConfigError
from hf_zero.extras.monitors.memory_usage import log_memory_usage
from hf_zero.extras.pipeline.topology import PipelineGrid, ProcessTopology
from hf_zero.optim.schedule_types import TYPES

VALID_LR_SCHEDULES = list(TYPES)

logger = logging.getLogger("hf_zero")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks, with the rank before it; [-1] means all of them. Any rank may call.

    Without a process group every process logs, as rank -1; with one and no `ranks` nobody does, as with DeepSpeed.
    """
    rank = dist.get_rank() if dist.is_initialized() else -1
    chosen = ranks or []
    if rank == -1 or -1 in chosen[:1] or rank in chosen:
        logger.log(level, "[Rank %d] %s", rank, message)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the modules of these classes. Nothing is set: stage 3 gathers a layer as a whole, experts included.

    Raises:
        ConfigError: There is none.
    """
    wanted = [one if isinstance(one, str) else one.__name__ for one in leaf_module_classes]
    found = [module for module in model.modules() if type(module).__name__ in wanted]
    if not found:
        raise ConfigError(f"set_z3_leaf_modules: {type(model).__name__} has no module of {', '.join(wanted)}")
    return found


# Nothing is set, so nothing is to be taken back.
unset_z3_leaf_modules = set_z3_leaf_modules


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


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """Return `item` with copies of the tensors in its lists, tuples and dicts, each with memory of its own.

    `device` None leaves them where they are.
    """
    return pytree.tree_map_only(torch.Tensor, lambda one: one.detach().to(device, copy=True), item)
