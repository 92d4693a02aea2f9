"""The store on disk alone does this: staged writes, reading ahead, bounded memory."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.config.resolved import Aio
from hf_zero.errors import OffloadError
from hf_zero.native.host_memory import transfer_memory
from hf_zero.storage import DiskStore, StagingPool, SwapFolder
from hf_zero.storage import staging_pool as staging
from tests.harness.stores import flush
from tests.storage.conftest import GPU, CountedPages
from tests.storage.test_stores import get, pattern, put, run_threads

CPU = torch.device("cpu")
KIB, MIB = 1 << 10, 1 << 20


@contextlib.contextmanager
def disk_store(path: Path, pool: int | StagingPool = 256 * KIB, **options: Any) -> Iterator[DiskStore]:
    folder = SwapFolder(path, 0)
    shared = pool if isinstance(pool, StagingPool) else StagingPool(pool, device=CPU, pin=False)
    store = DiskStore(folder, "test", aio=Aio(), pool=shared, **{"preallocate": False, **options})
    try:
        yield store
    finally:
        store.close()
        folder.close()


def fill(store: DiskStore, num_keys: int, numel: int) -> list[str]:
    """Keys k0, k1, ... with `pattern(numel, fp32, i)`, on the disk and not in memory."""
    keys = [f"k{i}" for i in range(num_keys)]
    for i, key in enumerate(keys):
        store.create(key, numel, torch.float32)
        put(store, key, pattern(numel, torch.float32, i), overwrite=True)
    flush(store)
    return keys


def stage(store: DiskStore, key: str, value: float) -> None:
    with store.stage([key]) as borrow:
        borrow.tensors[0].fill_(value)


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


# -------------------------------------------------------------------- staged writes
def test_staged_values_are_seen_after_commit_only(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        keys = [*fill(store, 2, 5000), "blank", "empty"]
        store.create("blank", 5000, torch.float32)
        store.create("empty", 0, torch.float32)
        old = {key: get(store, key) for key in keys}
        for key in keys:
            stage(store, key, 9)
            assert torch.equal(get(store, key), old[key])
            store.prefetch([key])  # what was read ahead is old after the commit
        store.commit(keys[1:])
        assert len(store._ahead) == 1, "only k0 was read ahead and has the same content still"
        assert torch.equal(get(store, "k0"), old["k0"])
        for key in keys[1:]:
            assert torch.equal(get(store, key), torch.full_like(old[key], 9)), key
        store.rollback(keys)  # forgets k0, and finds nothing for the others
        assert torch.equal(get(store, "k0"), old["k0"])
        assert torch.equal(get(store, "k1"), torch.full((5000,), 9.0))
        put(store, "k0", torch.full((5000,), 4.0))
        assert torch.equal(get(store, "k0"), torch.full((5000,), 4.0))


def test_staging_again_starts_from_the_content_and_replaces(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        fill(store, 1, 5000)
        stage(store, "k0", 5)
        with store.stage(["k0"]) as borrow:
            assert torch.equal(borrow.tensors[0], pattern(5000, torch.float32, 0))
            borrow.tensors[0].fill_(6)
        flush(store)
        store.commit(["k0"])
        assert torch.equal(get(store, "k0"), torch.full((5000,), 6.0))


def test_commit_does_not_wait_for_the_write(tmp_path: Path) -> None:
    with disk_store(tmp_path, 16 * MIB) as store:
        store.create("k", MIB, torch.float32)
        for value in range(5):
            stage(store, "k", value)
            reads = store.stats().reads
            store.commit(["k"])
            assert (get(store, "k") == value).all()
            assert store.stats().reads == reads, "what is being written is in memory"
        flush(store)
        assert (get(store, "k") == 4).all()


def test_staging_reuses_its_room(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        keys = fill(store, 4, 5000)
        for step in range(20):
            for key in keys:
                stage(store, key, step)
            if step == 0:
                size = store.path.stat().st_size
            if step % 3 == 2:
                store.rollback(keys)
            else:
                store.commit(keys)
            assert all(get(store, key)[0] == (step - 1 if step % 3 == 2 else step) for key in keys)
        for key in keys:
            stage(store, key, 1)
            store.drop(key)
        for i in range(8):
            store.create(f"new{i}", 5000, torch.float32)
        assert store.path.stat().st_size == size


def test_staging_out_of_order_is_refused(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        fill(store, 1, 100)
        with pytest.raises(AssertionError, match="nothing is staged"):
            store.commit(["k0"])
        stage(store, "k0", 5)
        with pytest.raises(AssertionError, match="commit or roll back"):
            store.borrow(["k0"], write=True)
        with store.borrow(["k0"]), pytest.raises(AssertionError, match="borrowed"):
            store.commit(["k0"])


# -------------------------------------------------------------------- kept contents
def kept(store: DiskStore, key: str) -> Callable[[], torch.Tensor]:
    """Keep a content of 5000 floats; what this returns reads it, in three pieces that overlap no page, and lets go."""
    content, memory = store.keep(key), transfer_memory(8 * KIB, fork=False)

    def read() -> torch.Tensor:
        ranges = [(0, 7), (7, 3333), (3333, 5000)]
        pieces = [
            piece.clone() for low, high in ranges for piece in content.elements(low, high, torch.float32, memory)
        ]
        content.release()
        content.release()
        return torch.cat(pieces)

    return read


def test_a_kept_content_outlives_every_change(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        fill(store, 4, 5000)
        store.create("blank", 5000, torch.float32)
        put(store, "k0", torch.full((5000,), 0.5))  # is being written when it is kept
        readers = [kept(store, key) for key in ("k0", "k1", "k2", "k3", "blank", "k1")]
        for key in ("k0", "blank"):
            put(store, key, torch.full((5000,), -1.0), overwrite=True)
        with store.borrow(["k1"], write=True) as borrow:  # from the old content to a new one
            borrow.tensors[0].add_(1)
        with contextlib.suppress(ZeroDivisionError), store.borrow(["k1"], write=True):
            raise ZeroDivisionError  # and this one is not kept
        for value in (-2.0, -3.0):
            stage(store, "k2", value)
            store.commit(["k2"])
        store.drop("k3")
        store.create("k4", 5000, torch.float32)
        put(store, "k4", torch.full((5000,), -4.0))
        flush(store)
        found = [read() for read in readers]
        wanted = [torch.full((5000,), 0.5), *(pattern(5000, torch.float32, i) for i in (1, 2, 3)), torch.zeros(5000)]
        for got, want in zip(found, [*wanted, wanted[1]], strict=True):
            assert torch.equal(got, want)
        assert torch.equal(get(store, "k1"), wanted[1] + 1)
        assert [float(get(store, key)[0]) for key in ("k0", "blank", "k2", "k4")] == [-1, -1, -3, -4]
        assert not store._kept and not store._retired


def test_keeping_reuses_its_room(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        keys = fill(store, 4, 5000)
        sizes = []
        for step in range(6):
            readers = [kept(store, key) for key in keys]
            for key in keys:
                put(store, key, torch.full((5000,), float(step)), overwrite=True)
            old = [read() for read in readers]
            assert step == 0 or all((one == step - 1).all() for one in old)
            sizes.append(store.path.stat().st_size)
        assert len(set(sizes)) == 1 and sizes[0] <= 1.25 * 8 * 20480
        with store.borrow(["k0"], write=True), pytest.raises(AssertionError, match="borrowed to be changed"):
            store.keep("k0")


@pytest.mark.parametrize("staged", [False, True])
def test_without_room_a_write_waits_for_the_reader(tmp_path: Path, monkeypatch: Any, staged: bool) -> None:
    with disk_store(tmp_path) as store:
        fill(store, 1, 5000)
        if staged:  # its second region is there; the third one is not
            stage(store, "k0", 1)
            store.commit(["k0"])
        read = kept(store, "k0")
        if staged:
            stage(store, "k0", 2)
            store.commit(["k0"])
        monkeypatch.setattr(store._file, "_grow", lambda nbytes: OSError(errno.ENOSPC, "No space left on device"))
        changed, old = threading.Event(), get(store, "k0") * 0 + 1 if staged else pattern(5000, torch.float32, 0)
        write = functools.partial(stage, store, "k0", 9) if staged else functools.partial(put, store, "k0", old + 9)
        thread = threading.Thread(target=lambda: (write(), changed.set()), daemon=True)
        store._file._end = store._file._size  # what it has grown ahead is used up
        thread.start()
        assert not changed.wait(0.2)
        assert torch.equal(read(), old)
        assert changed.wait(10)
        if staged:
            store.commit(["k0"])
        assert torch.equal(get(store, "k0"), torch.full((5000,), 9.0) if staged else old + 9)
        with pytest.raises(OffloadError, match="cannot grow"):  # nobody keeps anything: nothing to wait for
            store.create("new", 50000, torch.float32)


# -------------------------------------------------------------------- borrowed
def test_an_exception_keeps_the_content(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        fill(store, 1, 5000)
        with pytest.raises(ZeroDivisionError), store.borrow(["k0"], write=True) as borrow:
            borrow.tensors[0].fill_(float("nan"))
            raise ZeroDivisionError
        assert torch.equal(get(store, "k0"), pattern(5000, torch.float32, 0))


def test_a_key_is_leased_once_at_a_time(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        fill(store, 2, 5000)
        with store.borrow(["k0"]):
            for keys in (["k0"], ["k1", "k0"], ["k1", "k1"]):
                with pytest.raises(AssertionError, match="borrowed already"):
                    store.borrow(keys)
            with pytest.raises(AssertionError, match="borrowed"):
                store.drop("k0")
        assert torch.equal(get(store, "k1"), pattern(5000, torch.float32, 1))


# -------------------------------------------------------------------- pipelining
def test_prefetch_reads_and_the_lease_does_not(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        keys = fill(store, 3, 5000)
        assert store.stats().reads == 0
        store.prefetch(keys)
        assert store.stats().reads == 3
        until(lambda: all(flight.transfer.poll() for flight in store._ahead), "read ahead")
        before = store.stats()
        for i, key in enumerate(keys):
            assert torch.equal(get(store, key), pattern(5000, torch.float32, i))
        after = store.stats()
        assert after.reads == 3
        assert after.bytes_read == 60_000
        assert after.read_wait_s - before.read_wait_s < 0.01
        get(store, "k0")
        assert store.stats().reads == 4, "vacuous: contents are kept"


def test_prefetch_stops_where_the_pool_ends(tmp_path: Path) -> None:
    with disk_store(tmp_path, 64 * KIB) as store:
        keys = fill(store, 5, 5000)  # 20 KiB each
        store.prefetch(keys)
        assert store.stats().reads == 3
        with store.borrow(keys[3:]):  # room comes from what was read ahead last
            assert store.stats().reads == 5
        get(store, "k0")
        assert store.stats().reads == 5


def test_without_read_ahead_prefetch_does_nothing(tmp_path: Path) -> None:
    with disk_store(tmp_path, read_ahead=False) as store:
        store.prefetch(fill(store, 3, 5000))
        assert store.stats().reads == 0


@pytest.mark.parametrize("write_behind", [True, False])
def test_write_behind(tmp_path: Path, write_behind: bool) -> None:
    """The values are in the file when release returns, if it is off."""
    with disk_store(tmp_path, write_behind=write_behind) as store:
        store.create("k", 1024, torch.float32)
        put(store, "k", torch.ones(1024))
        assert len(store._writes) == int(write_behind)
        flush(store)
        assert not store._writes
        assert store.path.read_bytes()[:4096] == torch.ones(1024).numpy().tobytes()


def test_what_is_being_written_is_served_from_memory(tmp_path: Path) -> None:
    with disk_store(tmp_path, 16 * MIB) as store:
        store.create("k", MIB, torch.float32)
        for value in range(5):
            put(store, "k", torch.full((MIB,), float(value)), overwrite=True)
            assert (get(store, "k") == value).all()
        assert store.stats().reads == 0
        flush(store)
        assert (get(store, "k") == 4).all()
        assert store.stats().reads == 1


def test_transfers_are_aligned(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        if not store._file._file.direct:
            pytest.skip("no direct access on this file system")
        for numel in (1, 7, 511, 4097, 5001):
            store.create(f"k{numel}", numel, torch.float32)
            put(store, f"k{numel}", pattern(numel, torch.float32, 2))
        flush(store)
        for numel in (1, 7, 511, 4097, 5001):
            assert torch.equal(get(store, f"k{numel}"), pattern(numel, torch.float32, 2))
        counts = store._file._queue.stats()
        assert counts.completions >= 10
        assert (counts.bounced, counts.buffered) == (0, 0)


def test_the_file_does_not_grow_when_keys_come_and_go(tmp_path: Path) -> None:
    with disk_store(tmp_path) as store:
        fill(store, 4, 5000)
        size = store.path.stat().st_size
        assert 4 * 20480 <= size <= 1.25 * 4 * 20480
        for i in range(40):
            store.drop(f"k{i}")
            store.create(f"k{i + 4}", 5000, torch.float32)
            assert not get(store, f"k{i + 4}").any()
            put(store, f"k{i + 4}", pattern(5000, torch.float32, i))
        assert store.path.stat().st_size == size


# -------------------------------------------------------------------- bounded memory
MakePool = Callable[[int], StagingPool]


@pytest.fixture(params=["mapped", "pinned"])
def make_pool(request: pytest.FixtureRequest, pages: CountedPages) -> MakePool:
    """A pool of so many bytes, of either kind of memory."""
    device = GPU if request.param == "pinned" else CPU
    return lambda nbytes: StagingPool(nbytes, device=device, pin=True)


def test_the_pool_bounds_memory(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(64 * KIB)
    with disk_store(tmp_path, pool) as store:
        keys = [*fill(store, 30, 4000), *(f"s{i}" for i in range(10))]
        for i in range(10):
            store.create(f"s{i}", 100 * i + 1, torch.float32)
        for _ in range(3):
            for i, key in enumerate(keys):
                store.prefetch(keys[i : i + 4])
                with store.borrow([key], write=True) as borrow:
                    borrow.tensors[0].add_(1)
        assert 48 * KIB < pool.peak_bytes <= 64 * KIB
        assert pool.budget_bytes == 64 * KIB
    assert pool._held.total() == 0
    pool.close()
    assert pool.current_bytes == 0


def test_a_key_larger_than_the_pool_is_said_once(
    make_pool: MakePool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(64 * KIB)
    with disk_store(tmp_path, pool) as store, caplog.at_level(logging.WARNING):
        keys = fill(store, 2, 100_000)
        for i, key in enumerate(keys):
            assert torch.equal(get(store, key), pattern(100_000, torch.float32, i))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, warnings
    assert "buffer_size" in warnings[0]
    assert "buffer_count" in warnings[0]
    assert pool.peak_bytes == 401_408, "more than one of them at a time"


def test_one_thread_may_hold_more_than_the_pool(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(40 * KIB)
    started = time.monotonic()
    with disk_store(tmp_path, pool) as store:
        keys = fill(store, 4, 5000)
        borrowed = [store.borrow([key], write=True) for key in keys]
        assert pool.budget_bytes == 80 * KIB
        for borrow in borrowed:
            borrow.release()
    assert time.monotonic() - started < 5, "it waited for itself"


def test_two_threads_that_wait_for_each_other(make_pool: MakePool, tmp_path: Path) -> None:
    """Each holds half of the pool and asks for the other half."""
    pool = make_pool(40 * KIB)
    started = time.monotonic()
    with disk_store(tmp_path, pool) as store:
        keys = fill(store, 4, 5000)
        both = threading.Barrier(2)

        def work(first: str, second: str) -> None:
            with store.borrow([first], write=True):
                both.wait(10)
                with store.borrow([second], write=True):
                    time.sleep(0.01)

        run_threads([lambda: work(keys[0], keys[1]), lambda: work(keys[2], keys[3])])
    assert time.monotonic() - started < 5
    assert pool.budget_bytes == 60 * KIB, "one of them was served beyond the budget, then the other had room"


def test_a_thread_waits_for_the_lease_of_another(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(40 * KIB)
    with disk_store(tmp_path, pool) as store:
        keys = fill(store, 3, 5000)
        held = store.borrow(keys[:2])
        seconds = []

        def work() -> None:
            started = time.monotonic()
            get(store, keys[2])
            seconds.append(time.monotonic() - started)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        time.sleep(0.1)
        held.release()
        thread.join(10)
        assert seconds
        assert seconds[0] > 0.05
        assert pool.budget_bytes == 40 * KIB


def test_a_lease_held_while_another_thread_is_joined(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool cannot know who waits for whom, so its patience ends."""
    monkeypatch.setattr(staging, "PATIENCE_S", 0.2)
    pool = make_pool(40 * KIB)
    with disk_store(tmp_path, pool) as store:
        keys = fill(store, 3, 5000)
        with store.borrow(keys[:2]):
            run_threads([lambda: put(store, keys[2], torch.ones(5000))])
        assert pool.budget_bytes == 60 * KIB


def test_a_large_request_is_not_starved(make_pool: MakePool, tmp_path: Path) -> None:
    """Two threads that go from borrow to borrow leave no moment at which nobody has memory, except to who waits."""
    pool = make_pool(40 * KIB)
    with disk_store(tmp_path, pool) as store:
        keys = fill(store, 4, 5000)
        stop = threading.Event()

        def cycle(key: str) -> None:
            while not stop.is_set():
                with store.borrow([key]):
                    time.sleep(0.002)

        threads = [threading.Thread(target=cycle, args=(key,), daemon=True) for key in keys[:2]]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        started = time.monotonic()
        for _ in range(10):
            with store.borrow(keys[2:]):
                pass
        seconds = time.monotonic() - started
        stop.set()
        for thread in threads:
            thread.join(10)
    assert seconds < 5
    assert pool.budget_bytes == 40 * KIB


def test_two_stores_share_a_pool(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(64 * KIB)
    with disk_store(tmp_path / "a", pool) as one, disk_store(tmp_path / "b", pool) as two:
        keys = fill(one, 10, 5000)
        fill(two, 10, 5000)
        for i in range(10):
            one.prefetch(keys[i : i + 3])
            with two.borrow([keys[i]]) as borrow, one.borrow([keys[i]]) as other:
                assert torch.equal(borrow.tensors[0], other.tensors[0])
    assert pool.budget_bytes == 64 * KIB


def test_pinned_memory_is_pinned_once_whatever_sizes_are_asked_for(tmp_path: Path, pages: CountedPages) -> None:
    """The blocks have a large size and a small one, each of which fills the pool in its turn."""
    pool = StagingPool(64 * KIB, device=GPU, pin=True)
    with disk_store(tmp_path, pool) as store:
        for key, numel in [("large0", 12_000), ("large1", 12_000), *((f"small{i}", 4000) for i in range(4))]:
            store.create(key, numel, torch.float32)
        for again in range(5):
            for key in ("large0", "large1"):
                put(store, key, pattern(12_000, torch.float32, again), overwrite=True)
            with store.borrow([f"small{i}" for i in range(4)], write=True) as borrow:
                for tensor in borrow.tensors:
                    tensor.add_(1)
        flush(store)
        assert get(store, "small3").unique().tolist() == [5]
        assert torch.equal(get(store, "large0"), pattern(12_000, torch.float32, 4))
        assert (pages.calls, list(pages.registered.values())) == (1, [64 * KIB])
    assert pages.registered == {}


def test_pinned_memory_in_pieces_that_are_too_small_grows_once(
    tmp_path: Path, pages: CountedPages, caplog: pytest.LogCaptureFixture
) -> None:
    """Two pages between pages in use are no room for three, though there is room for four."""
    pool = StagingPool(40 * KIB, device=GPU, pin=True)
    with disk_store(tmp_path, pool) as store, caplog.at_level(logging.WARNING):
        for i in range(5):
            store.create(f"k{i}", 2048, torch.float32)
        store.create("large", 3072, torch.float32)
        for _ in range(3):
            borrowed = [store.borrow([f"k{i}"]) for i in range(5)]
            borrowed[1].release()
            borrowed[3].release()
            assert not get(store, "large").any()
            for borrow in borrowed:
                borrow.release()
        assert pages.calls == 2
        assert sum(pages.registered.values()) == pool.budget_bytes == 52 * KIB
    assert len([record for record in caplog.records if "grows" in record.getMessage()]) == 1
