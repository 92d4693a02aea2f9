"""A rank takes its device, and everything that asks for the current one gets it. Without a GPU: what torch is asked is
recorded, where a GPU would be needed to ask it.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed import processes
from hf_zero.distributed.comm import Comm
from hf_zero.extras.monitors.clocks import DeviceClock
from hf_zero.optim.offload.update_worker import UpdateWorker
from hf_zero.sharding.shard import ShardTensor
from tests.harness.ranks import RankFailure, run_ranks

Calls = list[tuple[Any, ...]]


def pretend_gpus(count: int, calls: Calls, patch: Callable[[str, Any], None]) -> None:
    patch("torch.accelerator.is_available", lambda: True)
    patch("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    patch("torch.accelerator.device_count", lambda: count)
    patch("torch.accelerator.set_device_index", lambda index: calls.append((index, threading.current_thread().name)))
    patch("torch.accelerator.current_stream", lambda device: f"stream of {device}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found: Calls = []
    pretend_gpus(4, found, monkeypatch.setattr)
    for name in ("ACCELERATE_USE_CPU", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hf_zero.distributed.processes._state_of_accelerate", dict)
    return found


@pytest.mark.parametrize(("local_rank", "seen", "index"), [("0", 4, 0), ("3", 4, 3), ("5", 4, 1), ("3", 1, 0)])
def test_the_device_of_a_rank(
    local_rank: str, seen: int, index: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local rank beyond the devices wraps: where each process sees one device, all of them are number 0."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: seen)
    assert processes.default_device() == torch.device("cuda", index)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert processes.default_device() == torch.device("cpu")


@pytest.mark.parametrize("way", ["ensure", "init", "comm"])
def test_a_rank_selects_its_device_before_it_joins(way: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    joined = "hf_zero.distributed.processes._init_process_group"
    monkeypatch.setattr(joined, lambda backend, timeout=None: calls.append(("joined", backend)))
    monkeypatch.setattr("hf_zero.distributed.processes.backend_for", lambda device: f"for {device.type}")
    if way != "comm":
        for name, value in {"WORLD_SIZE": "8", "RANK": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
    if way == "ensure":
        processes.ensure_process_group(processes.default_device())
    elif way == "init":
        processes.init_distributed()
    else:
        Comm.join()
    assert calls[0] == (2, "MainThread")
    assert calls[1:] == ([("joined", "for cuda")] if way != "comm" else [])


def test_no_device_is_selected_for_the_cpu(calls: Calls) -> None:
    for device in (torch.device("cpu"), torch.device("cpu", 0), torch.device("cuda")):
        processes.use_device(device)
    assert calls == []


def test_the_thread_that_updates_selects_its_device(calls: Calls) -> None:
    """A new thread's current device is number 0."""
    order: list[str] = []

    class Job:
        def run(self, look_ahead: Callable[[], None]) -> None:
            order.append(f"ran after {len(calls)}")

        def prefetch(self) -> None: ...

        def fail(self, error: BaseException) -> None: ...

    worker = UpdateWorker(torch.device("cuda", 3))
    worker.submit([Job()])
    worker.close()
    assert calls == [(3, "hf_zero-update")] and order == ["ran after 1"]


def test_events_are_recorded_on_a_stream_of_their_device(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.Event keeps the kind of device only; without a stream it takes the current device's."""
    recorded: list[str] = []
    event = SimpleNamespace(record=recorded.append, synchronize=lambda: None)
    monkeypatch.setattr("torch.Event", lambda *_, **__: event)
    DeviceClock(torch.device("cuda", 2)).mark()
    copied: list[torch.Tensor] = []
    place: Any = SimpleNamespace(
        device=torch.device("cuda", 3), dtype=torch.float32, copy_=lambda part, non_blocking: copied.append(part)
    )
    shard = object.__new__(ShardTensor)
    shard.parts, shard._being_written = [torch.ones(2)], None
    assert shard.copy_parts_to([place]) is event
    assert copied == shard.parts
    assert recorded == ["stream of cuda:2", "stream of cuda:3"]


# -------------------------------------------------------------------- two ranks on one device
def join_on(index: int, of_its_own: bool, uuids: list[str] | None) -> None:
    """Ask what Comm.join asks; the devices are made up, the key-value store is not."""
    properties = SimpleNamespace() if uuids is None else SimpleNamespace(uuid=uuids[dist.get_rank()])
    patch = pytest.MonkeyPatch()
    pretend_gpus(1 if of_its_own else 2, [], patch.setattr)
    patch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    if of_its_own:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["RANK"]
    processes.refuse_shared_device(torch.device("cuda", dist.get_rank() if index < 0 else index))


@pytest.mark.parametrize("uuids", [None, ["GPU-a", "GPU-a"]])
def test_two_ranks_on_one_device_are_refused(uuids: list[str] | None) -> None:
    failures = run_ranks(join_on, 2, 0, False, uuids, expect_error=True, timeout=30)
    for failure in failures:
        assert isinstance(failure, RankFailure) and failure.kind == "ConfigError", failure
        assert f"rank {failure.rank}: ranks [0, 1]" in failure.message
        assert "of 2 that it sees" in failure.message and "ACCELERATE_USE_CPU" in failure.message


@pytest.mark.parametrize(
    ("index", "of_its_own", "uuids"), [(-1, False, None), (0, True, None), (0, False, ["GPU-a", "GPU-b"])]
)
def test_ranks_with_a_device_each_pass(index: int, of_its_own: bool, uuids: list[str] | None) -> None:
    """The devices differ by place, by what each process sees (as SLURM sets it), or by their own ids."""
    assert run_ranks(join_on, 2, index, of_its_own, uuids, timeout=30) == [None, None]


def test_the_mask_of_an_accelerator_tells_its_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """XPUs are chosen by a variable of another name than CUDA's, and their properties may have no id."""
    monkeypatch.setattr("torch.xpu.get_device_properties", lambda device: SimpleNamespace())
    names = []
    for mask in ("0", "1"):
        monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
        names.append(processes._identity(torch.device("xpu", 0)))
    assert names[0] != names[1]


def join_unless_third() -> None:
    dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=2))
    if dist.get_rank() == 2:
        raise ValueError("a mistake of this rank's")
    join_on(-1, True, None)


def test_a_rank_that_never_comes_is_named() -> None:
    *others, third = run_ranks(join_unless_third, 3, expect_error=True, timeout=30)
    assert third.kind == "ValueError"
    for failure in others:
        assert failure.kind == "DivergenceError", failure
        assert f"rank {failure.rank}: devices: rank(s) [2] did not come within 2 s" in failure.message


# -------------------------------------------------------------------- what accelerate has chosen
def chosen(way: str, folder: str) -> tuple[str, str]:
    """Return, on a machine that seems to have two GPUs: the device that hf_zero takes before and after accelerate
    chose.
    """
    pretend_gpus(2, [], pytest.MonkeyPatch().setattr)
    before = str(processes.default_device())
    if way == "arguments":
        from hf_zero import TrainingArguments

        TrainingArguments(folder, use_cpu=True, report_to="none", zero={"zero_optimization": {"stage": 3}})
    else:
        from accelerate import Accelerator

        Accelerator(cpu=True)
    dist.barrier()  # none leaves while another one is connecting
    return before, str(processes.default_device())


@pytest.mark.parametrize("way", ["arguments", "accelerator"])
def test_use_cpu_on_a_machine_with_gpus(way: str, tmp_path: Any) -> None:
    """use_cpu=True sets no variable of the environment, and from_pretrained comes before the Trainer."""
    got = run_ranks(chosen, 2, way, str(tmp_path), init_group=False, timeout=60)
    assert got == [("cuda:0", "cpu"), ("cuda:1", "cpu")]
