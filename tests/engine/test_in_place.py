"""A model in shards becomes trainable with the memory that it has, where the layout stays what it is."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.distributed.comm import Comm
from hf_zero.runtime import build
from hf_zero.runtime.build import make_grads
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.reshard import LayoutChange
from hf_zero.storage.memory import MemoryStore
from tests.harness.ranks import run_ranks

_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
ADAM = {"type": "Adam", "params": {"lr": 0.02, "weight_decay": 0.0}}
Change = tuple[dict[str, Any], dict[str, Any]]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return self.norm(x).float().square().mean()


def config(*, threshold: int = 0, **zero: Any) -> dict[str, Any]:
    blocks = {name: zero.pop(name) for name in ("bf16",) if name in zero}
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold, **zero}
    return {"train_micro_batch_size_per_gpu": 3, "optimizer": ADAM, "zero_optimization": zero, **blocks}


class Spies:
    """Counts what a change makes: flat parameters, bytes of shards, and the elements that collectives move."""

    def __init__(self, patch: pytest.MonkeyPatch, comm: Comm) -> None:
        self.built = self.shard_bytes = self.resolved = 0
        self.comm = comm
        init, create, resolve = FlatParam.__init__, MemoryStore.create, ZeroConfig.resolve

        def counted_init(flat: FlatParam, *args: Any, **kwargs: Any) -> None:
            self.built += 1
            init(flat, *args, **kwargs)

        def counted_create(store: MemoryStore, key: str, numel: int, dtype: torch.dtype) -> None:
            self.shard_bytes += numel * dtype.itemsize
            create(store, key, numel, dtype)

        def counted_resolve(config: ZeroConfig, *args: Any, **kwargs: Any) -> Any:
            self.resolved += 1
            return resolve(config, *args, **kwargs)

        patch.setattr(FlatParam, "__init__", counted_init)
        patch.setattr(MemoryStore, "create", counted_create)
        patch.setattr(ZeroConfig, "resolve", counted_resolve)
        comm.counts.clear()

    def collectives(self) -> dict[str, int]:
        return {name: count.calls for name, count in self.comm.counts.items()}


def shards_of(engine: Any) -> dict[str, int]:
    """Return the addresses of what the engine keeps, by the first parameter of each flat parameter."""
    flats = [flat for unit in engine.units for flat in unit.flats]
    return {flat.layout.slots[0].name: flat.shard.memory.data_ptr() for flat in flats if hasattr(flat.shard, "memory")}


def batch(number: int, rank: int, width: int) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * number + rank))


def changed(change: Change, *, reuse: bool, width: int, steps: int) -> dict[str, Any]:
    """Build in shards under the first configuration, train under the second."""
    torch.manual_seed(3)
    with hf_zero.sharded_init(change[0]):
        model = Net(width)
    frozen = hf_zero.engine_of(model)
    assert frozen is not None and not frozen.trains
    before = shards_of(frozen)
    names = [unit.name for unit in frozen.units]
    with pytest.MonkeyPatch.context() as patch:
        spies = Spies(patch, frozen.comm)
        if not reuse:
            patch.setattr(LayoutChange, "reuse", lambda *args: None)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        resident = memory("VmRSS")
        peaks_of_units: list[int] = []  # before gradients get their memory

        def noted(*args: Any, **kwargs: Any) -> Any:
            peaks_of_units.append(memory("VmHWM") - resident)
            return make_grads(*args, **kwargs)

        patch.setattr(build, "make_grads", noted)
        engine = hf_zero.initialize(model=model, config=change[1])[0]
        collectives = spies.collectives()
    assert engine.trains and hf_zero.engine_of(model) is engine
    after = shards_of(engine)
    for number in range(steps):
        engine.backward(engine(batch(number, engine.rank, width).to(next(engine.parameters()).dtype)))
        engine.step()
    return {
        "built": spies.built,
        "bytes": spies.shard_bytes,
        "collectives": collectives,
        "resolved": spies.resolved,
        "moved": [name for name in before if after.get(name) != before[name]],
        "units": [unit.name for unit in engine.units] == names,
        "peak": peaks_of_units[0],
        "trained": engine.full_state_dict(keep=True),
        "reported": engine.memory_report(),
    }


def memory(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found.group(1)) << 10


Found = tuple[dict[str, Any], dict[str, Any]]  # in place, and with every flat parameter built again


def both(changes: dict[str, Change]) -> dict[str, Found]:
    return {
        name: (changed(change, reuse=True, width=192, steps=3), changed(change, reuse=False, width=192, steps=3))
        for name, change in changes.items()
    }


def found_on_ranks(changes: dict[str, Change]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    found = [(name, *pair) for cases in run_ranks(both, 2, changes) for name, pair in cases.items()]
    assert len(found) == 2 * len(changes)
    for name, in_place, anew in found:
        assert in_place["reported"] == anew["reported"], name
        for param, value in anew["trained"].items():
            assert torch.equal(in_place["trained"][param], value), (name, param)
    return found


BF16 = {"bf16": {"enabled": True}}
CPU = {"offload_param": {"device": "cpu"}}
SAME = {
    "fp32": (config(), config()),
    "persistent parameters": (config(threshold=200), config(threshold=200)),
    "parameters on the host": (config(**CPU), config(**CPU)),
    "optimizer on the host": (config(), config(offload_optimizer={"device": "cpu"})),
    "16-bit parameters": (config(**BF16), config(**BF16)),
}


def test_the_same_layout_is_built_once() -> None:
    for case, in_place, anew in found_on_ranks(SAME):
        assert in_place["built"] == 0 and anew["built"] >= 4, "vacuous: nothing would have been built"
        assert in_place["units"] and not in_place["moved"] and anew["moved"], case
        assert in_place["collectives"] == {}, case  # of tensors: no weights travel
        assert in_place["resolved"] == 1
        if case == "16-bit parameters":
            assert 3 * in_place["bytes"] == 2 * anew["bytes"]  # masters alone: 4 bytes of 4 + 2
        else:  # a master on the host is made from the shard
            assert (in_place["bytes"] > 0) == (case == "optimizer on the host") and anew["bytes"] > in_place["bytes"]


OTHER = {
    "buckets": (config(), config(reduce_bucket_size=10_000, allgather_bucket_size=10_000)),
    "persistence": (config(), config(threshold=200)),
    "dtype": (config(), config(**BF16)),
    "stage": (config(), config(stage=2)),
    "medium": (config(), config(**CPU)),
}


@pytest.mark.slow
def test_another_layout_is_built_anew() -> None:
    for case, in_place, _ in found_on_ranks(OTHER):
        assert in_place["built"] > 0, case


def peaks() -> tuple[int, int]:
    # Large allocations get fresh pages: memory that was freed before does not hide them.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    change = (config(reduce_bucket_size=1 << 24, allgather_bucket_size=1 << 24),) * 2
    found = [changed(change, reuse=reuse, width=2048, steps=0)["peak"] for reuse in (True, False)]
    return found[0], found[1]


@pytest.mark.slow
def test_no_second_shard_of_a_layer_at_any_time() -> None:
    shard = 2048 * 2048 * 4 // 2
    for in_place, anew in run_ranks(peaks, 2):
        assert anew > shard / 2, "vacuous: the peak is not seen"
        assert in_place < shard / 4


def replaced() -> list[Any]:
    """An engine that trains gives way to another one of the same layout: masters go on."""
    torch.manual_seed(3)
    model = Net(6)
    first = hf_zero.initialize(model=model, config=config())[0]
    before = shards_of(first)
    with pytest.MonkeyPatch.context() as patch:
        spies = Spies(patch, first.comm)
        second = hf_zero.initialize(model=model, config=config())[0]
    assert second.trains
    return [spies.built, spies.shard_bytes, before == shards_of(second)]


def test_an_engine_that_trains_hands_its_masters_on() -> None:
    assert run_ranks(replaced, 2) == [[0, 0, True]] * 2
