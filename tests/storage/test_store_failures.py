"""The store on disk when the disk fails, and the life of its folder: kills, forks, exits, others beside it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_zero.errors import OffloadError
from hf_zero.storage import SwapFolder
from hf_zero.storage.swap_folder import PARENT, sweep
from tests.harness.ranks import run_ranks
from tests.harness.stores import flush
from tests.storage.test_store_disk import KIB, MIB, disk_store, fill, until
from tests.storage.test_stores import ROOT, get, pattern, put

# Most of them start processes of their own.
pytestmark = pytest.mark.slow


# -------------------------------------------------------------------- failures of the disk
@contextlib.contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no right to mount: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_shows_when_space_is_reserved(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=2m") as small, disk_store(small, MIB, preallocate=True) as store:
        store.create("a", 256 * KIB, torch.float32)  # 1 MiB
        with pytest.raises(OffloadError) as caught:
            store.create("b", 512 * KIB, torch.float32)
        text = str(caught.value)
        assert str(store.path) in text
        assert "2097152 bytes are needed" in text
        assert "bytes are free" in text
        store.create("c", 64 * KIB, torch.float32)
        for key in ("a", "c"):
            put(store, key, torch.ones(store.usage()[key] // 4))
        flush(store)


def test_a_full_disk_at_a_write_poisons_the_key(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=2m") as small, disk_store(small, 8 * MIB) as store:
        store.create("good", 64 * KIB, torch.float32)
        put(store, "good", torch.ones(64 * KIB))
        flush(store)
        store.create("bad", MIB, torch.float32)
        put(store, "bad", torch.ones(MIB))
        for _ in range(2):
            with pytest.raises(OffloadError, match="No space left") as caught:
                flush(store)
            assert str(store.path) in str(caught.value)
            assert "offset" in str(caught.value)
            with pytest.raises(OffloadError, match="No space left"):
                store.borrow(["bad"])
            with pytest.raises(OffloadError, match="No space left"):
                store.borrow(["bad"], write=True, overwrite=True)
        store.prefetch(["bad"])
        assert torch.equal(get(store, "good"), torch.ones(64 * KIB))
        store.drop("bad")
        flush(store)


@pytest.mark.parametrize("preallocate", [True, False])
def test_the_file_size_limit(tmp_path: Path, preallocate: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with disk_store(tmp_path, preallocate=preallocate) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        try:
            with pytest.raises(OffloadError, match=r"cannot grow.*File too large.*ulimit -f"):
                store.create("k", MIB, torch.float32)
            store.create("small", 5000, torch.float32)
            put(store, "small", torch.ones(5000))
            flush(store)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("damage", ["removed", "was truncated"])
def test_somebody_touches_the_file(tmp_path: Path, damage: str) -> None:
    with disk_store(tmp_path) as store:
        fill(store, 2, 5000)
        if damage == "removed":
            store.path.unlink()
        else:
            os.truncate(store.path, 4096)
        for _ in range(2):
            for use in (lambda: store.borrow(["k0"]), lambda: flush(store), lambda: store.borrow(["k1"], write=True)):
                with pytest.raises(OffloadError, match=damage) as caught:
                    use()
                assert str(store.path) in str(caught.value)


def test_a_read_that_fails_poisons_its_key_only(tmp_path: Path) -> None:
    """The file is cut while the store looks away, and has its old size again when it looks."""
    with disk_store(tmp_path) as store:
        fill(store, 2, 5000)
        size = store.path.stat().st_size
        os.truncate(store.path, 20480)
        store.prefetch(["k1"])
        until(lambda: all(flight.transfer.poll() for flight in store._ahead), "read ahead")
        os.truncate(store.path, size)
        for _ in range(2):
            with pytest.raises(OffloadError, match="k1 could not be read") as caught:
                store.borrow(["k0", "k1"])
            assert str(store.path) in str(caught.value)
        assert torch.equal(get(store, "k0"), pattern(5000, torch.float32, 0))
        with pytest.raises(OffloadError, match="k1 could not be read"):
            flush(store)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, reason in [
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "file" / "below", "Not a directory"),
        ("", "is no path"),
        ("a\0b", "is no path"),
    ]:
        with pytest.raises(OffloadError, match=reason) as caught:
            SwapFolder(path, 0)
        assert "nvme_path" in str(caught.value)
        assert "folder" in str(caught.value)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "ro", "ro") as path:
        with pytest.raises(OffloadError, match="Read-only file system") as caught:
            SwapFolder(path, 0)
        assert str(path) in str(caught.value)


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path / "a" / "b", 7)
    assert folder.path.parent.parent == tmp_path / "a" / "b" / PARENT
    assert folder.path.name == "rank-00007"
    assert folder.path.parent.stat().st_mode & 0o777 == 0o700, "weights are readable for others"
    folder.close()
    folder.close()
    assert list((tmp_path / "a" / "b").iterdir()) == []


# -------------------------------------------------------------------- life of the folder
_OWNER = """
import os, sys, time, torch
from hf_zero.config.resolved import Aio
from hf_zero.storage import DiskStore, StagingPool, SwapFolder
folder = SwapFolder(sys.argv[1], int(sys.argv[2]))
pool = StagingPool(1 << 20, device=torch.device("cpu"), pin=False)
store = DiskStore(folder, "opt", aio=Aio(), pool=pool, preallocate=True)
keys = [f"k{i}" for i in range(30)]
for i, key in enumerate(keys):
    store.create(key, 30_001, torch.float32)
    with store.borrow([key], write=True) as borrow:
        borrow.tensors[0].fill_(i + 100 * int(sys.argv[2]))
print(folder.path, flush=True)
"""
_WAIT = "sys.stdin.readline()\n"
_CHECK = """
for i, key in enumerate(keys):
    store.prefetch(keys[i : i + 2])
    with store.borrow([key]) as borrow:
        assert (borrow.tensors[0] == i + 100 * int(sys.argv[2])).all(), key
"""


@contextlib.contextmanager
def owner(path: Path, rank: int, code: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a store, at the point where it has printed its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER + code, str(path), str(rank)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate(timeout=30)


def go_on(process: subprocess.Popen[str]) -> int:
    process.communicate("go\n", timeout=30)
    return process.returncode


def test_two_ranks_use_one_folder_and_a_killed_one_is_swept(tmp_path: Path) -> None:
    with owner(tmp_path, 0, _WAIT + _CHECK) as (live, live_path), owner(tmp_path, 1, _WAIT) as (dead, dead_path):
        assert (live_path / "opt.swap").stat().st_size >= 30 * 30_001 * 4
        assert sweep(tmp_path / PARENT) == []
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait(30)
        assert dead_path.exists(), "vacuous: nothing was left behind"
        folder = SwapFolder(tmp_path, 0)
        assert folder.swept == [dead_path.parent]
        assert not dead_path.parent.exists()
        assert (live_path / "opt.swap").exists()
        folder.close()
        assert go_on(live) == 0
        assert list(tmp_path.iterdir()) == [], "the last one removes what all share"


@pytest.mark.parametrize("end", ["sys.exit(3)\n", "raise RuntimeError\n"], ids=["exit", "exception"])
def test_the_folder_goes_with_the_process(tmp_path: Path, end: str) -> None:
    with owner(tmp_path, 0, _WAIT + end) as (process, path):
        assert path.exists()
        assert go_on(process) == (3 if "exit" in end else 1)
    assert list(tmp_path.iterdir()) == []


_FORK = """
child = os.fork()
if child == 0:
    store.close()
    folder.close()
    sys.exit(0)  # runs what is registered for exit, as the parent will
assert os.waitpid(child, 0)[1] == 0
assert folder.path.exists() and store.path.exists()
"""


def test_a_forked_child_leaves_the_folder_alone(tmp_path: Path) -> None:
    with owner(tmp_path, 0, _WAIT + _FORK + _CHECK) as (process, _):
        assert go_on(process) == 0
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_ended_processes_are_swept(tmp_path: Path) -> None:
    """The folders are those of this system; what another host made here may be in use, though its lock can
    be taken.
    """
    parent = tmp_path / PARENT
    names = {
        "other-12-0123abcd": "another boot id",
        "gone-12-0123abcd": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        "half-12-0123abcd": None,  # its removal was interrupted
        "of the user": None,
        ".new-other-12-0123abcd": None,  # being made
        ".new-old-12-0123abcd": None,
    }
    for name, boot_id in names.items():
        (parent / name / "rank-00000").mkdir(parents=True)
        if boot_id is not None:
            (parent / name / "lock").write_text(boot_id)
    os.utime(parent / ".new-old-12-0123abcd", (0, 0))
    swept = SwapFolder(tmp_path, 0)
    swept.close()
    assert sorted(one.name for one in swept.swept) == ["gone-12-0123abcd", "half-12-0123abcd"]
    assert sorted(one.name for one in parent.iterdir()) == [
        ".new-other-12-0123abcd",
        "of the user",
        "other-12-0123abcd",
    ]


def come_and_go(path: Path) -> None:
    for _ in range(60):
        folder = SwapFolder(path, 0)
        (folder.path / "x").write_text("x")
        folder.close()


def test_many_start_and_end_at_once(tmp_path: Path) -> None:
    """The folder that all share comes and goes under them."""
    run_ranks(come_and_go, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []
