"""What `deepspeed.comm` has, for scripts that use it in the place of torch.distributed: `hf_zero.comm.get_rank()`.

Each name is torch.distributed's own function over the process group that `hf_zero.init_distributed` joined; a group of
one process too. hf_zero's own collectives do not go through here.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from hf_zero.distributed.processes import init_distributed
from hf_zero.engine.comms_summary import show_summary
from hf_zero.engine.engine import live_engines
from hf_zero.errors import StateError

_OF_TORCH = frozenset(
    """ReduceOp ProcessGroup all_gather all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced
    all_to_all all_to_all_single all_gather_coalesced barrier batch_isend_irecv broadcast broadcast_object_list
    destroy_process_group gather gather_object get_backend get_global_rank get_group_rank get_process_group_ranks
    get_rank get_world_size irecv isend is_available is_initialized monitored_barrier new_group P2POp recv reduce
    reduce_scatter reduce_scatter_tensor scatter scatter_object_list send""".split()
)


def get_local_rank() -> int:
    """This process's number on its node, from the launcher; 0 where one process was started alone."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Global ranks of a group, in its order."""
    return list(dist.get_process_group_ranks(group))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print on rank 0 what the collectives of the engines with `comms_logger` have taken, and `return_dict` return it.

    Args:
        show_straggler: Beside it how long this rank has waited for slower ones. Then all ranks must call.
    Raises:
        StateError: No engine has `comms_logger` on.
    """
    engines = sorted(live_engines(), key=lambda one: one.comm.name)
    logs = [(type(one.module).__name__, one.comms_log) for one in engines if one.comms_log is not None]
    if not logs:
        raise StateError('log_summary: no engine logs its collectives. Write "comms_logger": {"enabled": true}.')
    by_name = {"" if len(logs) == 1 else f"{name} {place}: ": log for place, (name, log) in enumerate(logs)}
    found = show_summary(by_name, dist.get_rank() if dist.is_initialized() else 0, show_straggler=show_straggler)
    return found if return_dict else None


_OWN = {
    one.__name__ for one in (init_distributed, get_local_rank, get_world_group, get_all_ranks_from_group, log_summary)
}
# DeepSpeed's other names of a function.
_SAME = {
    "allgather_fn": "all_gather_into_tensor",
    "reduce_scatter_fn": "reduce_scatter_tensor",
    "inference_all_reduce": "all_reduce",
}
NAMES = sorted(_OF_TORCH | _OWN | _SAME.keys())


def __getattr__(name: str) -> Any:
    if name in _OF_TORCH or name in _SAME:
        return getattr(dist, _SAME.get(name, name))
    raise AttributeError(f"module 'hf_zero.comm' has no attribute {name!r}")
