"""The process that forks the ranks of test jobs. Started once per test session by `tests.harness.ranks`.

It imports torch once and never uses it, so it has no threads and a fork of it is a clean process that is ready in
milliseconds: every job gets fresh ranks, nothing leaks from one test into the next, and a hung job is simply killed.
What a job would import as it goes (`_WITH`) is imported before the fork as well: a Trainer brings a thousand modules,
and a second of every rank. What they share lies in huge pages, which a fork need not list one by one.
It exits, and takes its ranks with it, when the test process closes the control connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import functools
import gc
import importlib
import io
import linecache
import numbers
import os
import pickle
import pkgutil
import select
import signal
import sys
import time
import traceback
from collections import abc
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.harness import transport

# Time for the stack dumps of a rank that waits to be written before it is killed.
DUMP_SECONDS = 1.0
# A rank that is waiting for one that failed gets this long to say so itself.
GRACE_SECONDS = 6.0
_PR_SET_PDEATHSIG = 1
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20
# Modules that are imported sooner or later where the module of a job has imported the key.
_WITH = {
    "hf_zero": ["torch.utils.serialization.config", "torch.profiler._cupti_monitor"],
    "transformers": [
        "transformers.trainer",
        "transformers.hf_argparser",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.auto.processing_auto",
        "torch.distributed.algorithms.ddp_comm_hooks",
        "datasets",
        "peft.tuners.lora",
        "peft.utils.transformers_weight_conversion",
        "numpy.ctypeslib",
    ],
    "trl": ["trl.trainer.sft_trainer"],
}
# Packages that a job imports in a function: imported here where its module says so, for no other test waits for them.
_NAMED = {"from trl import": "trl"}
# Tables that are made at the first call: transformers compiles a thousand regular expressions before it saves a model.
_MADE_AT_A_CALL = {"transformers": ("transformers.conversion_mapping", "get_checkpoint_conversion_mapping", "llama")}
_ON_TRANSFORMERS = ("hf_zero.hf.", "hf_zero.run", "hf_zero.extras.deepspeed.zero", "hf_zero.extras.cli.meta_model")


@dataclasses.dataclass(frozen=True)
class Job:
    """A job is what the test process asks for. The call itself is pickled in `folder`/call.pkl."""

    folder: str
    world_size: int
    timeout_s: float
    module: str  # imported here before the fork, so that it is imported once per session
    init_group: bool
    wait_for_all: bool  # False: kill the other ranks soon after one has failed
    env: dict[str, str]
    timeouts: dict[str, float]  # fields of hf_zero's Timeouts


@dataclasses.dataclass(frozen=True)
class Report:
    """Exit status of every rank (None where it was killed by the fork server), and the ranks that were hung."""

    exit_codes: list[int | None]
    hung: list[int]


# ---------------------------------------------------------------- the fork server
def serve(connection: Connection) -> None:
    import torch
    import torch._dynamo  # the first optimizer step imports it
    import torch.distributed

    torch.set_num_threads(1)
    _call_first_time()
    stores = _start_stores(connection)
    imported = 0
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        with contextlib.suppress(Exception):  # the rank fails in the same import and reports it
            importlib.import_module(job.module)
        _import_what_is_named(_read_source(job.module))
        _warm_up()
        if len(sys.modules) > imported:
            imported = len(sys.modules)
            _ask_for_kinds()
            _collapse_memory()
        gc.freeze()  # the collector of a rank need not walk, and so copy, what all of them share
        port = _fresh_store(stores) if job.init_group else 0
        run = functools.partial(_run_rank, job, port)
        pids = [_fork(functools.partial(run, rank), connection) for rank in range(job.world_size)]
        connection.send(_supervise(job, pids, connection))


def _warm_up() -> None:
    """Import what the ranks would, now that the module of the job has chosen the packages."""
    for package in [name for name in _WITH if name in sys.modules]:
        names = _WITH.pop(package)
        if package == "hf_zero":
            names = [*names, *_modules_of_hf_zero()]
            # These import transformers, for which other tests need not wait.
            _WITH.setdefault("transformers", []).extend(name for name in names if name.startswith(_ON_TRANSFORMERS))
            names = [name for name in names if not name.startswith(_ON_TRANSFORMERS)]
        for name in names:
            with contextlib.suppress(Exception):  # not installed, or broken: a rank that needs it reports it
                importlib.import_module(name)
        if package in _MADE_AT_A_CALL:
            module, function, argument = _MADE_AT_A_CALL[package]
            with contextlib.suppress(Exception):  # another version of the package
                getattr(importlib.import_module(module), function)(argument)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"an import has started {threads - 1} thread(s): a fork would lose them"


def _call_first_time() -> None:
    """Do what every rank would do in its first calls: each would copy the pages that are written."""
    import torch
    import torch._dynamo

    # It notes the stack of its caller for every kind of device, and reads torch's source files to do so.
    torch.manual_seed(0)
    torch._dynamo.trace_rules.clear_lru_cache()  # init_process_group frees these tables


def _ask_for_kinds() -> None:
    """Ask `isinstance` what every rank asks. An abstract class that does not know a type yet asks all its subclasses.

    It forgets its answers when another class is registered, so they are asked for after every import.
    """
    import torch

    tensor = torch.empty(0)
    values = [(), [], {}, "", b"", 0, 0.0, True, None, io.BytesIO(), tensor, torch.nn.Parameter(tensor)]
    for kind in (abc.Mapping, abc.MutableMapping, abc.Sequence, abc.Iterable, numbers.Integral, os.PathLike):
        for value in values:
            isinstance(value, kind)


def _read_source(module: str) -> list[str]:
    """The lines of a job's module, kept for the stacks that `torch.manual_seed` notes."""
    return linecache.getlines(sys.modules[module].__file__ or "") if module in sys.modules else []


def _import_what_is_named(lines: list[str]) -> None:
    for text in [text for text in _NAMED if any(text in line for line in lines)]:
        with contextlib.suppress(Exception):  # not installed, or broken: a rank that needs it reports it
            importlib.import_module(_NAMED.pop(text))


def _modules_of_hf_zero() -> list[str]:
    import hf_zero

    names = [module.name for module in pkgutil.walk_packages(hf_zero.__path__, "hf_zero.")]
    return [name for name in names if not name.endswith("__main__")]


def _collapse_memory() -> None:
    """Move this process's data to huge pages, where the kernel can: forks and ends of ranks take a fifth of the time.

    A rank that writes copies the 4 KiB around it, as ever.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        if access != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
            madvise(page, _HUGE_PAGE, _MADV_COLLAPSE)


def _fork(run: Callable[[], int], connection: Connection) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()  # a group of its own: what the rank starts (data loader workers) is killed with it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            connection.close()
            code = run()
    finally:
        os._exit(code)


def _supervise(job: Job, pids: list[int], connection: Connection) -> Report:
    exit_codes: list[int | None] = [None] * len(pids)
    running = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}  # readable when the process has ended
    end = deadline = time.monotonic() + job.timeout_s
    while running:
        ended = select.select([connection, *running], [], [], max(0.0, end - time.monotonic()))[0]
        if connection in ended:  # nothing is sent during a job: the test process is gone
            _kill([pids[rank] for rank in running.values()])
            raise SystemExit(1)
        for pidfd in ended:
            rank = running.pop(pidfd)
            os.close(pidfd)
            os.waitpid(pids[rank], 0)
            exit_codes[rank] = _exit_code(job, rank)
            if exit_codes[rank] != 0 and not job.wait_for_all:
                end = min(end, time.monotonic() + GRACE_SECONDS)
        if not ended:
            break
    left = list(running.values())
    for pidfd in running:
        os.close(pidfd)
    is_hung = bool(left) and end == deadline
    _dump_and_kill([pids[rank] for rank in left])
    return Report(exit_codes, left if is_hung else [])


def _exit_code(job: Job, rank: int) -> int:
    """0 if the rank wrote a result: how it died later is of no interest. `os.waitpid` has reaped it already."""
    return 0 if (Path(job.folder) / f"result-{rank}.pkl").exists() else 1


def _dump_and_kill(pids: list[int]) -> None:
    if not pids:
        return
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)
    _kill(pids)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ---------------------------------------------------------------- the rendezvous
def _start_stores(connection: Connection) -> Connection:
    """Fork the process that serves the ranks' stores: as with torchrun, any rank may die and the others can tell.

    It is forked once, before the tests' imports, for a fork of what they bring costs as much as a rank.
    """
    ours, theirs = Pipe()
    _fork(functools.partial(_serve_stores, theirs), connection)
    theirs.close()
    return ours


def _serve_stores(requests: Connection) -> int:
    from torch.distributed import TCPStore

    store = None
    while True:
        requests.recv()
        del store  # of the job before, whose ranks have ended
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        requests.send(store.port)


def _fresh_store(stores: Connection) -> int:
    """Return the port of a store that no job has used."""
    stores.send(None)
    return stores.recv()


# ---------------------------------------------------------------- one rank
def _run_rank(job: Job, port: int, rank: int) -> int:
    folder = Path(job.folder)
    log = os.open(folder / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stacks = open(folder / f"stacks-{rank}.txt", "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(sys.stderr)
    try:
        _write(folder / f"result-{rank}.pkl", transport.dumps(_call(job, port, rank, folder)))
        return 0
    except BaseException as error:
        _write(folder / f"error-{rank}.pkl", _pickled_error(error))
        module = sys.modules.get("hf_zero.distributed.process_end")
        if module and not isinstance(error, SystemExit):
            module.tell_others(error)  # as at the end of Python
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _call(job: Job, port: int, rank: int, folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes stacks for devices, which a rank does not have
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(job.world_size), MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(job.env)
    if module := sys.modules.get("hf_zero.distributed.timeouts"):
        vars(module.TIMEOUTS).update(job.timeouts)
    with open(folder / "call.pkl", "rb") as file:
        function, args, kwargs = pickle.load(file)
    if not job.init_group:
        return function(*args, **kwargs)
    # Shorter than the job, so that a rank that is left alone can report where it waited.
    timeout = datetime.timedelta(seconds=max(2.0, min(30.0, 0.6 * job.timeout_s)))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=timeout)
    dist.barrier()  # a rank that fails at once must not close connections that others are still making
    result = function(*args, **kwargs)
    if dist.is_initialized():
        dist.barrier()  # closing a connection with unread data can take data from the other side
        dist.destroy_process_group()
    return result


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        exception = pickle.dumps(error)
        pickle.loads(exception)
    except Exception:  # an exception type with a constructor of its own kind: the text has to do
        exception = b""
    return pickle.dumps((type(error).__name__, str(error), text, exception))


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_bytes(data)
    temporary.rename(path)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # Run as __main__, this module would pickle under another name than the test process knows.
    from tests.harness import forkserver

    forkserver.serve(Connection(int(sys.argv[1])))
