"""The way from a launch line to running processes: what DeepSpeed's options mean, and whether they can be obeyed."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import uuid
from collections.abc import Mapping
from pathlib import Path

from hf_zero.distributed.environment import DEFAULT_PORT, expand_hosts, number_in, slurm_port
from hf_zero.extras.launcher.forwarding import environment_files, exported, read_environment_file, shell_exports
from hf_zero.extras.launcher.hosts import RemoteJob, Transport, address_of, check_reachable, run_srun
from hf_zero.extras.launcher.launch_errors import LaunchUsageError
from hf_zero.extras.launcher.launch_plan import JobPlan, Kind, devices_variable
from hf_zero.extras.launcher.node import free_port, run_node
from hf_zero.extras.launcher.resources import (
    Slots,
    check_host,
    parse_node_specs,
    read_hostfile,
    select,
    slot_number,
    trim,
)
from hf_zero.extras.launcher.script import takes_local_rank

DEFAULT_HOSTFILE = "/job/hostfile"  # DeepSpeed's
LAUNCHERS = ("ssh", "pdsh", "slurm")
_LOCALHOST = "localhost"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """The options of the launch line, by DeepSpeed's names; None, False or "" where one was not given."""

    script: str
    script_arguments: list[str] = dataclasses.field(default_factory=list)
    num_gpus: int | None = None
    num_nodes: int | None = None
    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    master_addr: str = ""
    master_port: int | None = None
    launcher: str = "ssh"
    launcher_args: str = ""
    ssh_port: int | None = None
    no_ssh: bool = False
    node_rank: int | None = None
    no_ssh_check: bool = False
    force_multi: bool = False
    venv_script: str | None = None
    module: bool = False
    no_python: bool = False
    as_deepspeed: bool = False
    no_local_rank: bool = False
    pass_local_rank: bool = False
    enable_each_rank_log: str | None = None
    bind_cores_to_rank: bool = False
    bind_core_list: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_gpus", "num_nodes", "node_rank"):
            if getattr(self, name) == -1:  # DeepSpeed's "not given"
                object.__setattr__(self, name, None)


def launch(options: LaunchOptions) -> None:
    """Run the job to its end. The log names where the processes run, and what of the line had no effect.

    Raises:
        LaunchUsageError: The line cannot be obeyed; nothing runs.
        LaunchFailed: The job failed, or this process got a signal to stop.
    """
    _check(options)
    hosts = read_hostfile(options.hostfile or DEFAULT_HOSTFILE)
    if hosts is None and options.hostfile:
        logger.warning(f"there is no hostfile {options.hostfile}: this host only")
    if options.launcher == "slurm":
        _launch_by_slurm(options, hosts)
    elif hosts is None:
        _launch_here(options)
    else:
        slots = trim(select(hosts, options.include, options.exclude), options.num_nodes, options.num_gpus)
        if options.no_ssh:
            _launch_part(options, slots)
        elif len(slots) > 1 or options.force_multi:
            _launch_on(options, slots)
        else:
            names = tuple(str(slot) for slot in next(iter(slots.values())))
            _run_here(options, names, has_gpus=_count_gpus() > 0)


def _check(options: LaunchOptions) -> None:
    """Raise LaunchUsageError for what is wrong with the line itself."""
    if options.launcher not in LAUNCHERS:
        raise LaunchUsageError(
            f"--launcher {options.launcher} is not supported, only {', '.join(LAUNCHERS)}. "
            "Under mpirun start the script itself: hf_zero reads Open MPI's variables"
        )
    if options.module and options.no_python:
        raise LaunchUsageError("--module and --no_python exclude each other")
    if options.pass_local_rank and options.no_local_rank:
        raise LaunchUsageError("--pass_local_rank and --no_local_rank exclude each other")
    if (options.include or options.exclude) and (options.num_nodes is not None or options.num_gpus is not None):
        raise LaunchUsageError("--num_nodes and --num_gpus cannot be given with --include or --exclude")
    for option, port in (("--master_port", options.master_port), ("--ssh_port", options.ssh_port)):
        if port is not None and not 0 < port < 65536:
            raise LaunchUsageError(f"{option} {port}: give a number from 1 to 65535")
    if options.master_addr:
        check_host(options.master_addr, "--master_addr")
    if options.num_gpus is not None:
        slot_number(str(max(options.num_gpus, 0)), "--num_gpus")
    if options.node_rank is not None and not options.no_ssh:
        raise LaunchUsageError("--node_rank is for --no_ssh: otherwise this line is given once, for all hosts")


def _plan(options: LaunchOptions, devices: tuple[tuple[str, ...], ...], master_addr: str, port: int) -> JobPlan:
    kind: Kind = "program" if options.no_python else "module" if options.module else "file"
    declared = not options.no_local_rank and takes_local_rank(options.script, kind)
    binds = options.bind_cores_to_rank or options.bind_core_list is not None
    return JobPlan(
        devices=devices,
        master_addr=master_addr,
        master_port=port,
        script=options.script,
        arguments=tuple(options.script_arguments),
        kind=kind,
        as_deepspeed=options.as_deepspeed,
        pass_local_rank=options.pass_local_rank or declared,
        bind_cores=(options.bind_core_list or "") if binds else None,
        log_folder=options.enable_each_rank_log,
    )


# -------------------------------------------------------------------- this host
def _launch_here(options: LaunchOptions) -> None:
    if options.num_nodes is not None and options.num_nodes > 1:
        raise LaunchUsageError(
            f"--num_nodes {options.num_nodes}, but no hostfile names the hosts: add --hostfile FILE"
        )
    if options.no_ssh:
        raise LaunchUsageError("--no_ssh needs a --hostfile that names all hosts, the same one on each of them")
    variable = devices_variable()
    visible = [name for name in os.environ.get(variable, "").split(",") if name.strip()]
    if visible and (options.include or options.exclude):
        logger.warning(f"{variable}={','.join(visible)} gives way to --include and --exclude")
        del os.environ[variable]
        visible = []
    gpus = _count_gpus()
    # Without GPUs, slots are processes, and there are as many as are asked for.
    named = parse_node_specs(options.include, "--include") if options.include else {}
    count = gpus or max(options.num_gpus or 1, *(slot + 1 for own in named.values() for slot in own), 1)
    slots = trim(select({_LOCALHOST: count}, options.include, options.exclude), None, options.num_gpus)
    if options.force_multi:
        _launch_on(options, slots)
        return
    names = tuple(visible[slot] if gpus and visible else str(slot) for slot in slots[_LOCALHOST])
    _run_here(options, names, has_gpus=gpus > 0)


def _count_gpus() -> int:
    import torch

    return torch.accelerator.device_count()


def _run_here(options: LaunchOptions, names: tuple[str, ...], *, has_gpus: bool) -> None:
    if options.venv_script:
        raise LaunchUsageError("--venv_script is for other hosts: activate the environment on this one first")
    if not options.module and not options.no_python and not Path(options.script).is_file():
        raise LaunchUsageError(f"there is no script {options.script!r}")
    port = options.master_port or free_port()
    plan = _plan(options, (names,), options.master_addr or "127.0.0.1", port)
    where = f"GPU {','.join(names)}" if has_gpus else "CPU"
    logger.info(f"{_processes(len(names))} on this host ({where}), rank 0 at {plan.master_addr}:{port}")
    run_node(dataclasses.replace(plan, use_devices=has_gpus), 0)


def _launch_part(options: LaunchOptions, slots: Slots) -> None:
    """This host's processes of a job whose line is given on every host."""
    rank = options.node_rank
    if rank is None or not 0 <= rank < len(slots):
        raise LaunchUsageError(
            f"--no_ssh: give each of the hosts ({', '.join(slots)}) its --node_rank, 0 to {len(slots) - 1}"
        )
    master = options.master_addr or next(iter(slots))
    plan = _plan(options, _names(slots), master, options.master_port or DEFAULT_PORT)
    logger.info(
        f"{_processes(len(plan.devices[rank]))} as host {rank} of {len(slots)}, rank 0 at {master}:{plan.master_port}"
    )
    run_node(dataclasses.replace(plan, use_devices=_count_gpus() > 0), rank)


# -------------------------------------------------------------------- several hosts
def _launch_on(options: LaunchOptions, slots: Slots) -> None:
    transport = Transport(options.launcher, options.ssh_port, tuple(_words(options.launcher_args)))
    transport.check()
    hosts = list(slots)
    if not options.no_ssh_check:
        check_reachable(transport, hosts)
    master = options.master_addr or ("127.0.0.1" if hosts == [_LOCALHOST] else address_of(transport, hosts[0]))
    plan = dataclasses.replace(
        _plan(options, _names(slots), master, options.master_port or DEFAULT_PORT),
        job=uuid.uuid4().hex,
        watch_stdin=options.launcher == "ssh",  # pdsh hands no standard input on
    )
    count = sum(len(own) for own in slots.values())
    logger.info(
        f"{_processes(count)} on {len(hosts)} hosts ({', '.join(hosts)}), rank 0 at {master}:{plan.master_port}"
    )
    exports = shell_exports(exported(os.environ, os.getcwd()), _from_files())
    source = f". {shlex.quote(options.venv_script)}; " if options.venv_script else ""
    RemoteJob(transport, plan, hosts, source + exports).run()


def _launch_by_slurm(options: LaunchOptions, hosts: Mapping[str, int] | None) -> None:
    if options.no_ssh or options.venv_script:
        raise LaunchUsageError("--launcher slurm: --no_ssh and --venv_script are for the other launchers")
    if hosts is None:
        hosts = _allocated(options)
    slots = trim(select(hosts, options.include, options.exclude), options.num_nodes, options.num_gpus)
    allocation = os.environ.get("SLURM_JOB_ID")
    job = number_in(os.environ, "SLURM_JOB_ID")
    port = options.master_port or (DEFAULT_PORT if allocation is None else slurm_port(job, 0))
    plan = dataclasses.replace(
        _plan(options, _names(slots), options.master_addr, port),
        job=uuid.uuid4().hex,
        use_devices=False,  # SLURM sets what a task may see
    )
    arguments = _words(options.launcher_args)
    if options.num_gpus is not None and allocation is None:
        arguments += ["--gpus-per-node", str(options.num_gpus)]  # srun makes one
    files = {name: os.path.expandvars(value) for name, value in _from_files().items()}
    logger.info(f"{_processes(sum(map(len, slots.values())))} on {len(slots)} hosts by srun")
    run_srun(plan, list(slots), arguments, {**exported(os.environ, os.getcwd()), **files})


def _allocated(options: LaunchOptions) -> dict[str, int]:
    """The hosts of the SLURM allocation that this process is in, each with the slots that it has."""
    nodes = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST")
    if not nodes:
        raise LaunchUsageError("--launcher slurm: give a --hostfile, or start inside an allocation (salloc, sbatch)")
    count = options.num_gpus or number_in(os.environ, "SLURM_GPUS_ON_NODE")
    if count < 1:
        raise LaunchUsageError("--launcher slurm: this allocation has no GPUs; give --num_gpus processes")
    hosts = expand_hosts(nodes)
    for host in hosts:
        check_host(host, "SLURM_JOB_NODELIST")
    return dict.fromkeys(hosts, slot_number(str(count), "SLURM_GPUS_ON_NODE"))


def _words(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise LaunchUsageError(f"--launcher_args {arguments}: {error}") from None


def _from_files() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in environment_files():
        logger.info(f"environment of the hosts: {path}")
        found.update(read_environment_file(path))
    return found


def _names(slots: Slots) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(str(slot) for slot in own) for own in slots.values())


def _processes(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"
