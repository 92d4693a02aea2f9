"""The compiled library as a part of a program: how it is found, its threads, forks, and what happens without it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_zero.errors import ConfigError, NativeError
from hf_zero.native import library as native_library
from hf_zero.native.adam import AdamSpan, adam_step
from hf_zero.native.library import LIBRARY_VARIABLE, library
from hf_zero.native.machine import default_threads
from hf_zero.native.simd import SIMD_VARIABLE

# Each of them starts a Python of its own.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SPAN = AdamSpan(0, 4, 0, 0, 0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True)


@pytest.mark.parametrize(("name", "value"), [(SIMD_VARIABLE, "v5"), ("HF_ZERO_CPU_THREADS", "-1")])
def test_wrong_variables_are_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        adam_step([SPAN], *(torch.zeros(4) for _ in range(4)))


def test_threads_are_the_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    for name in ("HF_ZERO_CPU_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert default_threads() == cores
    assert default_threads(spare=1) == max(1, cores - 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert default_threads() == max(1, cores // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(4 * cores))
    assert default_threads() == 1
    monkeypatch.setenv("HF_ZERO_CPU_THREADS", "3")
    assert default_threads() == default_threads(spare=1) == 3, "a number that somebody chose"


Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python() -> Python:
    """Runs a script in a fresh process that finds the library as this one does."""

    def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


STEP = """
import os, torch
from hf_zero.native.adam import AdamSpan, adam_step
def step(threads=None, numel=200_000):
    tensors = [torch.ones(numel) for _ in range(4)]
    adam_step([AdamSpan(0, numel, 0, 0, 0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True)], *tensors, threads=threads)
    assert (tensors[0] < 1).all()
"""


def test_a_forked_child_has_a_pool_of_its_own(python: Python) -> None:
    """Also if the fork comes while another thread is in the middle of an update."""
    script = """
    import threading
    step(threads=3)
    stop = threading.Event()
    def busy():
        while not stop.is_set():
            step(threads=3)
    other = threading.Thread(target=busy)
    other.start()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            step(threads=3)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        step(threads=3)
    stop.set()
    other.join()
    print("done")
    """
    result = python(STEP + textwrap.dedent(script))
    assert result.stdout == "done\n", result.stderr


def test_runs_without_compilers_and_on_more_threads_than_omp_allows(python: Python) -> None:
    script = """
    before = len(os.listdir("/proc/self/task"))
    step()
    print(len(os.listdir("/proc/self/task")) - before)
    """
    path = str(Path(sys.executable).parent / "none")
    result = python(STEP + textwrap.dedent(script), OMP_NUM_THREADS="1", HF_ZERO_CPU_THREADS="3", PATH=path)
    assert result.stdout == "2\n", result.stderr


def test_threads_that_cannot_be_started_are_an_error(python: Python) -> None:
    script = """
    import resource
    from hf_zero.errors import NativeError
    step(threads=2)
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.RLIM_INFINITY))
    try:
        step(threads=100, numel=100 * 16384)
    except NativeError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    step(threads=2)
    """
    result = python(STEP + textwrap.dedent(script))
    assert "before it changed anything" in result.stdout and "HF_ZERO_CPU_THREADS" in result.stdout, result.stderr
    assert result.returncode == 0, result.stderr


def test_a_missing_library_is_one_clear_error(python: Python) -> None:
    result = python(STEP + "step()", **{LIBRARY_VARIABLE: "/nonexistent"})
    last = result.stderr.strip().splitlines()[-2:]
    assert last[0].startswith(f"hf_zero.errors.NativeError: {LIBRARY_VARIABLE}=/nonexistent is not a file")
    assert "pip install -e ." in last[1]


def test_a_wrong_library_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    other = Path(torch.__file__).parent / "lib" / "libc10.so"
    for path, words in ((damaged, "cannot be loaded"), (other, "is no library of hf_zero")):
        monkeypatch.setenv(LIBRARY_VARIABLE, str(path))
        with pytest.raises(NativeError, match=words) as caught:
            library.__wrapped__()
        assert str(path) in str(caught.value) and "pip install -e ." in str(caught.value)
    monkeypatch.undo()
    monkeypatch.setattr(native_library, "ABI_VERSION", 10_000)
    with pytest.raises(NativeError, match=r"was built from other sources.*needs 10000"):
        library.__wrapped__()
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(native_library, "_FILE", "libnone.so")
    with pytest.raises(NativeError, match=r"libnone.so.* is missing"):
        library.__wrapped__()


def test_importing_does_not_load_the_library(python: Python) -> None:
    result = python(
        "import hf_zero.native.adam, hf_zero.extras.cli.main\nfrom hf_zero.optim import CPUAdam\nprint('fine')",
        HF_ZERO_LIBRARY="/none",
    )
    assert result.stdout == "fine\n", result.stderr
