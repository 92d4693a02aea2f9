"""Finds the device of this process and joins the others that a launcher started; how they agree before an engine."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import pickle
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch._C._distributed_c10d import HashStore

from hf_zero.distributed.environment import described_processes, slurm_hosts
from hf_zero.distributed.interface import choose_interface, choose_interface_to
from hf_zero.distributed.process_end import leave_cleanly_at_exit
from hf_zero.distributed.restarts import separate_attempts
from hf_zero.distributed.unusable_device import unusable_accelerator
from hf_zero.errors import ConfigError, DivergenceError, ZeroError
from hf_zero.native.device_files import choosing_variables

_T = TypeVar("_T")

# The paths of frames that are not the user's begin so; torchrun and `python -m` run frozen ones.
_NOT_THE_USERS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sysconfig.get_path("stdlib"), "<frozen")

# Defined while there is a default group, they keep it for ever as a default, and gloo's threads with it. None means
# the default group of the time of a call.
for _function in vars(torch.distributed.nn.functional).values():
    if isinstance(_function, FunctionType) and _function.__defaults__:
        _function.__defaults__ = tuple(
            None if isinstance(one, dist.ProcessGroup) else one for one in _function.__defaults__
        )


def adopt_cluster_variables() -> None:
    """Set the variables that torchrun sets where srun or mpirun started this process; accelerate reads them too.

    Raises:
        ConfigError: This is one of several processes, but not enough is known of the others.
    """
    os.environ.update(described_processes(os.environ))


def launched_processes() -> int:
    """Return the number of processes that train together: those joined, or else those that a launcher described."""
    return dist.get_world_size() if dist.is_initialized() else described_world_size()


def described_world_size() -> int:
    """Return WORLD_SIZE of the environment, 1 where there is none.

    Raises:
        ConfigError: It is no number, or what a process needs to join the others is missing beside it.
    """
    text = os.environ.get("WORLD_SIZE") or "1"
    if not text.isdecimal():
        raise ConfigError(f"the environment variable WORLD_SIZE is {text!r}: expected the number of processes")
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not os.environ.get(name)]
    if int(text) > 1 and missing:
        raise ConfigError(
            f"the environment says WORLD_SIZE={text}, but {', '.join(missing)} is not set: this process cannot join "
            "the others.\nStart them by torchrun, accelerate launch or hf-zero launch, which set all of them; or "
            "unset WORLD_SIZE, for one process."
        )
    return int(text)


def wants_cpu() -> bool:
    """Whether accelerate was told to leave accelerators alone (`accelerate launch --cpu` sets the variable too)."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def ensure_process_group(device: torch.device) -> None:
    """Join the process group that a launcher described in the environment, if there is one and none is joined yet."""
    use_device(device)
    if dist.is_initialized():
        return
    adopt_cluster_variables()
    if described_world_size() <= 1:
        return
    _init_process_group(backend_for(device))


def prepare_to_be_joined() -> None:
    """Get ready for a group that another library makes, as accelerate does. All ranks must call.

    Raises:
        ConfigError: See adopt_cluster_variables and choose_interface.
    """
    adopt_cluster_variables()
    separate_attempts()
    if described_world_size() <= 1 or dist.is_initialized():
        return
    # Without an agent of torchrun the store would live in rank 0, as that of the group will.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        choose_interface(*next(dist.rendezvous("env://")))
    else:
        choose_interface_to(slurm_hosts(os.environ))


def _init_process_group(backend: str, timeout: datetime.timedelta | None = None) -> None:
    """Join the processes that the environment describes. The store comes first: gloo must know the interface.

    `timeout` is that of the store too; None means torch's own for the backend.
    """
    separate_attempts()
    timeout = timeout or dist.distributed_c10d._get_default_timeout(dist.Backend(backend))
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    choose_interface(store, rank, world_size)
    dist.init_process_group(
        backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=world_size, timeout=timeout
    )


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
        init_method: The address where ranks meet, as for torch.distributed.init_process_group; None: the one of the
            environment.
        rank: The number of this process; -1: the environment's.
        world_size: The number of processes; -1: the environment's.
        dist_init_required: False: the processes must have been joined already.
    Raises:
        ConfigError: The backend needs a GPU and there is none, or `dist_init_required` does not hold.
    """
    device = default_device()
    use_device(device)
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError(
            "dist_init_required=False, but no process group exists: call torch.distributed.init_process_group first, "
            "or leave dist_init_required out"
        )
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
    elif described_world_size() > 1:
        _init_process_group(backend, timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    leave_cleanly_at_exit()


def join_processes() -> int:
    """Join the process group as `ensure_process_group` does; returns the number of ranks."""
    ensure_process_group(default_device())
    return dist.get_world_size() if dist.is_initialized() else 1


def default_device() -> torch.device:
    """The accelerator of this process if there is one, else the CPU; what accelerate has chosen already, if it has.

    Raises:
        ConfigError: There is an accelerator that torch cannot use, and nobody has asked for the CPU.
    """
    state = _state_of_accelerate()
    chosen, told = state.get("device"), wants_cpu() or bool(state.get("_cpu"))
    if isinstance(chosen, torch.device) and chosen.type != "cpu" and chosen.index is not None:
        return chosen
    if torch.accelerator.is_available() and not told and (chosen is None or chosen.type != "cpu"):
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        # Processes that see one device each, as SLURM's do, have local ranks beyond it: see refuse_shared_device.
        return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    if not told and (problem := unusable_accelerator()):
        raise ConfigError(problem)
    return torch.device("cpu")


def _state_of_accelerate() -> dict[str, Any]:
    """Its PartialState, empty if there is none: use_cpu=True and Accelerator(cpu=True) are told to it only."""
    state = sys.modules.get("accelerate.state")
    return {} if state is None else dict(state.PartialState._shared_state)


def use_device(device: torch.device) -> None:
    """Make `device` the current one of this thread: collectives of objects, events and kernels that name none take it.

    New threads start on device 0, so each calls this first.
    """
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


@functools.cache
def refuse_shared_device(device: torch.device) -> None:
    """Raise where two ranks would compute on one device. All ranks must call, once they have joined.

    The backend would find out in its first operation, in its own words. Goes through the key-value store.

    Raises:
        ConfigError: On every rank; names the ranks that share a device.
    """
    if device.type == "cpu" or not dist.is_initialized():
        return
    named = all_ranks_give(_identity(device), "devices")
    shared = [[rank for rank, name in enumerate(named) if name == one] for one in dict.fromkeys(named)]
    if doubled := next((ranks for ranks in shared if len(ranks) > 1), None):
        host, count = named[doubled[0]].split(" ")[0], torch.accelerator.device_count()
        raise ConfigError(
            f"rank {dist.get_rank()}: ranks {doubled} are all on one device of host {host} (this rank has {device}, "
            f"of {count} that it sees): each rank needs a device of its own.\nStart one process per device "
            f"(torchrun --nproc_per_node {count}, hf-zero launch --num_gpus {count}), or compute on the CPU with "
            "ACCELERATE_USE_CPU=true."
        )


def _identity(device: torch.device) -> str:
    """Return what no other device of the job has: host and the device's own id, or its place among those visible.

    NCCL takes processes for those of other hosts where their NCCL_HOSTID differs, and then lets them share a device.
    """
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    own = None if properties is None else getattr(properties(device), "uuid", None)
    if own is None:
        visible = [os.environ.get(name, "") for name in choosing_variables(device.type)]
        own = f"{visible}:{device.index}"
    return f"{os.environ.get('NCCL_HOSTID') or socket.gethostname()} {own}"


def backend_for(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device.type)


def all_ranks_give(value: Any, what: str, timeout_s: float | None = None) -> list[Any]:
    """`value` of every rank of the world, in rank order, also where no engine is there yet. All ranks must call.

    Goes through the key-value store, not through a collective, so a rank that is alone can say so. Returns when all
    ranks have read: the process that holds the store may end after it.

    Args:
        value: Small, and picklable.
        what: What the ranks are doing, for the message: the same on all of them.
        timeout_s: Seconds; None means the store's own limit.
    Raises:
        DivergenceError: Some ranks did not come in time; names them.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return [value]
    store: Any = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    turn = store.add(f"hf_zero/{what}/turns/{rank}", 1)  # this rank's calls so far, as many as on the others
    keys = [f"hf_zero/{what}/{turn}/{other}" for other in range(world_size)]
    limit = store.timeout if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    store.set(keys[rank], pickle.dumps(value))
    missing: Any = "some"
    try:
        store.wait(keys, limit)
        everyone = [pickle.loads(given) for given in store.multi_get(keys)]
        missing = [other for other in range(world_size) if store.check([f"{keys[other]}/gave up"])]
    except RuntimeError:  # of each kind of store another one
        with contextlib.suppress(RuntimeError):  # the store has gone with the process that held it
            missing = [other for other in range(world_size) if not store.check([keys[other]])] or missing
            store.set(f"{keys[rank]}/gave up", "")
    if missing:
        raise DivergenceError(
            f"rank {rank}: {what}: rank(s) {missing} did not come within {limit.total_seconds():.0f} s. They have "
            "ended, and say why themselves, or do not make this call, or need a longer time.\n"
            f"Called from: {call_site()}"
        )
    with contextlib.suppress(RuntimeError):
        store.set(f"{keys[rank]}/read", "")
        store.wait([f"{key}/read" for key in keys], limit)
    return everyone


def agree(what: str, work: Callable[[], _T] | None, raise_as: type[ZeroError], *, is_alone: bool = False) -> list[_T]:
    """Do what `Comm.agree` does, before there is an engine: over the key-value store. All ranks must call.

    `is_alone` is true where this process acts for itself, whatever the others do.
    """
    error, mine = attempt(work)
    return agreed([mine] if is_alone else all_ranks_give(mine, what), raise_as, error)


def attempt(
    work: Callable[[], _T] | None, catch: type[Exception] = Exception
) -> tuple[Exception | None, tuple[str | None, _T]]:
    """Run `work`; return its error, and what the other ranks are told: the reason of the error, and the result."""
    try:
        return None, (None, cast(_T, work() if work is not None else None))
    except catch as error:
        reason = str(error) if isinstance(error, ZeroError | OSError) else f"{type(error).__name__}: {error}"
        return error, (reason, cast(_T, None))


def agreed(outcomes: Sequence[tuple[str | None, _T]], raise_as: type[ZeroError], cause: Exception | None) -> list[_T]:
    """Return the results of all ranks, or raise the reasons of those that failed; `cause` is this rank's error."""
    if failed := [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(outcomes) if reason is not None]:
        raise raise_as("\n".join(failed)) from cause
    return [result for _, result in outcomes]


@contextlib.contextmanager
def wrong_on_all(what: str) -> Iterator[None]:
    """Raise a ConfigError of the block, which every rank finds by itself, when the other ranks have come too.

    A rank that ended at once would close connections that another one still makes, and gloo's words would take the
    place of the error there. An error that only this rank finds is raised after 10 s.
    """
    try:
        yield
    except ConfigError:
        with contextlib.suppress(DivergenceError, RuntimeError):
            all_ranks_give(None, what, timeout_s=10.0)
        raise


def call_site(where: BaseException | FrameType | None = None) -> str:
    """File and line of the innermost frame that is the user's own: not hf_zero's, Python's or a library's.

    Args:
        where: An error: look where it was raised; a frame: look there and in its callers; None: look where this
            thread is.
    """
    if isinstance(where, BaseException):
        frames = reversed(list(traceback.walk_tb(where.__traceback__)))
    else:
        frames = traceback.walk_stack(where or sys._getframe())
    for frame, line in frames:
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_THE_USERS) and "site-packages" not in code.co_filename:
            return f"{code.co_filename}:{line} ({code.co_name})"
    return "a thread without code of yours"
