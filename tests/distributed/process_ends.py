"""Jobs of two ranks train a little, end in one way or another, and must end with that way's status.

    python -m tests.distributed.process_ends JOBS [WAY ...] [--together 3] [--seed 0]

The libraries are imported once and every rank is forked from there, so that a job takes a second. What a busy machine
does now and then, most ranks do on purpose: from some moment on their threads, but for the main one and that of the
sockets, get little of one processor.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import importlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hf_zero
import hf_zero.optim

# Way -> the status of each rank
WAYS = {
    "leave": 0,  # nothing is torn down
    "teardown": 0,
    "destroy": 0,  # after the teardowns
    "destroy alone": 0,
    "destroy first": 1,  # before the teardowns, which need it
    "keep": 0,  # the default group is destroyed, and the script still holds it
    "exit": 3,
    "exception": 1,
    "exception on one": 1,  # inside of a forward, while the next layer is on its way
    "interrupt": -signal.SIGINT,
    "terminate": -signal.SIGTERM,
    "at once": 5,  # os._exit
}
MOMENTS = ("never", "train", "teardown", "end")
_LATE = ("hf_zero", "torch.distributed.nn")
_LONGEST_S = 300
_TRAINED = b"this rank has trained\n"
kept: list[object] = []


class _Starvation:
    def __init__(self, moment: str, core: int) -> None:
        self._moment, self._core = moment, core

    def reached(self, moment: str) -> None:
        if moment != self._moment:
            return
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) != os.getpid() and (task / "comm").read_text() != "gloo_tcp_loop\n":
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
            os.sched_setaffinity(int(task.name), {self._core})


def _train(stage: int, starvation: _Starvation) -> hf_zero.ZeroEngine:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    offload = {"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine = hf_zero.initialize(model=model, config=config | {"zero_optimization": {"stage": stage, **offload}})[0]
    starvation.reached("train")
    for _ in range(3):
        _step(engine)
    return engine


def _step(engine: hf_zero.ZeroEngine) -> None:
    engine.backward(engine(torch.randn(2, 64)).square().mean())
    engine.step()


def _end(way: str, engines: list[hf_zero.ZeroEngine]) -> None:
    if way in ("destroy first", "destroy alone"):
        dist.destroy_process_group()
    if way in ("teardown", "destroy", "destroy first", "keep"):
        for engine in engines:
            engine.teardown()
    if way in ("destroy", "keep"):
        if way == "keep":
            kept.append(dist.group.WORLD)
        kept.append(torch.ones(1))
        dist.all_reduce(kept[-1])
        dist.barrier()
        dist.destroy_process_group()
    if way == "exit":
        sys.exit(3)
    if way == "exception":
        raise ValueError("of the script")
    if way == "exception on one":
        if dist.get_rank() == 1:
            engines[-1].module[1].register_forward_pre_hook(lambda *_: 1 / 0)
        _step(engines[-1])
    if way == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if way == "terminate":
        signal.raise_signal(signal.SIGTERM)
    if way == "at once":
        os._exit(5)


class _Rank:
    def __init__(self, way: str, number: int, moment: str) -> None:
        self.way, self.number, self.moment = way, number, moment
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - its rank writes after this process's blocks
        self.began = time.monotonic()

    def live(self, port: int) -> None:
        place = {"RANK": self.number, "LOCAL_RANK": self.number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        faulthandler.enable(self.log)
        cores = sorted(os.sched_getaffinity(0))
        starvation = _Starvation(self.moment, cores[self.number % len(cores)])
        dist.init_process_group("gloo")
        engines = [_train(stage, starvation) for stage in (1, 2, 3)]
        dist.all_reduce(torch.ones(1))
        starvation.reached("teardown")
        os.write(1, _TRAINED)
        _end(self.way, engines)
        starvation.reached("end")

    def said(self) -> bytes:
        self.log.seek(0)
        return self.log.read()

    def has_trained(self) -> bool:
        """A rank that fails before its end may have the status of that end."""
        return _TRAINED in self.said()


def _import_what_ranks_import() -> None:
    """They would each, for two seconds. What a script imports late, when its group is there, they still do."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        _train(1, _Starvation("never", 0))
        os.write(writer, "\n".join(name for name in sys.modules if not name.startswith(_LATE)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as names:
        for name in names.read().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    # torch._dynamo imports it at exit, where an import lets CPython forget that an interrupt has ended the process.
    with contextlib.suppress(ImportError):
        importlib.import_module("tabulate")
    os.wait()


def _free_ports(chance: random.Random) -> Iterator[int]:
    """Ports below those that the system gives out: a connection of another job never takes one before its rank 0."""
    port = chance.randrange(10_000, 20_000)
    while True:
        port = port + 1 if port < 30_000 else 10_000
        with socket.socket() as one:
            is_free = one.connect_ex(("127.0.0.1", port)) != 0
        if is_free:
            yield port


def main() -> None:
    """Start the jobs and count their ends; a rank returns from here as soon as its script would end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=int)
    parser.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY")
    parser.add_argument("--together", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    ports = _free_ports(random.Random())
    _import_what_ranks_import()
    running: dict[int, _Rank] = {}
    counts, wrong, started = collections.Counter[str](), list[str](), 0
    while started < arguments.jobs or running:
        while started < arguments.jobs and len(running) < 2 * arguments.together:
            way, port = arguments.ways[started % len(arguments.ways)], next(ports)
            for number in range(2):
                rank = _Rank(way, number, chance.choice(MOMENTS))
                pid = os.fork()
                if pid == 0:
                    os.dup2(rank.log.fileno(), 1)
                    os.dup2(rank.log.fileno(), 2)
                    return rank.live(port)
                running[pid] = rank
            started += 1
        for pid, code in _ended(running):
            rank = running.pop(pid)
            counts[f"{rank.way}: {code}"] += 1
            if code != WAYS[rank.way] or not rank.has_trained():
                end = f"{code} after {time.monotonic() - rank.began:.0f} s\n{rank.said()[-6000:].decode()}"
                wrong.append(f"{rank.way}, rank {rank.number}, starved from {rank.moment}: {end}")
    print(f"{sum(counts.values())} ends, {len(wrong)} wrong: {dict(sorted(counts.items()))}")
    print(*wrong[:3], sep="\n")
    sys.exit(bool(wrong))


def _ended(running: dict[int, _Rank]) -> Iterator[tuple[int, int]]:
    """Yield the ranks that have ended and their status, which is that of SIGABRT if they lasted too long."""
    for pid, rank in list(running.items()):
        if time.monotonic() > rank.began + _LONGEST_S:
            os.kill(pid, signal.SIGABRT)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            yield ended, os.waitstatus_to_exitcode(status)
    time.sleep(0.005)


if __name__ == "__main__":
    main()
