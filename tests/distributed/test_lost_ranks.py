"""A rank dies, or leaves, while bytes are on their way: every other rank says so soon, and nothing holds it up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed import failure_monitor
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.failure_monitor import FailureMonitor, watch_for
from hf_zero.distributed.gloo_connections import Connections
from hf_zero.distributed.work import Pending
from hf_zero.errors import ConfigError, OffloadError
from tests.harness.ranks import run_ranks

NUMEL = 3 << 22  # 48 MiB: far more than sockets hold, so that a transfer takes tens of milliseconds
UNDER_WAY_S = 0.01
SOON_S = 12.0
OPERATIONS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


def start(comm: Comm, name: str) -> Pending:
    full, other = torch.zeros(NUMEL), torch.zeros(NUMEL)
    part = full.chunk(comm.world_size)[comm.rank]
    if name == "all_gather":
        return comm.all_gather(full, part, "weights")
    if name == "reduce_scatter":
        return comm.reduce_scatter(part, full, "weights")
    if name == "all_reduce":
        return comm.all_reduce(full, "weights")
    if name == "all_to_all":
        return comm.all_to_all(other, full, "weights")
    return comm.broadcast_start(full, "weights", src=1)


def wait_for_the_dead(name: str) -> None:
    comm = Comm.join(timeout_s=60)
    dist.barrier()
    pending = start(comm, name)
    if comm.rank == 1:
        time.sleep(UNDER_WAY_S)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        pending.wait()
        comm.barrier("the end")  # what was broadcast may have come whole
    finally:
        assert time.monotonic() - began < SOON_S


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), [*((name, 3) for name in OPERATIONS), ("all_gather", 2)])
def test_a_rank_dies_in_the_middle_of(name: str, world_size: int) -> None:
    failures = run_ranks(wait_for_the_dead, world_size, name, timeout=40, expect_error=True)
    assert failures[1].kind == "Died"
    for failure in failures[:1] + failures[2:]:
        assert failure.kind == "DivergenceError", failure.traceback
        assert "did not complete" in failure.message


def leave(name: str) -> float:
    """Fail as in a notebook: the failed rank lives on, and so does all that it holds: operations, a forked worker."""
    comm = Comm.join(timeout_s=60)
    dist.barrier()
    worker = 0 if comm.rank != 1 else os.fork()
    if comm.rank == 1 and worker == 0:
        time.sleep(60)
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(OffloadError, match="no space left"):
        pending = start(comm, name)
        if comm.rank == 1:
            time.sleep(UNDER_WAY_S)
            comm.abandon(OffloadError("rank 1: no space left on device"))
        pending.wait()
        comm.barrier("the end")  # what was broadcast may have come whole
    took = time.monotonic() - began
    dist.barrier()
    if worker:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    with pytest.raises(OffloadError, match="no space left"):  # not as if this rank were alone
        comm.all_gather_object(0, "anything")
    comm.reconnect()
    assert comm.all_gather_object(comm.rank, "anything") == list(range(comm.world_size))
    return took


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_leaves_in_the_middle_of(name: str) -> None:
    assert max(run_ranks(leave, 3, name, timeout=40)) < 5


def interrupt() -> float:
    comm = Comm.join(timeout_s=60)
    took = 0.0
    if comm.rank == 0:
        pending = start(comm, "all_reduce")
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        took = time.monotonic() - began
    dist.barrier()
    return took


def come_late() -> None:
    comm = Comm.join(timeout_s=2)
    if comm.rank == 1:
        time.sleep(4)
    comm.all_gather(torch.zeros(8), torch.zeros(4), "weights").wait()


def test_a_rank_that_is_late_has_not_ended() -> None:
    late = run_ranks(come_late, 2, expect_error=True)[0]
    assert late.kind == "DivergenceError"
    assert "desync_timeout is 2 s" in late.message
    assert "have ended" not in late.message


def wrong_on_every_rank() -> None:
    """Rank 2's message to rank 1 comes when the same error has ended rank 0, which needed none."""
    comm = Comm.join(timeout_s=60)
    dist.barrier()
    if comm.rank == 2:
        time.sleep(1.5)
    none, one = torch.empty(0, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
    comm.exchange_bytes([none, one if comm.rank == 2 else none, none], [0, 0, int(comm.rank == 1)], "late")
    raise ConfigError(f"rank {comm.rank}: a key is wrong")


def test_an_error_of_all_ranks_is_each_ones_own() -> None:
    failures = run_ranks(wrong_on_every_rank, 3, expect_error=True, timeouts={"grace": 5.0})
    assert [one.message for one in failures] == [f"rank {rank}: a key is wrong" for rank in range(3)]


def test_a_wait_can_be_interrupted() -> None:
    assert run_ranks(interrupt, 2, timeout=40)[0] < 5


def count_connections() -> list[int]:
    counts = []
    for _ in range(2):  # a second engine's are its own
        processes = Comm.join()._processes
        assert processes is not None
        link = processes.link
        assert link is not None
        counts.append(len(link.connections))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found through /proc")
def test_each_group_knows_its_own_connections() -> None:
    assert run_ranks(count_connections, 3) == [[2, 2]] * 3


def connect() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found through /proc")
def test_connections_of_others_are_left_alone() -> None:
    """Some made before and some beside the group: of this process with itself, and with one that is no rank."""
    before, connections = connect(), Connections()
    itself, (_mine, theirs), (foreign, server) = connect(), connect(), connect()
    found = connections.find()
    assert len(found) == 6
    here = [ends for ends in found if ends[0] not in (theirs.getsockname(), server.getsockname())]
    connections._sockets = {key: ends for key, ends in connections._sockets.items() if ends in here}
    connections.keep([here, [(theirs.getsockname(), theirs.getpeername())]])
    assert len(connections) == 1
    assert not connections.has_ended()
    connections.close()
    assert theirs.recv(1) == b""
    for one, other in (before, itself, (foreign, server)):
        one.send(b"x")
        assert other.recv(1) == b"x"


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found through /proc")
@pytest.mark.parametrize("how", ["closed there", "closed here", "another file now"])
def test_an_ended_connection_is_seen(how: str) -> None:
    connections = Connections()
    mine, theirs = connect()
    ends = (theirs.getsockname(), theirs.getpeername())
    connections.find()
    connections._sockets = {key: found for key, found in connections._sockets.items() if found[0] != ends[0]}
    connections.keep([[], [ends]])
    assert len(connections) == 1 and not connections.has_ended()
    if how == "closed there":
        theirs.close()
    else:
        number = mine.detach()
        if how == "another file now":
            with open(os.devnull) as other:
                os.dup2(other.fileno(), number)
        else:
            os.close(number)
    assert connections.has_ended()
    connections.close()  # nothing to do, and no error
    if how == "another file now":
        os.close(number)


SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from hf_zero.distributed.comm import Comm
dist.init_process_group("gloo", init_method="file://{store}", rank=int(os.environ["RANK"]), world_size=2)
comm = Comm.join(timeout_s=120)
comm.barrier("start")
full = torch.zeros({numel})
pending = comm.all_to_all(torch.zeros_like(full), full, "weights")
if comm.rank == 1:
    time.sleep({under_way})
    os.kill(os.getpid(), signal.SIGKILL)
pending.wait()
comm.barrier("the end")  # if everything has come whole
"""


@pytest.mark.slow
def test_the_process_ends_although_the_operation_does_not(tmp_path: Path) -> None:
    """No launcher here that would end it. A store in a file, since the store's process may be the one that dies."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(store=tmp_path / "store", numel=4 * NUMEL, under_way=UNDER_WAY_S))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = ranks[0].communicate(timeout=60)[1]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode == 1, errors
    assert "DivergenceError" in errors


class Stopped:
    """The stand-in for a device's group, which would end what its kernels wait for."""

    def __init__(self, monitor: FailureMonitor, over: threading.Event) -> None:
        self.monitor, self.over, self.called = monitor, over, threading.Event()

    def look(self) -> None:
        try:
            self.monitor.look()
        except RuntimeError:
            self.called.set()
            self.over.set()


def watch(comm: Comm, over: threading.Event) -> Stopped:
    group = comm._processes
    assert group is not None and group.control is not None
    watched = Stopped(FailureMonitor(group.control.connections, group.name), over)
    watch_for(watched.look, over)
    return watched


def watched_objects() -> int:
    assert sum(thread.name == "hf_zero-watch" for thread in threading.enumerate()) == 1
    return len(failure_monitor._watched)


def watch_without_waiting() -> tuple[bool, bool, int]:
    comm, over = Comm.join(), threading.Event()
    of_the_group = watched_objects()
    watched, unwatched = watch(comm, threading.Event()), watch(comm, over)
    watch(comm, threading.Event())  # garbage at once
    over.set()
    time.sleep(1.2)  # two looks
    assert watched_objects() == of_the_group + 1, "only the one that is still needed"
    assert not watched.called.is_set()
    dist.barrier()
    if comm.rank == 1:
        comm.abandon(OffloadError("rank 1: the disk is full"))
        return False, False, 0
    heard = watched.called.wait(SOON_S)
    time.sleep(0.7)  # another look
    return heard, unwatched.called.is_set(), watched_objects() - of_the_group


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found through /proc")
def test_a_rank_that_does_not_wait_is_stopped_too() -> None:
    """The wait is like that of a device's kernels, which no call of the host waits for: a thread looks beside them."""
    assert run_ranks(watch_without_waiting, 2, timeout=40)[0] == (True, False, 0)
