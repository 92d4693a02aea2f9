"""Several hosts: reaching them, starting an agent on each of them, and ending all when one ends badly."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FrameType

from hf_zero.extras.launcher.launch_errors import LaunchFailed, LaunchUsageError
from hf_zero.extras.launcher.launch_plan import JobPlan

# Seconds for a host to answer at all, and for an agent to end its processes: torch's agent kills them after 30.
REACH_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 40.0
_SSH_OPTIONS = ("-o", "PasswordAuthentication=no", "-o", "BatchMode=yes")


@dataclass(frozen=True)
class Transport:
    """The way in which a command gets to a host.

    Attributes:
        kind: "ssh" or "pdsh"; pdsh is called once per host, so that the end of each is seen by itself.
        arguments: More options for that program.
    """

    kind: str = "ssh"
    port: int | None = None
    arguments: tuple[str, ...] = ()

    def check(self) -> None:
        if shutil.which(self.kind) is None:
            raise LaunchUsageError(f"--launcher {self.kind}: {self.kind} is not installed on this host")

    def command(self, host: str, remote: str) -> list[str]:
        if self.kind == "pdsh":
            # pdsh replaces %h and %n by the host's name and number.
            return ["pdsh", "-S", *self.arguments, "-w", host, "--", remote.replace("%", "%%")]
        port = () if self.port is None else ("-p", str(self.port))
        return ["ssh", *_SSH_OPTIONS, *port, *self.arguments, "--", host, remote]

    def environment(self) -> dict[str, str]:
        """Return the environment of the program that connects, on this host."""
        environment = dict(os.environ)
        if self.kind == "pdsh":
            environment["PDSH_RCMD_TYPE"] = "ssh"
            options = [environment.get("PDSH_SSH_ARGS_APPEND", ""), *_SSH_OPTIONS]
            options += [] if self.port is None else ["-p", str(self.port)]
            environment["PDSH_SSH_ARGS_APPEND"] = " ".join(filter(None, options))
        return environment

    def ask(self, host: str, remote: str) -> str:
        """Run `remote` on `host` and return what it prints.

        Raises:
            LaunchUsageError: The host cannot be reached in time, or the command fails there.
        """
        try:
            done = subprocess.run(
                self.command(host, remote),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=REACH_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            reason = f"no answer within {REACH_TIMEOUT_S:.0f} s"
        else:
            if done.returncode == 0:
                lines = done.stdout.splitlines()
                return "\n".join(line.removeprefix(f"{host}: ") if self.kind == "pdsh" else line for line in lines)
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise LaunchUsageError(
            f"host {host} cannot be reached by {self.kind} without a password: {reason}. "
            "Set up ssh keys, take the host out of the hostfile, or start on each host with --no_ssh --node_rank"
        )


def check_reachable(transport: Transport, hosts: Sequence[str]) -> None:
    """Ask every host for a sign of life, all at once; the first in order that gives none is named."""
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        for answer in [pool.submit(transport.ask, host, "hostname") for host in hosts]:
            answer.result()


def address_of(transport: Transport, host: str) -> str:
    """The first address that `host` itself names."""
    lines = transport.ask(host, "hostname -I").split("\n")
    # The lines that a login prints come before.
    addresses = next((line.split() for line in reversed(lines) if line.strip()), [])
    if not addresses:
        raise LaunchUsageError(f"host {host} names no address of its own; give one by --master_addr")
    return addresses[0]


@dataclass
class RemoteJob:
    """An agent on each host, as a child process of ours.

    Args:
        prologue: Shell text that each host runs first: exports, a virtual environment.
    """

    transport: Transport
    plan: JobPlan
    hosts: Sequence[str]
    prologue: str = ""
    _agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self) -> None:
        """Start all agents and wait for them.

        Raises:
            LaunchFailed: One ended badly, or this process got a signal to stop; all of them have ended then.
            LaunchUsageError: A host refused the plan, which it said itself.
        """
        with _signals_raise():
            try:
                self._start()
                self._wait()
            except BaseException:
                self._stop()
                raise

    def _start(self) -> None:
        for rank, host in enumerate(self.hosts):
            words = [sys.executable, "-u", "-m", "hf_zero.extras.launcher.node", self.plan.encode(), str(rank)]
            remote = f"{self.prologue}cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
            self._agents[host] = subprocess.Popen(
                self.transport.command(host, remote),
                env=self.transport.environment(),
                stdin=subprocess.PIPE if self.plan.watch_stdin else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us; the agents end in order
            )

    def _wait(self) -> None:
        running = dict(self._agents)
        while running:
            for host, agent in list(running.items()):
                status = agent.poll()
                if status is None:
                    continue
                del running[host]
                if status == 2:
                    raise LaunchUsageError(f"host {host} refused the job (its message is above)")
                if status != 0:
                    raise LaunchFailed(f"host {host} ended with status {status}; the others were ended")
            time.sleep(0.1)

    def _stop(self) -> None:
        if self.plan.watch_stdin:
            for agent in self._agents.values():
                if agent.stdin is not None:
                    agent.stdin.close()
        else:
            words = [sys.executable, "-m", "hf_zero.extras.launcher.node", "--stop", self.plan.job]
            for host, agent in self._agents.items():
                if agent.poll() is None:
                    with contextlib.suppress(LaunchUsageError):  # the host may be gone
                        self.transport.ask(host, f"{self.prologue}{shlex.join(words)}")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for agent in self._agents.values():
            try:
                agent.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def run_srun(plan: JobPlan, hosts: Sequence[str], arguments: Sequence[str], environment: dict[str, str]) -> None:
    """One agent per host through SLURM's srun, which hands the environment on and ends all when one fails.

    Raises:
        LaunchUsageError: srun is not there, or the hosts do not have the same number of slots from 0 up.
        LaunchFailed: The job failed, or this process got a signal to stop.
    """
    if shutil.which("srun") is None:
        raise LaunchUsageError("--launcher slurm: srun is not installed on this host")
    command = srun_command(plan, hosts, arguments)
    with _signals_raise():
        job = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
        try:
            status = job.wait()
        except BaseException:
            job.terminate()
            job.wait()
            raise
    if status == 2:
        raise LaunchUsageError("a host refused the job (its message is above)")
    if status != 0:
        raise LaunchFailed(f"srun ended with status {status}")


def srun_command(plan: JobPlan, hosts: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """One task per host: the agent of the host, which knows its number from SLURM_NODEID.

    Raises:
        LaunchUsageError: The hosts do not have the same number of slots, from 0 up: srun counts, it does not choose.
    """
    first = plan.devices[0]
    if any(own != first for own in plan.devices) or list(first) != [str(slot) for slot in range(len(first))]:
        raise LaunchUsageError(
            "--launcher slurm needs the same first slots on every host, because srun cannot choose GPUs; "
            "include or exclude whole hosts"
        )
    number = str(plan.num_nodes)
    return [
        *("srun", "--nodes", number, "--ntasks", number, "--ntasks-per-node", "1", "--kill-on-bad-exit=1"),
        *("--nodelist", ",".join(hosts), *arguments),
        *(sys.executable, "-u", "-m", "hf_zero.extras.launcher.node", plan.encode(), "slurm"),
    ]


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end what stands inside by LaunchFailed, once: a second one cannot stop the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise LaunchFailed(f"stopped by {signal.Signals(number).name}; all processes were ended")

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for name, old in before.items():
            signal.signal(name, old if old is not None else signal.SIG_DFL)
