"""One host's part of a job: a torchrun agent that starts its processes and ends them all when one fails.

`python -m hf_zero.extras.launcher.node PLAN NODE_RANK` on each of several hosts; in the launcher's own process where
there is one host. `--stop JOB` ends the agents that a job has on this host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from hf_zero.distributed.environment import expand_hosts
from hf_zero.extras.deepspeed.facade import inherit
from hf_zero.extras.launcher.failures import show_failure
from hf_zero.extras.launcher.launch_errors import LaunchFailed, LaunchUsageError
from hf_zero.extras.launcher.launch_plan import JobPlan, devices_variable
from hf_zero.extras.launcher.worker import cores_here, parse_cores
from hf_zero.native.machine import usable_cores


def port_is_free(port: int) -> bool:
    """Whether this host can listen on the port, at any of its addresses."""
    try:
        if socket.has_dualstack_ipv6():
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", port))
    except OSError:
        return False
    server.close()
    return True


def free_port() -> int:
    """Return a port below those of outgoing connections: none of these takes it before rank 0 listens."""
    chance = random.SystemRandom()  # the seeds of two jobs may be equal
    while not port_is_free(port := chance.randrange(10_000, 32_768)):
        pass
    return port


def run_node(plan: JobPlan, node_rank: int) -> None:
    """Run this host's processes to their end; what they print goes where ours goes.

    Raises:
        LaunchUsageError: The port is taken, a folder cannot be made, or there are too few cores to bind.
        LaunchFailed: A process failed, here or (where it could be seen here) on another host.
    """
    devices = plan.devices[node_rank]
    if node_rank == 0 and not port_is_free(plan.master_port):
        raise LaunchUsageError(
            f"port {plan.master_port} of {socket.gethostname()} is in use; give a free one by --master_port"
        )
    command = _command(plan, len(devices))
    _set_environment(plan, node_rank)
    _run_agent(plan, node_rank, command)


def _command(plan: JobPlan, processes: int) -> list[str]:
    """Return the command of each process. torch's agent replaces ${local_rank} by the process's number."""
    options = {"kind": plan.kind, **_worker_options(plan, processes)}
    local_rank = ["--local_rank=${local_rank}"] if plan.pass_local_rank else []
    # A $ of the user's own must come through.
    own, script, *arguments = (part.replace("$", "$$") for part in (json.dumps(options), plan.script, *plan.arguments))
    return [sys.executable, "-u", "-m", "hf_zero.extras.launcher.worker", own, script, *local_rank, *arguments]


def _worker_options(plan: JobPlan, processes: int) -> dict[str, object]:
    """Return the cores that the processes share out, and the file that gets their output; {} for neither."""
    if plan.log_folder is None and plan.bind_cores is None:
        return {}
    if os.name == "nt":
        raise LaunchUsageError(
            "--enable_each_rank_log, --bind_cores_to_rank and --bind_core_list do not work on Windows: leave them out"
        )
    options: dict[str, object] = {}
    if plan.bind_cores is not None:
        cores = parse_cores(plan.bind_cores) if plan.bind_cores else cores_here()
        if len(cores) < processes:
            raise LaunchUsageError(f"--bind_cores_to_rank: {len(cores)} cores for {processes} processes; start fewer")
        options["cores"] = cores
    if plan.log_folder is not None:
        try:
            Path(plan.log_folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchUsageError(f"--enable_each_rank_log {plan.log_folder}: {error.strerror}") from None
        options["log"] = os.path.join(plan.log_folder, time.strftime("%Y%m%d%H%M%S"))
    return options


def _set_environment(plan: JobPlan, node_rank: int) -> None:
    """Set the environment of the processes: torch's agent hands its own on to them."""
    devices = plan.devices[node_rank]
    if plan.use_devices:
        os.environ[devices_variable()] = ",".join(devices)
    import torch

    from hf_zero.distributed.processes import wants_cpu
    from hf_zero.distributed.unusable_device import unusable_accelerator

    if not torch.accelerator.is_available():
        if not wants_cpu() and (problem := unusable_accelerator()):
            raise LaunchUsageError(problem)
        # accelerate, which counts one process where it finds no accelerator, would not see the others.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    if plan.as_deepspeed:
        inherit()
    os.environ["CROSS_RANK"], os.environ["CROSS_SIZE"] = str(node_rank), str(plan.num_nodes)
    os.environ["LOCAL_SIZE"] = str(len(devices))
    # Several processes with as many threads as there are cores would be in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // len(devices))))


def _run_agent(plan: JobPlan, node_rank: int, command: list[str]) -> None:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if plan.kind == "program" and shutil.which(plan.script) is None:
        raise LaunchUsageError(f"there is no program {plan.script!r}")
    host = f"[{plan.master_addr}]" if ":" in plan.master_addr else plan.master_addr
    config = LaunchConfig(
        min_nodes=plan.num_nodes,
        max_nodes=plan.num_nodes,
        nproc_per_node=len(plan.devices[node_rank]),
        run_id=plan.job or "none",
        rdzv_backend="static",
        rdzv_endpoint=f"{host}:{plan.master_port}",
        rdzv_configs={"rank": node_rank, "timeout": 900},
        max_restarts=0,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="hf_zero-launch-") as errors:
            # Its lines on processes that fail would stand above ours, which says more.
            logging.getLogger(DefaultLogsSpecs.__module__).setLevel(logging.CRITICAL)
            config.logs_specs = DefaultLogsSpecs(log_dir=errors)
            elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        raise LaunchFailed(
            show_failure(error.failures, plan.arguments, pass_local_rank=plan.pass_local_rank)
        ) from None
    except SignalException as error:
        _end_children()
        raise LaunchFailed(f"stopped by {error.sigval.name}; all processes were ended") from None
    except DistError as error:
        reason = str(error).splitlines()[0]
        raise LaunchFailed(
            f"{socket.gethostname()} could not join the others at {host}:{plan.master_port}: {reason}"
        ) from None


def _end_children() -> None:
    """torch's agent ends the processes that it has started, but not those it was starting when the signal came."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


@contextlib.contextmanager
def _found_by(job: str, node_rank: int) -> Iterator[None]:
    """Leave our process id where `stop` finds it."""
    path = Path(tempfile.gettempdir(), f"hf_zero-{job}-{node_rank}.pid")
    path.write_text(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def stop(job: str) -> None:
    """End the agents of `job` on this host, and with them their processes."""
    for path in Path(tempfile.gettempdir()).glob(f"hf_zero-{job}-*.pid"):
        with contextlib.suppress(OSError, ValueError, psutil.Error):  # it ended, or begins, at this moment
            agent = psutil.Process(int(path.read_text()))
            # The number may belong to somebody else by now.
            if "hf_zero.extras.launcher.node" in agent.cmdline():
                agent.terminate()


def _end_with_stdin() -> None:
    """End ourselves when the other end of standard input closes: ssh does that when the launcher is gone."""
    watched = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # the processes inherit this one

    def watch() -> None:
        while os.read(watched, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main(argv: Sequence[str]) -> int:
    if argv[0] == "--stop":
        stop(argv[1])
        return 0
    plan = JobPlan.decode(argv[0])
    by_slurm = argv[1] == "slurm"
    node_rank = int(os.environ["SLURM_NODEID"] if by_slurm else argv[1])
    if by_slurm and not plan.master_addr:
        plan = dataclasses.replace(plan, master_addr=expand_hosts(os.environ["SLURM_STEP_NODELIST"])[0])
    if plan.watch_stdin:
        _end_with_stdin()
    try:
        with _found_by(plan.job, node_rank):
            run_node(plan, node_rank)
    except (LaunchUsageError, LaunchFailed) as error:
        sys.stderr.write(f"hf-zero launch: error: {error}\n")
        return 2 if isinstance(error, LaunchUsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
