"""Each AioQueue says what happened when a file operation fails: real failures of the system, with both engines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_zero.config.resolved import Aio
from hf_zero.native.aio import AioError, AioFile, AioQueue
from tests.native.test_native_aio import at_address, content, io_uring_works, noise

# Most of them start processes of their own.
pytestmark = pytest.mark.slow

BLOCK = 64 << 10
MIB = 1 << 20


@pytest.fixture(params=["io_uring", "threads"])
def queue(request: pytest.FixtureRequest) -> Iterator[AioQueue]:
    if request.param == "io_uring" and not io_uring_works():
        pytest.skip("no io_uring here")
    queue = AioQueue(Aio(block_size=BLOCK), engine=request.param)
    yield queue
    queue.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted")
    yield folder
    # Lazily: a test that failed may have left a file open.
    subprocess.run(["umount", "-l", str(folder)], check=True)


def direct_fd(file: AioFile) -> int:
    """The file's descriptor with O_DIRECT."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            same = os.readlink(f"/proc/self/fd/{name}") == str(file.path)
            if same and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_DIRECT:
                return int(name)
    raise AssertionError("no descriptor with O_DIRECT")


def run_script(text: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=Path(__file__).parents[1].parent,
    )


# ---------------------------------------------------------------- the disk
def test_full_file_system(queue: AioQueue, small_disk: Path) -> None:
    file = queue.open(small_disk / "data", create=True)
    queue.wait(queue.write(file, noise(MIB, 0), 0))  # before the other takes all of the space
    second = queue.write(file, noise(8 * MIB, 1), MIB)
    third = queue.read(file, torch.empty(MIB, dtype=torch.uint8), 0)
    with pytest.raises(AioError) as caught:
        queue.wait(second)
    queue.wait(third)
    error = caught.value
    assert (error.path, error.errno) == (file.path, errno.ENOSPC)
    assert error.offset is not None and MIB <= error.offset <= 4 * MIB and error.nbytes <= BLOCK
    for part in (f"cannot write {error.nbytes} bytes at offset {error.offset} of {file.path}", "ENOSPC", "nvme_path"):
        assert part in str(error)
    assert "bytes are free" in str(error)
    # The queue goes on.
    os.ftruncate(file.fd, 0)
    data = noise(MIB, 2)
    queue.wait(queue.write(file, data, 0))
    assert torch.equal(content(file.path), data)


def test_file_size_limit(queue: AioQueue, tmp_path: Path) -> None:
    file = queue.open(tmp_path / "data", create=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        ticket = queue.write(file, noise(2 * MIB, 0), 0)
        with pytest.raises(AioError, match="EFBIG") as caught:
            queue.wait(ticket)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.offset == MIB
    assert "ulimit -f" in str(caught.value)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("left", [0, 4096, 5 * BLOCK, 5 * BLOCK + 1000])
def test_truncated_file(queue: AioQueue, tmp_path: Path, left: int, direct: bool) -> None:
    file = queue.open(tmp_path / "data", create=True, direct=direct)
    queue.wait(queue.write(file, noise(10 * BLOCK, 0), 0))
    os.truncate(file.path, left)
    for start, remainder in ((0, 0), (0, 5), (4096, 0)):
        expected = 10 * BLOCK - start
        arrived = max(left - start, 0)
        ticket = queue.read(file, at_address(expected, remainder), start)
        with pytest.raises(AioError) as caught:
            queue.wait(ticket)
        assert f"read {expected} bytes at offset {start} of {file.path}: only {arrived} were there" in str(
            caught.value
        )
        assert (caught.value.offset, caught.value.errno) == (start + arrived, 0)
    whole = torch.empty(left, dtype=torch.uint8)
    queue.wait(queue.read(file, whole, 0))
    assert torch.equal(whole, noise(10 * BLOCK, 0)[:left])


def test_removed_file_is_still_there_for_those_who_have_it(queue: AioQueue, tmp_path: Path) -> None:
    file = queue.open(tmp_path / "data", create=True)
    file.path.unlink()
    data, back = noise(BLOCK, 0), torch.empty(BLOCK, dtype=torch.uint8)
    queue.wait(queue.write(file, data, 0))
    queue.wait(queue.read(file, back, 0))
    assert torch.equal(data, back) and os.fstat(file.fd).st_nlink == 0


def test_descriptor_closed_by_something_else(queue: AioQueue, tmp_path: Path) -> None:
    file = queue.open(tmp_path / "data", create=True, direct=False)
    other = os.open(tmp_path, os.O_PATH)
    os.dup2(other, file.fd)  # as good as closed: no reads, no writes
    os.close(other)
    ticket = queue.write(file, noise(BLOCK, 0), 0)
    with pytest.raises(AioError, match=r"EBADF.*\n.*closed by something else"):
        queue.wait(ticket)


def test_refused_direct_access_goes_through_the_page_cache(queue: AioQueue, tmp_path: Path) -> None:
    """EINVAL where the alignment is right: a file system that promised more than it does."""
    data, back = at_address(10 * BLOCK, 0).fill_(120), at_address(10 * BLOCK, 0)
    file = queue.open(tmp_path / "data", create=True)
    if not file.direct:
        pytest.skip("the temporary folder does not take O_DIRECT")
    refusing = os.open("/proc/self/oom_score_adj", os.O_RDWR)  # takes a number, and gives EINVAL to anything else
    os.dup2(refusing, direct_fd(file))
    os.close(refusing)
    queue.wait(queue.write(file, data, 0))
    assert not file.direct
    before = queue.stats()
    queue.wait(queue.read(file, back, 0))
    after = queue.stats()
    assert torch.equal(back, data) and torch.equal(content(file.path), data)
    assert after.operations - before.operations == after.buffered - before.buffered == 10, "not asked again"


# ---------------------------------------------------------------- opening
def test_open_errors(queue: AioQueue, tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "file").touch()
    cases = [
        (tmp_path / "none" / "x", errno.ENOENT, "does not exist"),
        (tmp_path, errno.EISDIR, "is a folder"),
        (tmp_path / "file" / "x", errno.ENOTDIR, "A part of the path is a file"),
    ]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    cases.append((small_disk / "x", errno.EROFS, "mounted read-only"))
    for path, code, remedy in cases:
        with pytest.raises(AioError) as caught:
            queue.open(path, create=True)
        assert caught.value.errno == code and caught.value.path == path
        assert f"cannot open {path}: " in str(caught.value) and remedy in str(caught.value)


def test_no_permission(tmp_path: Path) -> None:
    """Root may everything, so another user tries."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    (tmp_path / "data").write_bytes(b"x")
    (tmp_path / "data").chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    done = run_script(f"""
        import os
        from hf_zero.native.aio import AioError, AioQueue
        queue = AioQueue()
        os.setuid(65534)
        try:
            queue.open({str(tmp_path / "data")!r})
        except AioError as error:
            print(error)
    """)
    assert "Permission denied (EACCES)" in done.stdout and "nvme_path" in done.stdout, done


def test_file_opened_for_reading(queue: AioQueue, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(100))
    file = queue.open(tmp_path / "data", write=False)
    queue.wait(queue.read(file, torch.empty(100, dtype=torch.uint8), 0))
    with pytest.raises(AssertionError, match="write=False"):
        queue.write(file, noise(100, 0), 0)


# ---------------------------------------------------------------- processes
def test_forked_child_is_told_and_can_have_its_own(queue: AioQueue, tmp_path: Path) -> None:
    done = run_script(f"""
        import os, torch
        from hf_zero.errors import StateError
        from hf_zero.native.aio import AioQueue
        queue = AioQueue(engine={queue.engine!r})
        file = queue.open({str(tmp_path / "data")!r}, create=True)
        data = torch.arange(300_000)
        ticket = queue.write(file, data, 0)
        child = os.fork()
        if child == 0:
            for use in (lambda: queue.wait(ticket), lambda: queue.read(file, data, 0), lambda: queue.done(ticket)):
                try:
                    use()
                except StateError as error:
                    print(error, flush=True)
            queue.close()
            own = AioQueue(engine={queue.engine!r})
            own.wait(own.write(file, data, 4_000_000))
            raise SystemExit(7)
        assert os.waitpid(child, 0)[1] == 7 << 8
        queue.wait(ticket)
        back = torch.empty_like(data)
        queue.wait(queue.read(file, back, 4_000_000))
        assert torch.equal(back, data)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("was forked from it") == 3, done.stdout


def test_exit_without_close_finishes_writes(queue: AioQueue, tmp_path: Path) -> None:
    done = run_script(f"""
        import torch
        from hf_zero.native.aio import AioQueue
        queue = AioQueue(engine={queue.engine!r})
        file = queue.open({str(tmp_path / "data")!r}, create=True)
        queue.write(file, torch.full((32 << 20,), 5, dtype=torch.uint8), 0)
    """)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert torch.equal(content(tmp_path / "data"), torch.full((32 << 20,), 5, dtype=torch.uint8))


def test_forbidden_io_uring_leaves_threads(tmp_path: Path) -> None:
    """The kernel answers as in containers: a seccomp filter answers io_uring_setup with EPERM."""
    done = run_script(f"""
        import ctypes, logging, struct
        logging.basicConfig(level=logging.INFO)
        rules = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, 425, 0x06, 0, 0, 0x50001, 0x06, 0, 0, 0x7FFF0000)
        memory = ctypes.create_string_buffer(rules)
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(memory)))
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0  # PR_SET_SECCOMP, filter

        import torch
        from hf_zero.errors import OffloadError
        from hf_zero.native.aio import AioQueue
        for _ in range(2):
            queue = AioQueue()
            assert queue.engine == "threads"
        file = queue.open({str(tmp_path / "data")!r}, create=True)
        queue.wait(queue.write(file, torch.arange(1000), 0))
        try:
            AioQueue(engine="io_uring")
        except OffloadError as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr
    assert "io_uring cannot be used here: Operation not permitted (EPERM)" in done.stdout
    assert "engine='auto'" in done.stdout
    assert done.stderr.count("files are accessed with threads") == 1, done.stderr
