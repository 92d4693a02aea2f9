"""Offloaded gradients on the lag device: their norms, sums and copies give the numbers of the CPU, whatever the
schedule and whatever is done to gradients by hand; and the host waits for the device once in a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from hf_zero.layout import UnitLayout
from hf_zero.native import machine
from hf_zero.optim.offload import host_state
from hf_zero.runtime.unit_specs import BucketSizes
from hf_zero.sharding.shard import ShardTensor
from tests.harness.ranks import run_ranks
from tests.lag import device, group
from tests.lag.test_training import HIDDEN, VOCABULARY, Layers

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

SCHEDULES = ["late", "early", "random:1"]
STEPS = 3
EDITED = "embed.weight"  # reduced last: its copy is under way when a script comes to it
OPTIONS = {"OneBitAdam": {"freeze_step": 1}}
BUCKET = 48  # elements: a layer's gradient is several parts
BALLOT = "step_ballot.py _on_host"
FROM_DISK = "flat_param.py end_gather"  # what a disk's store has lent goes back when the device has read it
BESIDE = ("host_state.py:", "param_writer.py:")  # of the thread that updates, beside the one that trains


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


@dataclass(frozen=True)
class Run:
    stage: int
    states: str = "cpu"  # offload_optimizer, "delayed", or "by_torch": torch's optimizer updates on the host
    params: str = "none"  # offload_param
    accumulation: int = 1
    clip: float = 0.0
    precision: str = "fp32"
    by_hand: str = ""  # a key of CHANGES
    optimizer: str = "AdamW"
    one_unit: bool = False  # the next reduce of a unit follows at once


class OneUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


def config_of(run: Run, folder: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": run.stage, "stage3_param_persistence_threshold": 0}
    if run.states != "none":
        zero["offload_optimizer"] = {
            "device": "nvme" if run.states == "nvme" else "cpu",
            "nvme_path": folder,
            "pin_memory": True,
            "delayed_update": run.states == "delayed",
        }
    if run.params != "none":
        zero["offload_param"] = {"device": run.params, "nvme_path": folder, "pin_memory": True, "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": run.clip,
        "optimizer": {"type": run.optimizer, "params": {"lr": 0.05, **OPTIONS.get(run.optimizer, {})}},
        "zero_force_ds_cpu_optimizer": run.states != "by_torch",
        "zero_optimization": zero,
    }
    if run.precision == "fp16":
        return {**config, "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    return {**config, "bf16": {"enabled": run.precision == "bf16"}}


# -------------------------------------------------------------------- what scripts do to gradients
Numbers = list[Any]


def _value(engine: ZeroEngine) -> torch.Tensor:
    shape = dict(engine.module.named_parameters())[EDITED].shape
    return torch.full(shape, 0.25, device=engine.device)


def nothing(engine: ZeroEngine, numbers: Numbers) -> None: ...


def drop_one(engine: ZeroEngine, numbers: Numbers) -> None:
    dict(engine.module.named_parameters())[EDITED].grad = None


def drop_all(engine: ZeroEngine, numbers: Numbers) -> None:
    engine.module.zero_grad()


def put(engine: ZeroEngine, numbers: Numbers) -> None:
    hf_zero.set_full_grad(engine.module, _value(engine), EDITED)


def clip(engine: ZeroEngine, max_norm: float) -> float:
    """The norm before; devices give it in fp32."""
    return engine.clip_grad_norm_(max_norm).float().item()


def put_after_clipping(engine: ZeroEngine, numbers: Numbers) -> None:
    numbers.append(clip(engine, 0.3))
    put(engine, numbers)


def clip_twice(engine: ZeroEngine, numbers: Numbers) -> None:
    numbers.append(clip(engine, 0.3))
    numbers.append(clip(engine, 0.1))


def drop_after_clipping(engine: ZeroEngine, numbers: Numbers) -> None:
    numbers.append(clip(engine, 0.3))
    drop_one(engine, numbers)


def update(engine: ZeroEngine, numbers: Numbers) -> None:
    hf_zero.update_full_grads([dict(engine.module.named_parameters())[EDITED]], lambda grad, param: grad * 3)


def read(engine: ZeroEngine, numbers: Numbers) -> None:
    grad = hf_zero.full_grad(engine.module, EDITED)
    numbers.append(None if grad is None else grad.tolist())


def another_backward(engine: ZeroEngine, numbers: Numbers) -> None:
    ids = torch.arange(10, device=engine.device).view(2, 5)
    read(engine, numbers)
    engine.backward(engine(ids, ids.roll(1)))


def overflow(engine: ZeroEngine, numbers: Numbers) -> None:
    ids = torch.arange(10, device=engine.device).view(2, 5)
    if engine.global_steps == 1:
        engine.backward(engine(ids, ids.roll(1)) * float("inf"))


CHANGES: dict[str, Callable[[ZeroEngine, Numbers], None]] = {
    "": nothing,
    **{
        change.__name__: change
        for change in (
            drop_one,
            drop_all,
            put,
            put_after_clipping,
            clip_twice,
            drop_after_clipping,
            update,
            read,
            another_backward,
            overflow,
        )
    },
}


# -------------------------------------------------------------------- training
_alive: list[ZeroEngine] = []  # their pinned memory goes with the process


def _waits() -> list[str]:
    """ "hooks.py hook": the innermost file and function of each wait of the thread that trains."""
    places = [where for _, where in device.take_syncs() if not any(file in where for file in BESIDE)]
    firsts = [where.split(" < ")[0] for where in places]
    return [f"{first.partition(':')[0]} {first.rpartition(' ')[2]}" for first in firsts]


def train(place: str, run: Run, folder: str) -> tuple[Numbers, list[str]]:
    """Return what a script could see of some steps, and the host's waits for the device in the last one."""
    torch.manual_seed(0)
    model = (OneUnit() if run.one_unit else Layers()).to(place)
    # No size of the configuration cuts these units on devices.
    with mock.patch.object(BucketSizes, "limit", lambda *sizes: BUCKET):
        engine, *_ = hf_zero.initialize(model=model, config=config_of(run, folder))
    assert any(flat.layout.num_buckets > 1 for unit in engine.units for flat in unit.flats)
    numbers: Numbers = []
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        batches = torch.randint(VOCABULARY, (run.accumulation, 2, 5), generator=generator).to(engine.device)
        losses = []
        if place != "cpu":
            device.take_syncs()
        for micro, ids in enumerate(batches):
            loss = engine(ids, ids.roll(1))
            engine.backward(loss)
            if micro + 1 == run.accumulation:
                CHANGES[run.by_hand](engine, numbers)
            engine.step()
            losses.append(loss.detach())
        waits = [] if place == "cpu" else _waits()
        numbers += [loss.item() for loss in losses]
        numbers.append(engine.get_global_grad_norm())
    engine.finish_updates()
    numbers += [hf_zero.full_param(model, name).tolist() for name, _ in model.named_parameters()]
    numbers.append(engine.skipped_steps)
    assert engine.global_steps == STEPS
    _alive.append(engine)
    return numbers, waits


def on_cpu(runs: list[Run], folder: str) -> list[Numbers]:
    return [train("cpu", run, f"{folder}/{number}")[0] for number, run in enumerate(runs)]


def on_lag(runs: list[Run], schedules: list[str], folder: str) -> list[tuple[str, Numbers, list[str]]]:
    found = []
    device.enable()
    group.register()
    for schedule in schedules:
        for number, run in enumerate(runs):
            device.set_schedule(schedule)
            numbers, waits = train("lag", run, f"{folder}/{schedule}-{number}")
            torch.accelerator.synchronize()
            assert device.take_reports() == []
            found.append((f"{run} {schedule}", numbers, waits))
    return found


def check(runs: list[Run], world_size: int, folder: Path, schedules: list[str], *, waits_once: bool) -> None:
    if world_size > 1:
        # Updates that begin in backward wait for collectives on a thread of their own, which on the lag device keeps
        # the thread that trains from answering the other rank. Where something clips, none begins there.
        runs = [replace(run, clip=run.clip or 0.5) if run.states == "nvme" else run for run in runs]
    expected = run_ranks(on_cpu, world_size, runs, str(folder / "cpu"), timeout=150)
    for rank, found in enumerate(run_ranks(on_lag, world_size, runs, schedules, str(folder / "lag"), timeout=240)):
        wrong = [
            name
            for (name, numbers, _), want in zip(found, expected[rank] * len(schedules), strict=True)
            if repr(numbers) != repr(want)
        ]
        assert not wrong, f"rank {rank}: {len(wrong)} of {len(found)} differ: {wrong}"
        for name, _, waits in found if waits_once else ():
            assert [wait for wait in waits if wait != FROM_DISK] == [BALLOT], name


WORLDS = [1, 2]
MEDIA = [Run(2), Run(2, "nvme"), Run(2, "delayed"), Run(2, "by_torch"), Run(1)]
MEDIA += [Run(3, states, params) for states, params in (("cpu", "cpu"), ("nvme", "nvme"), ("delayed", "cpu"))]
MEDIA += [
    Run(3, "by_torch"),
    Run(3, "by_torch", "cpu"),
    Run(3, "none", "cpu"),
    Run(3, "none", "cpu", precision="bf16"),
]
MEDIA += [Run(2, "by_torch", precision="bf16"), Run(3, "by_torch", "cpu", precision="bf16")]


@pytest.mark.parametrize("world_size", WORLDS)
def test_sums_and_norms(world_size: int, tmp_path: Path) -> None:
    runs = [replace(run, accumulation=count, clip=clip) for run in MEDIA for count, clip in ((1, 0), (2, 0.5), (3, 0))]
    runs += [Run(stage, accumulation=3, one_unit=True) for stage in (1, 2)]
    check(runs, world_size, tmp_path, SCHEDULES, waits_once=True)


@pytest.mark.parametrize("world_size", WORLDS)
def test_changes_by_hand(world_size: int, tmp_path: Path) -> None:
    media = [Run(2), Run(2, "by_torch"), Run(3, "cpu", "cpu"), Run(3, "nvme"), Run(1, accumulation=2)]
    runs = [replace(run, by_hand=change) for run in media for change in CHANGES if change not in ("", "overflow")]
    runs += [Run(stage, precision="fp16", by_hand="overflow", accumulation=2) for stage in (1, 2)]
    check(runs, world_size, tmp_path, ["late", "random:2"], waits_once=False)


@pytest.mark.parametrize("world_size", WORLDS)
def test_optimizers_with_numbers_of_whole_parameters(world_size: int) -> None:
    runs = [Run(stage, "none", optimizer="Lamb") for stage in (0, 2, 3)] + [Run(0, "none", optimizer="OneBitAdam")]
    expected = run_ranks(on_cpu, world_size, runs, "")
    for rank, found in enumerate(run_ranks(on_lag, world_size, runs, ["late"], "", timeout=150)):
        for (name, numbers, waits), want in zip(found, expected[rank], strict=True):
            # The device sums squares in fp32, the host in fp64.
            torch.testing.assert_close(numbers, want, rtol=2e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")
            # repeat_interleave waits on this device, and not on others where it is told the size.
            assert {wait for wait in waits if "_unpack" not in wait} == {BALLOT}, name


def _shards_meet() -> None:
    device.enable()
    layout = UnitLayout.build(
        "unit", {"weight": (64,)}, dtype="float32", trainable=True, world_size=1, max_bucket_numel=24
    )

    def shard(value: float, place: str, dtype: torch.dtype = torch.float32) -> ShardTensor:
        memory = torch.full((layout.shard_numel,), value, dtype=dtype, device=place)
        return ShardTensor(layout, 0, memory.pin_memory() if place == "cpu" else memory, in_full=False)

    def seen(one: ShardTensor) -> list[float]:
        return one.read_slice(layout.slices(0)[0]).unique().tolist()

    # The first copy is from the device; then one goes to it on another stream, and one from it over what it reads.
    on_host, there, other = shard(0.0, "cpu"), shard(2.0, "lag"), torch.Stream("lag")
    ones, threes = shard(1.0, "lag"), shard(3.0, "lag")
    other.wait_stream(torch.accelerator.current_stream())  # for what is filled
    on_host.copy_from(ones)
    with other:
        there.copy_from(on_host)
        assert seen(there) == [1.0], "the device copies what has not come"
        there.copy_from(on_host)
    on_host.copy_from(threes)
    assert seen(on_host) == [3.0], "the host reads what has not come"
    torch.accelerator.current_stream().wait_stream(other)
    assert seen(there) == [1.0], "the device copies what comes later"
    # Types are changed on the device.
    on_host = shard(0.0, "cpu", torch.bfloat16)
    on_host.copy_from(shard(4.0, "lag"))
    assert [chunk.unique().tolist() for chunk in on_host.chunks(0, 64)] == [[4.0]] * 3
    on_host.copy_from(shard(5.0, "lag"))
    on_host.scale(2.0)
    assert seen(on_host) == [10.0], "the host writes, and then the copy comes"
    there.copy_from(on_host)
    assert seen(there) == [10.0]
    torch.accelerator.synchronize()
    assert device.take_reports() == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shards_of_host_and_device_take_values_from_each_other(schedule: str) -> None:
    run_ranks(_shards_meet, 1, env={"LAG_SCHEDULE": schedule})


def _threads_of_updates(place: str) -> set[int]:
    found = set()
    plain = host_state.adam_step

    def adam_step(*arguments: Any, threads: int, **options: Any) -> None:
        found.add(threads)
        plain(*arguments, threads=threads, **options)

    host_state.adam_step = adam_step
    machine.usable_cores = lambda: 5
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if place == "lag":
        device.enable()
        group.register()
    train(place, Run(2), "")
    return found


def test_an_update_leaves_a_core_to_the_thread_that_launches() -> None:
    assert run_ranks(_threads_of_updates, 1, "lag") == [{4}]
    assert run_ranks(_threads_of_updates, 1, "cpu") == [{5}]
