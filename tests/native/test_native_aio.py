"""AioQueue moves exactly the bytes that were asked for, with both engines, aligned or not, on disk and in memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_zero.config.resolved import Aio
from hf_zero.errors import ConfigError, OffloadError, StateError
from hf_zero.native.aio import AioQueue

BLOCK = 64 << 10
SIZES = (0, 1, 7, 511, 512, 513, 4095, 4096, 4097, 3 * (1 << 20) + 5)
OFFSETS = (0, 1, 511, 512, 4096 + 3)
SHARED_MEMORY = Path("/dev/shm")


@functools.cache
def io_uring_works() -> bool:
    try:
        AioQueue(engine="io_uring").close()
    except OffloadError:
        return False
    return True


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and not io_uring_works():
        pytest.skip("no io_uring here")
    return str(request.param)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not SHARED_MEMORY.is_dir():
        pytest.skip(f"no {SHARED_MEMORY}")
    made = SHARED_MEMORY / f"hf_zero_test_{os.getpid()}_{random.getrandbits(32)}"
    made.mkdir()
    yield made
    for path in made.iterdir():
        path.unlink()
    made.rmdir()


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def at_address(nbytes: int, remainder: int) -> torch.Tensor:
    """Return memory that starts `remainder` bytes after a page's start."""
    memory = torch.empty(nbytes + 2 * 4096, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096 + remainder
    return memory[start : start + nbytes]


def content(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


@contextlib.contextmanager
def queue_of(engine: str, **settings: int) -> Iterator[AioQueue]:
    queue = AioQueue(Aio(**{"block_size": BLOCK, **settings}), engine=engine)
    assert queue.engine == engine
    yield queue
    queue.close()


# ---------------------------------------------------------------- bytes
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_round_trip_leaves_neighbours_alone(engine: str, folder: Path, direct: bool) -> None:
    before = noise(OFFSETS[-1] + SIZES[-1] + 5000, seed=0)
    with queue_of(engine) as queue:
        for size in SIZES:
            for offset in OFFSETS:
                path = folder / "data"
                path.write_bytes(before.numpy().tobytes())
                file = queue.open(path, direct=direct)
                data = noise(size, seed=size + offset + 1)
                # Page-aligned, one byte off, and aligned for the device only.
                source = at_address(size, (0, 1, 512)[(size + offset) % 3]).copy_(data)
                queue.wait(queue.write(file, source, offset))
                expected = before.clone()
                expected[offset : offset + size] = data
                for remainder in (0, 3, 512, offset % 4096):
                    guarded = at_address(size + 2, remainder).fill_(77)
                    queue.wait(queue.read(file, guarded[1:-1], offset))
                    assert torch.equal(guarded[1:-1], data), (size, offset, remainder)
                    assert guarded[[0, -1]].tolist() == [77, 77]
                aligned = at_address(size, offset % 4096).fill_(77)  # the address matches the offset
                queue.wait(queue.read(file, aligned, offset))
                assert torch.equal(aligned, data)
                assert torch.equal(content(path), expected), (size, offset)
                file.close()


def test_file_grows_to_the_last_byte_written(engine: str, folder: Path) -> None:
    with queue_of(engine) as queue, contextlib.closing(queue.open(folder / "new", create=True)) as file:
        data = noise(5 * BLOCK + 77, seed=1)
        queue.wait(queue.write(file, data, 3))
        assert os.fstat(file.fd).st_size == 3 + data.numel()
        assert os.fstat(file.fd).st_mode & 0o077 == 0
        assert torch.equal(content(file.path), torch.cat([torch.zeros(3, dtype=torch.uint8), data]))


def test_random_neighbouring_requests_stay_coherent(engine: str, tmp_path: Path) -> None:
    """Ragged ends go through the page cache, the rest past it, on the same pages and at the same time."""
    rng = random.Random(5)
    size = 40 * 4096 + 321
    model = noise(size, seed=2)
    (tmp_path / "data").write_bytes(model.numpy().tobytes())
    with queue_of(engine, block_size=4096, queue_depth=16) as queue:
        file = queue.open(tmp_path / "data")
        for turn in range(60):
            cuts = sorted({0, size, *(rng.randrange(size) for _ in range(12))})
            spans = list(itertools.pairwise(cuts))
            rng.shuffle(spans)
            tickets = []
            reads = []
            for index, (start, end) in enumerate(spans):
                if rng.random() < 0.5:
                    data = at_address(end - start, rng.choice([0, start % 4096, 17])).copy_(
                        noise(end - start, turn * 100 + index)
                    )
                    model[start:end] = data
                    tickets.append(queue.write(file, data, start))
                else:
                    into = at_address(end - start, rng.choice([0, start % 4096, 17]))
                    reads.append((start, into))
                    tickets.append(queue.read(file, into, start))
            for ticket in tickets:
                queue.wait(ticket)
            for start, into in reads:
                assert torch.equal(into, model[start : start + into.numel()])
            whole = torch.empty(size, dtype=torch.uint8)
            queue.wait(queue.read(file, whole, 0))
            assert torch.equal(whole, model)
        assert queue.stats().buffered > 0 and queue.stats().bounced > 0


def test_any_dtype_and_direct_access(engine: str, tmp_path: Path) -> None:
    values = torch.arange(30_000, dtype=torch.float32).view(100, 300)
    with queue_of(engine) as queue:
        file = queue.open(tmp_path / "data", create=True)
        queue.wait(queue.write(file, values, 8192))
        back = torch.empty_like(values)
        queue.wait(queue.read(file, back, 8192))
        assert torch.equal(back, values)
        if not file.direct:
            pytest.skip("the temporary folder does not take O_DIRECT")
        aligned = at_address(BLOCK * 3, 0)
        before = queue.stats()
        queue.wait(queue.write(file, aligned, 0))
        queue.wait(queue.read(file, aligned, 0))
        after = queue.stats()
        assert after.operations - before.operations == 6
        assert (after.bounced, after.buffered) == (before.bounced, before.buffered)
        assert file.alignment % 4096 == 0


# ---------------------------------------------------------------- settings
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_queue_depth_bounds_what_is_under_way(engine: str, tmp_path: Path, depth: int) -> None:
    with queue_of(engine, queue_depth=depth) as queue:
        file = queue.open(tmp_path / "data", create=True)
        queue.wait(queue.write(file, at_address(48 * BLOCK, 0), 0))
        stats = queue.stats()
        assert stats.operations == stats.completions == 48
        assert stats.max_in_flight == depth if engine == "io_uring" else 1 <= stats.max_in_flight <= depth
        assert (depth > 1) == (stats.max_in_flight > 1)


def test_threads_share_the_work(engine: str, tmp_path: Path) -> None:
    with queue_of(engine, queue_depth=2, intra_op_parallelism=3) as queue:
        file = queue.open(tmp_path / "data", create=True)
        data = noise(96 * BLOCK, seed=3)
        queue.wait(queue.write(file, data, 0))
        assert 2 < queue.stats().max_in_flight <= 6
        assert torch.equal(content(file.path), data)


def test_overlap_events(engine: str, tmp_path: Path) -> None:
    def refills(overlap: bool) -> int:
        with queue_of(engine, queue_depth=4, overlap_events=overlap) as queue:
            file = queue.open(tmp_path / "data", create=True)
            for turn in range(4):
                data = noise(64 * BLOCK, seed=turn)
                queue.wait(queue.write(file, data, 0))
                assert torch.equal(content(file.path), data)
            assert queue.stats().max_in_flight <= 4
            return queue.stats().refills

    assert refills(overlap=False) == 0
    assert refills(overlap=True) > 0


@pytest.mark.parametrize("single", [True, False])
def test_single_submit(tmp_path: Path, single: bool) -> None:
    if not io_uring_works():
        pytest.skip("no io_uring here")
    with queue_of("io_uring", queue_depth=8, single_submit=single, overlap_events=False) as queue:
        file = queue.open(tmp_path / "data", create=True)
        queue.wait(queue.write(file, at_address(64 * BLOCK, 0), 0))
        assert queue.stats().submits == (64 if single else 8)


def test_settings_out_of_range_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Aio(block_size=0, queue_depth=0, intra_op_parallelism=0)
    for name in ("aio.block_size=0", "aio.queue_depth=0", "aio.intra_op_parallelism=0"):
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match="engine='libaio' must be one of auto, io_uring, threads"):
        AioQueue(engine="libaio")
    queue = AioQueue(Aio(block_size=5000))
    with contextlib.closing(queue):
        queue.open(tmp_path / "data", create=True, direct=False)
        with pytest.raises(ConfigError, match=r"aio\.block_size=5000 must be a multiple of 4096"):
            queue.open(tmp_path / "data")


def test_engine_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_AIO_ENGINE", "threads")
    with contextlib.closing(AioQueue()) as queue:
        assert queue.engine == "threads"
    monkeypatch.setenv("HF_ZERO_AIO_ENGINE", "libaio")
    with pytest.raises(ConfigError, match="HF_ZERO_AIO_ENGINE='libaio'"):
        AioQueue()


def test_many_threads_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    threads = 4 * len(os.sched_getaffinity(0)) + 1
    for _ in range(2):
        AioQueue(Aio(intra_op_parallelism=threads, queue_depth=1)).close()
    assert len([record for record in caplog.records if "intra_op_parallelism" in record.message]) == 1


# ---------------------------------------------------------------- threads, life and death
def test_tickets_of_two_threads(engine: str, tmp_path: Path) -> None:
    size = 12_345
    with queue_of(engine, queue_depth=4) as queue:
        file = queue.open(tmp_path / "data", create=True)
        written: list[tuple[int, int]] = []  # ticket, index; waited for by the other thread
        problems: list[BaseException] = []

        def write(first: int) -> None:
            try:
                for index in range(first, 200, 2):
                    written.append((queue.write(file, noise(size, index), index * size), index))
            except BaseException as problem:
                problems.append(problem)

        writers = [threading.Thread(target=write, args=(first,)) for first in (0, 1)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(30)
        assert not problems and len(written) == 200
        for ticket, _ in written:
            queue.wait(ticket)
            with pytest.raises(AssertionError, match="waited for already"):
                queue.wait(ticket)
        assert torch.equal(content(file.path), torch.cat([noise(size, index) for index in range(200)]))


@pytest.mark.slow
def test_other_threads_run_during_wait(engine: str, tmp_path: Path) -> None:
    with queue_of(engine) as queue:
        file = queue.open(tmp_path / "data", create=True)
        ticks: list[float] = []
        stop = threading.Event()

        def tick() -> None:
            while not stop.wait(0.0005):
                ticks.append(time.perf_counter())

        ticker = threading.Thread(target=tick)
        ticker.start()
        data = at_address(128 << 20, 0)
        start = time.perf_counter()
        queue.wait(queue.write(file, data, 0))
        end = time.perf_counter()
        stop.set()
        ticker.join()
        during = [at for at in ticks if start < at < end]
        assert len(during) > 3, (len(during), end - start)


def test_close_waits_and_tickets_stay(engine: str, tmp_path: Path) -> None:
    queue = AioQueue(Aio(block_size=BLOCK), engine=engine)
    file = queue.open(tmp_path / "data", create=True)
    data = [noise(100 * BLOCK, seed) for seed in range(3)]
    tickets = [queue.write(file, part, index * 100 * BLOCK) for index, part in enumerate(data)]
    file.close()  # what is under way goes through
    closers = [threading.Thread(target=queue.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(30)
    assert all(queue.done(ticket) for ticket in tickets)
    for ticket in tickets:
        queue.wait(ticket)
    assert torch.equal(content(tmp_path / "data"), torch.cat(data))
    with pytest.raises(StateError, match="was closed: open it again"):
        queue.read(file, data[0], 0)
    other = AioQueue(engine=engine)
    with pytest.raises(StateError, match="the queue was closed"):
        queue.read(other.open(tmp_path / "data"), data[0], 0)
    other.close()


def test_dropped_queue_finishes_and_leaves_no_thread(engine: str, tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    queue = AioQueue(Aio(block_size=BLOCK), engine=engine)
    file = queue.open(tmp_path / "data", create=True)
    assert len(os.listdir("/proc/self/task")) > before
    data = noise(200 * BLOCK, seed=9)
    queue.write(file, data.clone(), 0)
    del queue, file
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == before
    assert torch.equal(content(tmp_path / "data"), data)


def test_done_without_wait(engine: str, tmp_path: Path) -> None:
    with queue_of(engine) as queue:
        file = queue.open(tmp_path / "data", create=True)
        ticket = queue.write(file, noise(BLOCK, 0), 0)
        deadline = time.monotonic() + 20
        while not queue.done(ticket):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        queue.wait(ticket)
