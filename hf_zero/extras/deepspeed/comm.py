"""The functions of `hf_zero.comm` that torch.distributed does not have. names.py has the list of all of them.

hf_zero's own collectives do not go through here.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from hf_zero.engine.engine import live_engines
from hf_zero.errors import StateError
from hf_zero.extras.monitors.comms_summary import log_of, show_summary


def get_local_rank() -> int:
    """Return this process's number on its node, from the launcher; 0 if one process was started alone."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_rank_from_launcher() -> int:
    """Return this process's number among all, from the launcher; 0 if one process was started alone."""
    return int(os.environ.get("RANK", "0"))


def available() -> bool:
    """Whether torch.distributed has the operation that is asked for: always."""
    return True


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of a group, in its order."""
    return list(dist.get_process_group_ranks(group))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print on rank 0 what the collectives of the engines with `comms_logger` have taken, and `return_dict` return it.

    Args:
        show_straggler: Beside it how long this rank has waited for slower ones. Then all ranks must call.
    Raises:
        StateError: No engine has `comms_logger` on.
    """
    engines = sorted(live_engines(), key=lambda one: one.comm.name)
    logs = [(type(one.module).__name__, log) for one in engines if (log := log_of(one)) is not None]
    if not logs:
        raise StateError('log_summary: no engine logs its collectives. Write "comms_logger": {"enabled": true}.')
    by_name = {"" if len(logs) == 1 else f"{name} {place}: ": log for place, (name, log) in enumerate(logs)}
    found = show_summary(by_name, dist.get_rank() if dist.is_initialized() else 0, show_straggler=show_straggler)
    return found if return_dict else None
