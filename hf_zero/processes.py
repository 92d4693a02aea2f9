"""How this process finds its device and joins the others that a launcher started. No collectives."""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import traceback
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hf_zero.cluster import described_processes
from hf_zero.errors import ConfigError


def adopt_cluster_variables() -> None:
    """Where srun or mpirun started this process, set the variables that torchrun sets; accelerate reads them too.

    Raises:
        ConfigError: This is one of several processes, but not enough is known of the others.
    """
    os.environ.update(described_processes(os.environ))


def ensure_process_group(device: torch.device) -> None:
    """Join the process group that a launcher described in the environment, if there is one and none is joined yet."""
    if dist.is_initialized():
        return
    adopt_cluster_variables()
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return
    dist.init_process_group(backend_for(device))


def init_distributed(
    dist_backend: str | None = None,
    *,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """deepspeed.init_distributed: join the other processes, if this process has not joined them yet.

    Without a launcher (a notebook, `python script.py`) the group has this process only, and takes no port. All ranks
    must call.

    Args:
        dist_backend: torch's name of one; None means NCCL where there is a GPU, else gloo.
        auto_mpi_discovery: Take the variables of srun or mpirun where torchrun's are not set.
        distributed_port: The port of rank 0, where the environment names none.
        verbose: Taken for DeepSpeed's sake; nothing is printed.
        timeout: None means DEEPSPEED_TIMEOUT (minutes) where that is set, else torch's own.
        init_method, rank, world_size: As for torch.distributed.init_process_group, in the place of the environment.
        dist_init_required: False: the processes must have been joined already.
    Raises:
        ConfigError: The backend needs a GPU and there is none, or `dist_init_required` does not hold.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError(
            "dist_init_required=False, but no process group exists: call torch.distributed.init_process_group first, "
            "or leave dist_init_required out"
        )
    device = default_device()
    if dist_backend == "nccl" and device.type == "cpu":
        raise ConfigError("dist_backend='nccl' needs a GPU, and this process has none: leave dist_backend out")
    if timeout is None and "DEEPSPEED_TIMEOUT" in os.environ:
        timeout = datetime.timedelta(minutes=float(os.environ["DEEPSPEED_TIMEOUT"]))
    if distributed_port is not None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if auto_mpi_discovery:
        adopt_cluster_variables()
    backend = dist_backend or backend_for(device)
    if init_method is not None:
        dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    leave_cleanly_at_exit()


def join_processes() -> int:
    """Join the process group as `ensure_process_group` does; returns the number of ranks."""
    ensure_process_group(default_device())
    return dist.get_world_size() if dist.is_initialized() else 1


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
