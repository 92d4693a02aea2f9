"""Reads what a cluster's own starter (srun, mpirun) tells a process, and says it as torchrun does.

torch wants RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. What is set already stays.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hf_zero.errors import ConfigError

DEFAULT_PORT = 29500  # torch's and DeepSpeed's
MOST_HOSTS = 1 << 16  # of a list of hosts; what is beyond is damage
# SLURM numbers steps that are no tasks of a job (batch script, interactive shell, ...) from here up.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class _Mpi:
    """The variables of one MPI's starter; `job` are those that tell one job from another."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]


_MPIS = (
    _Mpi(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    ),
    _Mpi("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ()),
)


def host_id(namespace: str) -> str:
    """Return what no other host has, nor a container with a `namespace` ("net", "pid") of its own. Linux only."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat(f'/proc/self/ns/{namespace}').st_ino}"


def described_processes(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set; empty where this process is alone, or where torchrun did.

    Raises:
        ConfigError: This is one of several processes, but not enough is known of the others.
    """
    if "WORLD_SIZE" in environment:
        return {}
    found = _from_slurm(environment) or _from_mpi(environment)
    return {name: value for name, value in found.items() if value and name not in environment}


def number_in(environment: Mapping[str, str], *names: str) -> int:
    """Return the number in the first of these variables that is set; 0 where none is.

    Raises:
        ConfigError: That is no number.
    """
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,18}", environment[name]):
        raise ConfigError(f"{name}={environment[name]!r}: expected a number")
    return int(environment[name])


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    steps = ("SLURM_STEP_ID", "SLURM_STEPID")
    in_step = any(environment.get(name) for name in steps)
    step = number_in(environment, *steps)
    # The tasks of this step: an interactive shell inside an allocation of four tasks is a step of one.
    count = number_in(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if not in_step or step >= _FIRST_SPECIAL_STEP or count <= 1:
        return {}
    nodes = _slurm_nodes(environment)
    needed = {"SLURM_PROCID": environment.get("SLURM_PROCID"), "SLURM_LOCALID": environment.get("SLURM_LOCALID")}
    missing = [name for name, value in needed.items() if value is None]
    if not nodes and "MASTER_ADDR" not in environment:
        missing.append("SLURM_NODELIST")
    if missing:
        raise ConfigError(f"this is one of {count} tasks of a SLURM step, but {', '.join(missing)} is not set")
    job = number_in(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": _tasks_here(environment),
        "MASTER_ADDR": expand_hosts(nodes)[0] if nodes else "",
        "MASTER_PORT": str(slurm_port(job, step)),
    }


def _slurm_nodes(environment: Mapping[str, str]) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    return next(filter(None, map(environment.get, names)), "")


def slurm_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the hosts of this step, or job, of SLURM; [] outside of one."""
    nodes = _slurm_nodes(environment)
    return expand_hosts(nodes) if nodes else []


def _tasks_here(environment: Mapping[str, str]) -> str:
    """SLURM_STEP_TASKS_PER_NODE is `4(x2),3`: so many tasks on so many nodes, one after the other. "" if not set."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    node, tasks = number_in(environment, "SLURM_NODEID"), ""
    for number, times in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", text):
        node, tasks = node - int(times or 1), number
        if node < 0:
            break
    return tasks


def slurm_port(job: int, step: int) -> int:
    """The same on all hosts, another one for most other jobs, and below the ports that systems give out."""
    return 10_000 + (job + 131 * step) % 20_000


def expand_hosts(text: str) -> list[str]:
    """`gpu[01-03,7]-ib,login1` as [gpu01-ib, gpu02-ib, gpu03-ib, gpu7-ib, login1], as SLURM writes lists of hosts.

    Raises:
        ConfigError: A bracket is not closed, or holds no numbers, or there are more than MOST_HOSTS.
    """
    items = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    hosts = list(islice((host for item in items for host in _expand_brackets(item, text)), MOST_HOSTS + 1))
    if len(hosts) > MOST_HOSTS:
        raise ConfigError(f"{text[:200]!r} are more than {MOST_HOSTS} hosts")
    if not hosts or text.count("[") != text.count("]"):
        raise ConfigError(f"{text!r} is no list of hosts such as node[1-3,7]")
    return hosts


def _expand_brackets(item: str, text: str) -> Iterator[str]:
    bracket = re.search(r"\[([^\]]*)\]", item)
    if bracket is None:
        yield item
        return
    before, after = item[: bracket.start()], item[bracket.end() :]
    for part in bracket[1].split(","):
        bounds = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part, re.ASCII)
        if bounds is None:
            raise ConfigError(f"{text!r} is no list of hosts such as node[1-3,7]: {part!r} is no number or range")
        first, last = bounds[1], bounds[2] or bounds[1]
        for number in range(int(first), int(last) + 1):
            yield from _expand_brackets(f"{before}{number:0{len(first)}d}{after}", text)


def _from_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    for mpi in _MPIS:
        size = number_in(environment, mpi.size)
        if size <= 1:
            continue
        rank, local_rank = environment.get(mpi.rank), environment.get(mpi.local_rank)
        local_size = environment.get(mpi.local_size)
        if rank is None or local_rank is None:
            raise ConfigError(
                f"{mpi.size}={size}: this is one of several processes, but {mpi.rank} or {mpi.local_rank} is not set, "
                "so that each would train a model of its own.\nStart one torchrun per node, or hf-zero launch"
            )
        if "MASTER_ADDR" not in environment and local_size != str(size):
            raise ConfigError(
                f"{mpi.size}={size} processes on several hosts, and MASTER_ADDR is not set: {mpi.name} does not say "
                "where rank 0 is.\nAdd its host to the line: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."
            )
        return {
            "RANK": rank,
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": local_size or "",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_mpi_port(mpi, environment)),
        }
    return {}


def _mpi_port(mpi: _Mpi, environment: Mapping[str, str]) -> int:
    for name in mpi.job:
        if name in environment:
            return 10_000 + zlib.crc32(environment[name].encode()) % 20_000
    return DEFAULT_PORT
