"""Host memory that the device copies from and to: how much of it is pinned, in how many pieces, and until when.

The lag device pins by torch's allocator, as accelerators of most makers do. Where it is to stand for CUDA, which pins
pages in place, `_register_pages` says so to hf_zero: then nothing but hf_zero unpins them.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.engine.initialize import new_engine
from hf_zero.native import pinning
from hf_zero.storage import HostStore
from tests.harness.ranks import run_ranks
from tests.lag import device, group
from tests.lag.test_training import HIDDEN, LAYERS, VOCABULARY, Layers

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

_NATIVE = {"zero_force_ds_cpu_optimizer": True}
_TORCH = {"zero_force_ds_cpu_optimizer": False}
_HOST = {"device": "cpu", "pin_memory": True}
_TILE = 16  # elements; a layer has 88
_ALL_ON_HOST = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "sub_group_size": _TILE,
    "offload_optimizer": _HOST,
    "offload_param": _HOST,
}
_FLATS = LAYERS + 1  # flat parameters: the layers', and that of the rest


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


class _LagPages:
    """CUDA's registration of pages, on the lag device."""

    def register(self, block: torch.Tensor) -> str | None:
        try:
            device.library().register_pinned(block.data_ptr(), block.numel())
        except RuntimeError as error:
            return str(error)
        return None

    def unregister(self, block: torch.Tensor) -> None:
        device.library().unregister_pinned(block.data_ptr())


def _enable(*, registers: bool) -> None:
    device.enable()
    group.register()
    if registers:
        pinning.registrar_of = lambda device: _LagPages()  # type: ignore[assignment]


def config_of(zero: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    block = {"type": "AdamW", "params": {"lr": 0.05}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": block, "zero_optimization": zero, **more}


def trained(config: dict[str, Any], model: torch.nn.Module | None = None, *, steps: int = 2) -> Any:
    """An engine after some steps."""
    torch.manual_seed(0)
    engine, *_ = hf_zero.initialize(model=Layers().to("lag") if model is None else model, config=config)
    ids = torch.arange(10, device=engine.device).view(2, 5) % VOCABULARY
    for _ in range(steps):
        engine.backward(engine(ids, ids.roll(1)))
        engine.step()
    return engine


def travelling(placements: Any) -> list[str]:
    """Return what the device copies from and to."""
    return [*placements.host.usage(), *placements.host_params.usage()]


def _end_by_teardown(engine: Any, config: dict[str, Any]) -> None:
    engine.teardown()


def _end_by_destroy(engine: Any, config: dict[str, Any]) -> None:
    engine.destroy()


def _end_by_forgetting(engine: Any, config: dict[str, Any]) -> None:
    """The caller has the last reference."""


def _end_in_flight(engine: Any, config: dict[str, Any]) -> None:
    """Forgotten with a gradient on its way to the host."""
    ids = torch.arange(10, device=engine.device).view(2, 5) % VOCABULARY
    engine.backward(engine(ids, ids))


def _end_by_a_second_engine(engine: Any, config: dict[str, Any]) -> None:
    """One after the other on one model; the averages of the first one are closed last."""
    average = hf_zero.ShardedEMA(engine.module)
    model = engine.module
    engine.teardown()
    trained(config, model).teardown()
    average.close()


def _end_by_replacement(engine: Any, config: dict[str, Any]) -> None:
    """An engine that takes over the parameters where they are, and nothing else."""
    replacement = new_engine(engine.module, engine.config, replace=True)
    assert travelling(engine.placements) == []
    replacement.teardown()


_ENDS = [
    _end_by_teardown,
    _end_by_destroy,
    _end_by_forgetting,
    _end_in_flight,
    _end_by_a_second_engine,
    _end_by_replacement,
]


def _pinned_at_the_end(
    end: Callable[[Any, dict[str, Any]], None], registers: bool, zero: dict[str, Any], more: dict[str, Any]
) -> tuple[int, int, list[str]]:
    """Return (bytes pinned in training, bytes pinned after it, mistakes)."""
    _enable(registers=registers)
    config = config_of(zero, more)
    engine = trained(config)
    gone = weakref.ref(engine)
    most = device.pinned_bytes()
    end(engine, config)
    if registers and end not in (_end_by_forgetting, _end_in_flight):
        assert device.pinned_bytes() == 0, "it waits for nobody to let go of the engine"
    del engine
    deadline = time.monotonic() + 10
    while (gone() is not None or device.pinned_bytes()) and time.monotonic() < deadline:
        gc.collect()  # again: threads of autograd and of the update let go when they have ended
        torch.accelerator.synchronize()  # copies that were under way are over, and keep nothing
    assert gone() is None, "vacuous: somebody keeps the engine"
    return most, device.pinned_bytes(), device.take_reports()


@pytest.mark.parametrize("registers", [False, True], ids=["allocated", "registered"])
@pytest.mark.parametrize("end", _ENDS)
def test_nothing_stays_pinned(end: Callable[[Any, dict[str, Any]], None], registers: bool) -> None:
    for most, left, reports in run_ranks(_pinned_at_the_end, 2, end, registers, _ALL_ON_HOST, _NATIVE):
        assert most > 0, "vacuous"
        assert (left, reports) == (0, [])


def _all_on_disk(folder: Path) -> dict[str, Any]:
    disk = {"device": "nvme", "nvme_path": str(folder), "pin_memory": True}
    return {**_ALL_ON_HOST, "offload_param": {**disk, "max_in_cpu": 0}, "offload_optimizer": disk}


def test_nothing_stays_pinned_of_memory_between_disk_and_device(tmp_path: Path) -> None:
    zero = _all_on_disk(tmp_path)
    for end in (_end_by_destroy, _end_by_forgetting):
        for most, left, reports in run_ranks(_pinned_at_the_end, 2, end, True, zero, {}):
            assert most > 0, "vacuous"
            assert (left, reports) == (0, [])


def _pieces(zero: dict[str, Any], more: dict[str, Any]) -> tuple[int, Counter[str]]:
    """Return (pieces that are pinned, tensors in the host's memory by kind)."""
    _enable(registers=True)
    engine = trained(config_of(zero, more))
    kinds = Counter(key.removesuffix("/1").rpartition("/")[2] for key in travelling(engine.placements))
    return device.pinned_ranges(), kinds


def test_a_piece_for_every_shard_that_travels_and_none_for_the_others() -> None:
    ((pieces, kinds),) = run_ranks(_pieces, 1, _ALL_ON_HOST, _NATIVE)
    assert kinds == {"param": _FLATS, "grad": _FLATS}
    assert pieces == 2 * _FLATS, "masters and moments, in tiles, are not among them"
    # Parameters that stay on the device are written by the host into memory of their own, and copied.
    zero = {**_ALL_ON_HOST, "stage": 2}
    del zero["offload_param"]
    ((pieces, kinds),) = run_ranks(_pieces, 1, zero, _NATIVE)
    assert pieces == kinds["staged"] + kinds["grad"] and kinds["staged"] > 0


def test_each_block_pins_its_own_memory(tmp_path: Path) -> None:
    """Parameter shards by offload_param.pin_memory, gradients by offload_optimizer.pin_memory."""
    pageable = {**_HOST, "pin_memory": False}
    for block, pinned in (("offload_param", _FLATS), ("offload_optimizer", _FLATS)):
        ((pieces, kinds),) = run_ranks(_pieces, 1, {**_ALL_ON_HOST, block: pageable}, _NATIVE)
        assert kinds == {"param": _FLATS, "grad": _FLATS} and pieces == pinned, block
    both = {**_ALL_ON_HOST, "offload_param": pageable, "offload_optimizer": pageable}
    assert run_ranks(_pieces, 1, both, _NATIVE)[0][0] == 0
    disk = _all_on_disk(tmp_path)
    disk["offload_param"] = {**disk["offload_param"], "pin_memory": False}
    assert run_ranks(_pieces, 1, disk, {})[0][0] == _FLATS, "the gradients; parameters' pool is pageable"


def test_memory_between_disk_and_device_is_one_piece_and_the_optimizers_is_none(tmp_path: Path) -> None:
    ((pieces, kinds),) = run_ranks(_pieces, 1, _all_on_disk(tmp_path), {})
    assert kinds == {"grad": _FLATS}
    assert pieces == _FLATS + 1


def test_masters_that_torch_updates_are_pinned_where_parameters_are_copied_from_them() -> None:
    zero = {**_ALL_ON_HOST, "stage": 2}
    del zero["offload_param"]
    ((pieces, kinds),) = run_ranks(_pieces, 1, zero, _TORCH)
    assert kinds["master"] == kinds["grad"] > 0
    assert pieces == kinds["master"] + kinds["grad"]
    # On the host a parameter in another type is copied from its master by the host.
    bf16 = {**_TORCH, "bf16": {"enabled": True}}
    ((pieces, kinds),) = run_ranks(_pieces, 1, _ALL_ON_HOST, bf16)
    assert pieces == kinds["param"] + kinds["grad"] and "master" not in kinds


def _train_with_limit(limit: int, registers: bool) -> tuple[list[float], list[str], int]:
    """Return (weights, warnings, bytes pinned)."""
    _enable(registers=registers)
    device.set_pinned_limit(limit)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero.native.pinning").addHandler(handler)
    engine = trained(config_of(_ALL_ON_HOST, _NATIVE))
    pinned = device.pinned_bytes()
    engine.teardown()
    assert device.take_reports() == []
    return [value for param in engine.module.parameters() for value in param.flatten().tolist()], warnings, pinned


@pytest.mark.parametrize("registers", [False, True], ids=["allocated", "registered"])
def test_pinned_memory_refused_by_a_limit_is_pageable_and_said_once(registers: bool) -> None:
    ((expected, silence, most),) = run_ranks(_train_with_limit, 1, 0, registers)
    assert silence == []
    limit = most // 2
    ((values, warnings, pinned),) = run_ranks(_train_with_limit, 1, limit, registers)
    assert values == expected
    assert len(warnings) == 1 and "could not be pinned" in warnings[0]
    assert 0 < pinned <= limit


def _unpin_under_copies() -> tuple[list[float], list[float], list[str]]:
    """Return (what arrived on the device, what arrived on the host, mistakes)."""
    _enable(registers=True)
    store = HostStore(torch.device("lag", 0), pin=True)
    for key in ("from", "to"):
        store.create(key, HIDDEN, torch.float32)
    to_host = store.tensor("to")
    store.tensor("from").fill_(1.0)
    on_device = torch.zeros(HIDDEN, device="lag")
    on_device.copy_(store.tensor("from"), non_blocking=True)
    store.drop("from")
    to_host.copy_(on_device + 1.0, non_blocking=True)
    store.close()
    assert device.pinned_bytes() == 0
    return on_device.tolist(), to_host.tolist(), device.take_reports()


def test_memory_is_unpinned_after_the_copies_that_use_it() -> None:
    ((on_device, on_host, reports),) = run_ranks(_unpin_under_copies, 1)
    assert (on_device, on_host, reports) == ([1.0] * HIDDEN, [2.0] * HIDDEN, [])
