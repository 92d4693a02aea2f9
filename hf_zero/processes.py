"""How this process finds its device and joins the others that a launcher started. No collectives."""

from __future__ import annotations

import atexit
import functools
import os
import traceback
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hf_zero.errors import ConfigError


def ensure_process_group(device: torch.device) -> None:
    """Join the process group that a launcher described in the environment, if there is one and none is joined yet."""
    if dist.is_initialized():
        return
    if "WORLD_SIZE" not in os.environ:
        _check_started_alone()
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return
    dist.init_process_group(backend_for(device))


def join_processes() -> int:
    """Join the process group as `ensure_process_group` does; returns the number of ranks."""
    ensure_process_group(default_device())
    return dist.get_world_size() if dist.is_initialized() else 1


def _check_started_alone() -> None:
    """Refuse to train N separate models because N processes were started without torch's launcher."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(os.environ.get(name) or "1") > 1:
            raise ConfigError(
                f"{name}={os.environ[name]}: this is one of several processes, but WORLD_SIZE and MASTER_ADDR are not "
                "set, so each of them would train a model of its own.\nStart one torchrun (or accelerate launch) per "
                "node instead: it starts the processes of the node and tells them of each other."
            )


@functools.cache
def leave_cleanly_at_exit() -> None:
    """gloo's threads abort a process that exits while a group exists; a job that succeeded would report a failure."""

    def leave() -> None:
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()

    atexit.register(leave)


def default_device() -> torch.device:
    """The accelerator of this process if there is one, else the CPU."""
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if torch.accelerator.is_available() and not use_cpu:
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    return torch.device("cpu")


def backend_for(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device.type)


def named_by_all(names: Iterable[str], purpose: str) -> set[str]:
    """Those of `names` that every rank gives, through the key-value store. All ranks must call, alike."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return set(names)
    store = dist.distributed_c10d._get_default_store()
    rank, key = dist.get_rank(), f"hf_zero/{purpose}"
    turn = store.add(f"{key}/turns/{rank}", 1)  # this rank's calls so far, as many as on the others
    store.set(f"{key}/{turn}/{rank}", "\n".join(names))
    given = [store.get(f"{key}/{turn}/{other}").decode().split("\n") for other in range(dist.get_world_size())]
    return set.intersection(*map(set, given))


def call_site() -> str:
    """File and line of the innermost frame that is the user's own: not hf_zero's, nor of an installed library."""
    here = os.path.dirname(os.path.abspath(__file__))
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(here) and "site-packages" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return "hf_zero"
