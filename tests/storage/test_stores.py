"""Every store keeps these promises, and the tests run against each of them: values under keys, borrowed,
space, usage.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hf_zero.config.resolved import Aio
from hf_zero.storage import DeviceStore, DiskStore, HostStore, MemoryStore, ShardStore, StagingPool, SwapFolder
from tests.harness.memory import anonymous_bytes
from tests.harness.stores import flush
from tests.storage.conftest import GPU, CountedPages

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
POOL_BYTES = 256 << 10
SIZES = (0, 1, 7, 511, 4097)
LARGE = 100_000  # elements of fp32: more than the pool
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)


@dataclasses.dataclass
class Made:
    store: ShardStore
    pool: StagingPool | None = None


@pytest.fixture(params=["device", "host", "disk", "disk-preallocated", "disk-waiting", "disk-threads", "disk-pinned"])
def made(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: CountedPages
) -> Iterator[Made]:
    kind: str = request.param
    if kind == "device":
        yield Made(DeviceStore(CPU))
        return
    if kind == "host":
        yield Made(HostStore(CPU, pin=True))
        return
    if kind == "disk-threads":
        monkeypatch.setenv("HF_ZERO_AIO_ENGINE", "threads")
    folder = SwapFolder(tmp_path, 0)
    pool = StagingPool(POOL_BYTES, device=GPU if kind == "disk-pinned" else CPU, pin=True)
    store = DiskStore(
        folder,
        "test",
        aio=Aio(block_size=64 << 10, queue_depth=4),
        pool=pool,
        preallocate=kind == "disk-preallocated",
        read_ahead=kind != "disk-waiting",
        write_behind=kind != "disk-waiting",
    )
    if kind == "disk-threads":
        assert store._file._queue.engine == "threads"
    yield Made(store, pool)
    store.close()
    folder.close()
    assert pool._held.total() == 0, "memory was not given back"
    assert pool.current_bytes == 0 and pages.registered == {}, "the last store has left"


@pytest.fixture
def store(made: Made) -> ShardStore:
    return made.store


def pattern(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.arange(numel, dtype=torch.int64) * 31 + seed * 17 + 1).remainder(113).to(dtype)


def put(store: ShardStore, key: str, value: torch.Tensor, *, overwrite: bool = False) -> None:
    with store.borrow([key], write=True, overwrite=overwrite) as borrow:
        borrow.tensors[0].copy_(value)


def get(store: ShardStore, key: str) -> torch.Tensor:
    with store.borrow([key]) as borrow:
        return borrow.tensors[0].clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_then_what_was_written(store: ShardStore, dtype: torch.dtype) -> None:
    for numel in (*SIZES, LARGE):
        store.create(f"k{numel}", numel, dtype)
    for numel in (*SIZES, LARGE):
        with store.borrow([f"k{numel}"]) as borrow:
            (zeros,) = borrow.tensors
            assert zeros.shape == (numel,)
            assert zeros.dtype == dtype
            assert not zeros.any()
    for numel in (*SIZES, LARGE):
        put(store, f"k{numel}", pattern(numel, dtype, numel))
    for again in range(2):
        for numel in (*SIZES, LARGE):
            assert torch.equal(get(store, f"k{numel}"), pattern(numel, dtype, numel)), (numel, again)
        flush(store)


def test_several_keys_at_once(store: ShardStore) -> None:
    keys = [f"k{numel}" for numel in SIZES]
    for key, numel in zip(keys, SIZES, strict=True):
        store.create(key, numel, torch.float32)
    with store.borrow(keys, write=True) as borrow:
        for tensor in borrow.tensors:
            tensor.copy_(pattern(len(tensor), torch.float32, 5))
    with store.borrow(list(reversed(keys))) as borrow:
        for tensor, numel in zip(borrow.tensors, reversed(SIZES), strict=True):
            assert torch.equal(tensor, pattern(numel, torch.float32, 5))


def test_tensors_of_leases_do_not_overlap(store: ShardStore) -> None:
    for i in range(4):
        store.create(f"k{i}", 511, torch.float32)
    borrowed = [store.borrow([f"k{i}"], write=True) for i in range(4)]
    for i, borrow in enumerate(borrowed):
        borrow.tensors[0].fill_(i + 1)
    for borrow in borrowed:
        borrow.release()
        borrow.release()  # the second one does nothing
    assert [int(get(store, f"k{i}").sum()) for i in range(4)] == [511, 1022, 1533, 2044]


def test_part_of_a_tensor_can_be_changed(store: ShardStore) -> None:
    store.create("k", 4097, torch.float32)
    put(store, "k", pattern(4097, torch.float32, 1), overwrite=True)
    with store.borrow(["k"], write=True) as borrow:
        borrow.tensors[0][4000:] += 1000
    want = pattern(4097, torch.float32, 1)
    want[4000:] += 1000
    assert torch.equal(get(store, "k"), want)


def test_prefetch_changes_nothing_but_time(store: ShardStore) -> None:
    keys = [f"k{i}" for i in range(20)]  # 20 x 20 KiB: more than the pool
    for i, key in enumerate(keys):
        store.create(key, 5000, torch.float32)
        put(store, key, pattern(5000, torch.float32, i))
    store.prefetch(keys)
    store.prefetch(keys)
    for i in reversed(range(20)):
        assert torch.equal(get(store, keys[i]), pattern(5000, torch.float32, i))
    store.prefetch(keys[:2])
    put(store, keys[0], pattern(5000, torch.float32, 77), overwrite=True)
    assert torch.equal(get(store, keys[0]), pattern(5000, torch.float32, 77))
    assert torch.equal(get(store, keys[1]), pattern(5000, torch.float32, 1))


def test_two_threads_and_many_keys(made: Made) -> None:
    """Each thread cycles through keys of its own; together they are 12 times the pool."""
    store, num_keys, numel, rounds = made.store, 40, 9001, 3
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            keys = [f"t{thread}/{i}" for i in range(num_keys)]
            for again in range(rounds):
                for i, key in enumerate(keys):
                    store.prefetch(keys[i + 1 : i + 3])
                    with store.borrow([key], write=True) as borrow:
                        want = pattern(numel, torch.float32, i) + (again - 1) * 1000 if again else torch.zeros(numel)
                        assert torch.equal(borrow.tensors[0], want), (key, again)
                        borrow.tensors[0].copy_(pattern(numel, torch.float32, i) + again * 1000)
        except BaseException as error:
            errors.append(error)

    for thread in range(2):
        for i in range(num_keys):
            store.create(f"t{thread}/{i}", numel, torch.float32)
    run_threads([lambda thread=thread: work(thread) for thread in range(2)])  # type: ignore[misc]
    if errors:
        raise errors[0]
    flush(store)
    for thread in range(2):
        for i in range(num_keys):
            assert torch.equal(get(store, f"t{thread}/{i}"), pattern(numel, torch.float32, i) + (rounds - 1) * 1000)
    if made.pool is not None:
        assert made.pool.budget_bytes == POOL_BYTES
        assert made.pool.peak_bytes <= POOL_BYTES


def test_drop_frees_the_key_and_its_space_reads_as_zeros(store: ShardStore) -> None:
    for again in range(3):
        for i in range(5):
            store.create(f"k{i}", 4097, torch.float32)
            assert not get(store, f"k{i}").any(), again
            put(store, f"k{i}", pattern(4097, torch.float32, i))
        store.prefetch(["k1"])
        for i in range(5):
            store.drop(f"k{i}")
    assert store.usage() == {}
    with pytest.raises(KeyError):
        store.borrow(["k0"])


def test_usage_is_the_bytes_of_the_values(store: ShardStore) -> None:
    store.create("a", 4097, torch.float32)
    store.create("b", 7, torch.bfloat16)
    store.create("c", 0, torch.float64)
    assert store.usage() == {"a": 16388, "b": 14, "c": 0}


def test_mistakes_of_the_caller(store: ShardStore) -> None:
    store.create("k", 7, torch.float32)
    with pytest.raises(AssertionError, match="exists already"):
        store.create("k", 7, torch.float32)
    with pytest.raises(AssertionError, match="write=True"):
        store.borrow(["k"], overwrite=True)


def test_tensors_stay_where_the_store_is_memory(made: Made) -> None:
    """Every MemoryStore promises this to optimizers, which hold the tensors, and to an engine that takes them over."""
    store = made.store
    store.create("k", 511, torch.float32)
    if not isinstance(store, MemoryStore):
        assert not store.can_adopt(store)
        return
    tensor = store.tensor("k")
    put(store, "k", pattern(511, torch.float32, 1))
    assert torch.equal(tensor, pattern(511, torch.float32, 1)), "a borrow is the tensor itself"
    assert store.can_adopt(store)
    store.adopt("l", store, "k")
    assert store.tensor("l") is tensor and list(store.usage()) == ["l"]


def test_close_gives_files_and_threads_back_and_twice_is_once(made: Made) -> None:
    store = made.store
    store.create("k", 7, torch.float32)
    put(store, "k", torch.ones(7))
    before = open_files(), len(os.listdir("/proc/self/task"))
    store.close()
    given_back = before[0] - open_files()
    if isinstance(store, DiskStore):
        assert given_back and not store.path.exists()
        assert store._file._queue.engine != "threads" or len(os.listdir("/proc/self/task")) < before[1]
        with pytest.raises(AssertionError, match="is closed"):
            get(store, "k")
    if isinstance(store, HostStore):
        assert store.usage() == {}
        store.drop("k")  # an average that outlives its engine
    # The system gives the lowest free numbers: these files have those of the store's now, and a second close must not
    # close them.
    others = [os.open(os.devnull, os.O_RDONLY) for _ in given_back]
    store.close()
    for other in others:
        os.close(other)  # OSError if it is closed already


def open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def test_memory_stores_lease_the_tensor_itself() -> None:
    for store in (DeviceStore(CPU), HostStore(CPU, pin=True)):
        store.create("k", 4097, torch.bfloat16)
        view = store.tensor("k")[5:10]
        with store.borrow(["k"], write=True) as borrow:
            assert borrow.tensors[0] is store.tensor("k")
            borrow.tensors[0].fill_(3)
        assert view.tolist() == [3.0] * 5


def test_host_memory_is_page_aligned_and_free_until_it_is_touched() -> None:
    store = HostStore(CPU, pin=False)
    before = anonymous_bytes()
    store.create("large", 256 << 20, torch.float32)
    store.create("small", 3, torch.float32)
    assert anonymous_bytes() - before < 32 << 20
    assert all(store.tensor(key).data_ptr() % 4096 == 0 for key in ("large", "small"))
    store.tensor("large")[: 16 << 20].fill_(1)
    assert anonymous_bytes() - before >= 60 << 20, "vacuous: touching memory did not show"
    store.drop("large")
    assert anonymous_bytes() - before < 32 << 20


_CYCLE = """
import sys, torch
from hf_zero.config.resolved import Aio
from hf_zero.storage import DiskStore, StagingPool, SwapFolder
from tests.harness.memory import anonymous_bytes
from tests.harness.stores import flush
pool = StagingPool(16 << 20, device=torch.device("cpu"), pin=False)
store = DiskStore(SwapFolder(sys.argv[1], 0), "s", aio=Aio(), pool=pool, preallocate=False)
keys = [f"k{i}" for i in range(40)]
for key in keys:
    store.create(key, 1 << 20, torch.float32)
for key in keys[:2]:  # what a first use costs anyway
    with store.borrow([key], write=True) as borrow:
        borrow.tensors[0].fill_(0)
flush(store)
pool.close()
before, most = anonymous_bytes(), 0
for again in range(2):
    for i, key in enumerate(keys):
        store.prefetch(keys[i + 1 : i + 3])
        with store.borrow([key], write=True) as borrow:
            assert (borrow.tensors[0][::999] == again).all()
            borrow.tensors[0].add_(1)
            most = max(most, anonymous_bytes())
print(most - before, pool.peak_bytes)
"""


@pytest.mark.slow
def test_resident_memory_is_bounded(tmp_path: Path) -> None:
    """160 MiB of keys through a pool of 16 MiB."""
    grown, peak = (int(word) for word in run_python(_CYCLE, tmp_path).split())
    assert peak == 16 << 20
    assert 12 << 20 <= grown <= 20 << 20


def run_threads(functions: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"


def run_python(code: str, *args: object, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
