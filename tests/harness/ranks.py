"""Runs a function on several ranks: `run_ranks(function, world_size, *args)` returns one result per rank.

The ranks are processes of a gloo group on this machine, forked for the job (see `forkserver`). Nothing can hang: a
job over its time limit fails the test with the stacks of the ranks that did not end.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hf_zero.extras.launcher.node import free_port
from tests.harness import transport
from tests.harness.forkserver import Job, Report
from tests.harness.in_memory import memory_folder

_ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """The outcome of a rank that raised, where `run_ranks(..., expect_error=True)` is called."""

    rank: int
    kind: str  # class name of the exception; "Killed" or "Died" where there was none
    message: str
    traceback: str
    exception: BaseException | None  # None if it could not be pickled


class _ForkServer:
    """The process that forks the ranks; started at the first job, and again after it died.

    Args:
        paths: What its Python looks through before this project.
    """

    def __init__(self, *paths: Path) -> None:
        self._python_path = os.pathsep.join(
            [*map(str, paths), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, job: Job) -> Report:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(job)
            if not self._connection.poll(job.timeout_s + 60):
                raise EOFError("no answer")
            report: Report = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            pytest.fail(f"the fork server died during a job: {error!r}")
        return report

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": self._python_path}
        env.setdefault("TOKENIZERS_PARALLELISM", "false")
        env["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a fork server has no threads, not even Arrow's
        env.setdefault("CUDA_VISIBLE_DEVICES", "")  # the ranks of these tests are CPU processes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.forkserver", str(theirs.fileno())],
            cwd=_ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._connection = Connection(ours.detach())

    def close(self) -> None:
        """Closing the connection ends the fork server, and with it any rank."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


# By whether `import deepspeed` finds hf_zero: in its ranks it has done so since Python started.
_servers = {False: _ForkServer(), True: _ForkServer(_ROOT / "hf_zero" / "extras" / "deepspeed" / "children")}


@atexit.register
def close() -> None:
    """End the fork servers; the next job starts another one."""
    for server in _servers.values():
        server.close()


# A rank need not wait as long for another as in training, and least of all where ranks are to fail.
_TIMEOUTS = {"grace": 2.0}
_SHORT_TIMEOUTS = {"grace": 0.5, "stalled": 0.2, "presence": 2.0}


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    expect_error: bool = False,
    init_group: bool = True,
    env: dict[str, str] | None = None,
    timeouts: dict[str, float] | None = None,
    as_deepspeed: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world_size` ranks of a fresh gloo group and return their results.

    Args:
        function: A module-level function of a module under tests/ (it is pickled by reference). Arguments and results
            are pickled; tensors may be among them. Imports at the top of its module are done once per session.
        timeout: Seconds after which the job counts as hung: the ranks are killed and the test fails.
        expect_error: Return a RankFailure instead of a rank that raised; the test fails if none did. Otherwise
            an exception on any rank fails the test with every rank's traceback.
        init_group: False leaves it to the function to join a process group: the environment is set as torchrun does.
        env: Environment variables of the ranks.
        timeouts: Fields of hf_zero's `Timeouts` on the ranks, beside those that are short in all tests.
        as_deepspeed: The ranks find hf_zero where they `import deepspeed`, as `hf-zero launch --as-deepspeed` has it.
    """
    job = (function, args, kwargs)
    ended = try_ranks(
        job,
        world_size,
        timeout=timeout,
        wait_for_all=expect_error,
        init_group=init_group,
        env=env,
        timeouts={**(_SHORT_TIMEOUTS if expect_error else {}), **(timeouts or {})},
        as_deepspeed=as_deepspeed,
    )
    failures = [outcome for outcome in ended.outcomes if isinstance(outcome, RankFailure)]
    if ended.hang:
        pytest.fail(ended.hang + ended.logs, pytrace=False)
    if expect_error and not failures:
        pytest.fail("an error was expected, but every rank returned")
    if failures and not expect_error:
        pytest.fail(_failure_text(failures, world_size) + ended.logs, pytrace=False)
    return ended.outcomes


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a job, whatever it did."""

    outcomes: list[Any]  # per rank: its result, or a RankFailure
    hang: str  # the stacks of the ranks that did not end in time; empty if all did
    logs: str  # what the ranks printed


def try_ranks(
    job: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    world_size: int,
    *,
    timeout: float = 60,
    wait_for_all: bool = True,
    init_group: bool = True,
    env: dict[str, str] | None = None,
    timeouts: dict[str, float] | None = None,
    as_deepspeed: bool = False,
) -> Ended:
    """Call `function(*args, **kwargs)` of `job` on the ranks, as `run_ranks` does, and judge nothing.

    Args:
        wait_for_all: False kills the other ranks some seconds after one has failed.
    """
    folder = tempfile.mkdtemp(prefix="hf-zero-test-", dir=memory_folder())
    try:
        with open(os.path.join(folder, "call.pkl"), "wb") as file:
            file.write(transport.dumps(job))
        env = dict(env or {})
        if not init_group:
            env.setdefault("MASTER_PORT", str(free_port()))
        short = {**_TIMEOUTS, **(timeouts or {})}
        call = Job(folder, world_size, timeout, job[0].__module__, init_group, wait_for_all, env, short)
        report = _servers[as_deepspeed].run(call)
        outcomes = [_outcome(Path(folder), rank, code, report.hung) for rank, code in enumerate(report.exit_codes)]
        hang = _hang_text(report.hung, timeout, outcomes) if report.hung else ""
        return Ended(outcomes, hang, _logs(Path(folder), world_size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(folder: Path, rank: int, exit_code: int | None, hung: list[int]) -> Any:
    result, error = folder / f"result-{rank}.pkl", folder / f"error-{rank}.pkl"
    if result.exists():
        return pickle.loads(result.read_bytes())
    if error.exists():
        kind, message, text, exception = pickle.loads(error.read_bytes())
        return RankFailure(rank, kind, message, text, pickle.loads(exception) if exception else None)
    if exit_code is None:
        why = "hung" if rank in hung else "killed because it was waiting after another rank had failed"
        stacks = folder / f"stacks-{rank}.txt"
        return RankFailure(rank, "Killed", why, f"{why}\n{stacks.read_text() if stacks.exists() else ''}", None)
    why = "the process died without an exception"
    return RankFailure(rank, "Died", why, why, None)


def _failure_text(failures: list[RankFailure], world_size: int) -> str:
    # The first cause first: what the other ranks say is mostly that their neighbour has gone.
    parts = [f"{len(failures)} of {world_size} ranks failed"]
    parts += [f"---- rank {failure.rank}: {failure.kind}\n{failure.traceback}" for failure in failures]
    return "\n".join(parts)


def _hang_text(hung: list[int], timeout: float, outcomes: list[Any]) -> str:
    parts = [f"hang: rank(s) {hung} of {len(outcomes)} did not end within {timeout:.0f} s"]
    for rank, outcome in enumerate(outcomes):
        ended = f"{outcome.kind}\n{outcome.traceback}" if isinstance(outcome, RankFailure) else "returned"
        parts.append(f"---- rank {rank}: {ended}")
    return "\n".join(parts)


def _logs(folder: Path, world_size: int) -> str:
    parts = []
    for rank in range(world_size):
        log = folder / f"log-{rank}.txt"
        text = log.read_text(errors="replace").strip() if log.exists() else ""
        if text:
            parts.append(f"\n---- rank {rank}: output\n{text[-4000:]}")
    return "".join(parts)
