"""Starts the ranks of a check: processes with the variables that torchrun sets, or torchrun itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.extras.launcher.node import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
STACKS_TAKE_S = 5  # for a rank that is killed to print its stacks


@dataclass(frozen=True)
class Ended:
    """The end of a rank."""

    status: int | None  # None: it had to be killed
    seconds: float  # from the start
    text: str  # what it printed, at most the last 8000 characters


def environment() -> dict[str, str]:
    """The environment of processes of the smoke runs."""
    paths = [str(REPOSITORY), str(REPOSITORY / "scripts"), os.environ.get("PYTHONPATH", "")]
    given = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **given, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def run(program: Sequence[str], count: int, *, timeout_s: float) -> list[Ended]:
    """Run `program` on `count` ranks until all have ended; who has not after `timeout_s` is killed."""
    env = environment() | {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env.setdefault("OMP_NUM_THREADS", "1")
    with contextlib.ExitStack() as stack:
        started, files, processes = time.monotonic(), [], []
        for rank in range(count):
            files.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *program]
            process = subprocess.Popen(command, env=own, stdout=files[-1], stderr=subprocess.STDOUT)
            processes.append(process)
        ends = dict(_ends(processes, started, timeout_s))
        return [Ended(*ends[rank], _tail(file)) for rank, file in enumerate(files)]


def _ends(
    processes: Sequence[subprocess.Popen[Any]], started: float, timeout_s: float
) -> Iterator[tuple[int, tuple[int | None, float]]]:
    left = dict(enumerate(processes))
    try:
        while left and time.monotonic() < started + timeout_s:
            for rank, process in list(left.items()):
                if process.poll() is not None:
                    del left[rank]
                    yield rank, (process.returncode, time.monotonic() - started)
            time.sleep(0.05)
    finally:
        for process in left.values():
            process.send_signal(signal.SIGABRT)  # faulthandler prints where it stands
        for process in left.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_TAKE_S)
            process.kill()
            process.wait()
    for rank in left:
        yield rank, (None, time.monotonic() - started)


def run_under_torchrun(program: Sequence[str], count: int, *, timeout_s: float) -> Ended:
    """Run `program` by torchrun, with its own way to find a port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    started = time.monotonic()
    env = environment()
    env.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen([*command, *program], env=env, stdout=file, stderr=subprocess.STDOUT)
        status = dict(_ends([process], started, timeout_s))[0][0]
        return Ended(status, time.monotonic() - started, _tail(file))


def _tail(file: Any) -> str:
    file.seek(0)
    return str(file.read())[-8000:]
