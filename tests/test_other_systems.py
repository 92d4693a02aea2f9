"""Importing works on systems that are not Linux; what needs Linux says so when it is used.

The modules and names that only Linux has are hidden from hf_zero alone: torch and the standard library keep them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.distributed import peer_memory as peers
from hf_zero.errors import NativeError, OffloadError
from hf_zero.extras.launcher import node, worker
from hf_zero.extras.launcher.launch_errors import LaunchUsageError
from hf_zero.native import host_memory as pages
from hf_zero.native import library, machine
from hf_zero.storage import DeviceStore, HostStore, SwapFolder
from hf_zero.storage import swap_folder as swap

ROOT = Path(__file__).resolve().parents[1]

# Imports every module of hf_zero, with what Windows lacks hidden from it.
_IMPORT_ALL = '''
import builtins, importlib, os, pkgutil, sys, types
import torch, transformers, accelerate, transformers.trainer, torch.distributed  # whatever these need, they have

MODULES = "fcntl grp pwd resource termios pty tty syslog spwd crypt readline curses".split()
NAMES = {
    "os": """sched_getaffinity sched_setaffinity register_at_fork fork forkpty wait3 wait4 WNOHANG O_DIRECT O_CLOEXEC
        O_DIRECTORY O_NOFOLLOW O_SYNC sysconf statvfs fstatvfs posix_fallocate posix_fadvise pread preadv pwrite
        pwritev uname getuid geteuid getgid getpgid setsid killpg mkfifo chown sendfile confstr getloadavg""".split(),
    "signal": """SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGPIPE SIGSTOP SIGCONT alarm setitimer
        pthread_sigmask pthread_kill sigwait""".split(),
    "mmap": """MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MAP_ANON MAP_POPULATE MADV_HUGEPAGE MADV_DONTFORK PROT_READ
        PROT_WRITE""".split(),
    "select": "poll epoll POLLRDHUP POLLIN".split(),
    "socket": "AF_UNIX socketpair SO_REUSEPORT CMSG_LEN".split(),
    "time": "clock_gettime CLOCK_MONOTONIC tzset".split(),
}


def no_functions_by_name(name=None, *args, **kwargs):
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return ctypes.CDLL(name, *args, **kwargs)


import ctypes
shown = {}
for name, hidden in NAMES.items():
    real = importlib.import_module(name)
    shown[name] = types.ModuleType(name)
    shown[name].__dict__.update({key: value for key, value in vars(real).items() if key not in hidden})
shown["ctypes"] = types.ModuleType("ctypes")
shown["ctypes"].__dict__.update(vars(ctypes), CDLL=no_functions_by_name)
real_import = builtins.__import__
refused = 0


def import_as_elsewhere(name, globals=None, locals=None, fromlist=(), level=0):
    global refused
    importer = (globals or {}).get("__name__", "")
    if importer.split(".")[0] == "hf_zero" and not level:
        if name in MODULES:
            refused += 1
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in shown:
            for wanted in fromlist or ():
                if not hasattr(shown[name], wanted):
                    raise ImportError(f"cannot import name {wanted!r} from {name!r}")
            return shown[name]
    return real_import(name, globals, locals, fromlist, level)


def no_proc(event, arguments):
    if event in ("open", "os.listdir") and str(arguments[0]).startswith(("/proc", "/sys/")):
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("pathlib", "io", "_io"):
            frame = frame.f_back
        if frame is not None and frame.f_globals.get("__name__", "").startswith("hf_zero"):
            raise FileNotFoundError(arguments[0])


sys.addaudithook(no_proc)
builtins.__import__ = import_as_elsewhere
import hf_zero
count = 1
for found in pkgutil.walk_packages(hf_zero.__path__, "hf_zero."):
    if found.name.endswith(".libhf_zero_native"):  # no module: it lies beside them, and has the name of one
        continue
    importlib.import_module(found.name)
    count += 1
print(count, refused)
'''


@pytest.mark.slow
def test_every_module_can_be_imported_without_what_only_linux_has() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count, refused = map(int, done.stdout.split()[-2:])
    assert count >= len([path for path in (ROOT / "hf_zero").rglob("*.py") if path.name != "__init__.py"])
    assert refused >= 1, "vacuous: nothing was hidden from any module"


@pytest.mark.parametrize("lacks", ["fcntl", "posix_fallocate"])  # Windows; macOS
def test_offload_to_disk_says_that_it_needs_linux(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks == "fcntl":
        monkeypatch.setattr(swap, "fcntl", None)
    else:
        monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(OffloadError, match=r'offload to disk .* needs Linux.*: set the device to "cpu" or "none"\.'):
        SwapFolder(tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_a_missing_library_elsewhere_is_no_call_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_ZERO_LIBRARY", raising=False)
    monkeypatch.setattr(library.importlib.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(library.platform, "system", lambda: "Darwin")
    with pytest.raises(NativeError, match="built for Linux, and this is Darwin: set the device of both offload"):
        library.library_path()


def test_cores_are_bound_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    for ask in (worker.cores_here, lambda: worker.parse_cores("0")):
        with pytest.raises(LaunchUsageError, match=r"need Linux, and this is .*: leave them out"):
            ask()


def test_numbers_of_the_machine_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = machine.peak_resident_bytes()
    assert 0 < peak < machine.memory_bytes() and 0 < machine.available_bytes() < machine.memory_bytes()
    monkeypatch.setattr(machine, "_STATUS", Path("/nowhere"))
    assert machine.peak_resident_bytes() >= peak >> 1
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.usable_cores() == os.cpu_count()


def test_memory_of_stores_without_flags_of_mmap(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_POPULATE", "MADV_HUGEPAGE", "MADV_DONTFORK"):
        monkeypatch.delattr(pages.mmap, name, raising=False)
    for store in (DeviceStore(torch.device("cpu")), HostStore(torch.device("cpu"), pin=False)):
        store.create("k", 5000, torch.float32)
        with store.borrow(["k"], write=True) as borrow:
            assert not borrow.tensors[0].any()
            borrow.tensors[0].fill_(2)
        assert float(store.tensor("k").sum()) == 10000


def test_peers_are_not_read_where_a_process_has_no_functions_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_null(name: str | None, **options: Any) -> Any:
        raise TypeError("argument 1 must be str, not None")

    peers._reader.cache_clear()
    monkeypatch.setattr(peers.ctypes, "CDLL", no_null)
    try:
        assert peers.PeerMemory().identity() is None
    finally:
        peers._reader.cache_clear()


def test_stop_ends_the_agents_of_a_job_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by psutil, on every system."""
    monkeypatch.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path))
    sleep = "import time; time.sleep(60)"
    agent = subprocess.Popen([sys.executable, "-c", sleep, "hf_zero.extras.launcher.node"])
    other = subprocess.Popen([sys.executable, "-c", sleep])
    try:
        (tmp_path / "hf_zero-job-0.pid").write_text(str(agent.pid))
        (tmp_path / "hf_zero-job-1.pid").write_text(str(other.pid))
        (tmp_path / "hf_zero-job-2.pid").write_text("no number")
        node.stop("job")
        assert agent.wait(10) == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for process in (agent, other):
            process.kill()
            process.wait()
