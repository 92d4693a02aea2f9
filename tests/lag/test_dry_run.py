"""A step on a GPU makes the host wait for the device at places that a table lists; and that no operation mixes the
two. Without a GPU: see dry_device.py.

Each wait drains the device's queue: it computes nothing until the host has built the next kernels. A wait that is new,
or gone, fails here; the table and its reasons are then to be brought up to date.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.config.zero_config import ZeroConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from hf_zero.optim import Lamb, OneBitAdam
from hf_zero.runtime.build import build_units
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.unit_specs import BuildSettings
from hf_zero.sharding.unit import ShardUnit
from tests.harness.dry_device import NAME, DryComm, DryDevice, MixedDevicesError
from tests.harness.ranks import run_ranks
from tests.harness.traps import WIDTH, Block, Net

Waits = dict[tuple[str, str], int]


@dataclass(frozen=True)
class Run:
    """One training, of which the last step counts: the orders of units are known by then."""

    stage: int
    medium: str = "none"
    accumulation: int = 1
    clip: float = 0.0
    optimizer: str = "fused"  # AdamW's way, "lamb" or "onebit"
    world_size: int = 2
    steps: int = 2
    precision: str = "bf16"
    clips_by_call: bool = False
    resumes: bool = False  # from a checkpoint, before the last step
    by_default: bool = False  # the device is torch's default one
    logs: bool = False  # rank 0 does, of every step

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


def offload(medium: str, folder: str) -> dict[str, Any]:
    """Return keys of zero_optimization. "A+B": optimizer states on A, parameters on B."""
    states, _, params = medium.partition("+")
    keys: dict[str, Any] = {}
    if states in ("cpu", "nvme", "delayed", "by_torch"):
        device = "nvme" if states == "nvme" else "cpu"
        keys["offload_optimizer"] = {"device": device, "nvme_path": folder, "delayed_update": states == "delayed"}
    if params:
        keys["offload_param"] = {"device": params, "nvme_path": folder, "max_in_cpu": 0}
    return keys


def start(run: Run, folder: str) -> ZeroEngine:
    with torch.device(NAME):
        model = Net([Block(), Block()])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": run.clip,
        "zero_force_ds_cpu_optimizer": not run.medium.startswith("by_torch"),
        **({"steps_per_print": 1, "wall_clock_breakdown": True, "memory_breakdown": True} if run.logs else {}),
        **({} if run.precision == "fp32" else {run.precision: {"enabled": True}}),
        "zero_optimization": {
            "stage": run.stage,
            "stage3_param_persistence_threshold": 0,
            **offload(run.medium, folder),
        },
    }
    resolved = ZeroConfig.load(config).resolve(
        model=model, world_size=run.world_size, client_optimizer=True, client_scheduler=True
    )
    comm = DryComm(0 if run.logs else 1, run.world_size) if run.world_size > 1 else Comm(torch.device(NAME, 0))
    built = build_units(model, BuildSettings.of(resolved), comm)
    engine = ZeroEngine(model, resolved, built=built)
    engine.attach_optimizer(make_optimizer(run.optimizer, model))
    return engine


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "lamb":
        return Lamb(model.parameters(), lr=1e-3)
    if kind == "onebit":
        return OneBitAdam(model.parameters(), lr=1e-3, freeze_step=1)
    ways = {} if kind == "loop" else {kind: True}
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, **ways)


def train(run: Run, folder: str, device: DryDevice) -> Waits:
    engine = start(run, folder)
    for step in range(run.steps):
        if run.resumes and step + 1 == run.steps:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
        device.waits.clear()
        for micro in range(run.accumulation):
            x = torch.zeros(2, WIDTH, device=NAME)
            engine.backward(engine(x).square().mean())
            if run.clips_by_call and micro + 1 == run.accumulation:
                engine.clip_grad_norm_(1.0)
            engine.step()
    assert engine.global_steps == run.steps and engine.skipped_steps == 0
    waits = dict(device.waits)
    engine.finish_updates()
    engine.placements.close()
    return waits


def waits_of(runs: list[Run], folder: str, mutate: Callable[[], None] = lambda: None) -> list[Waits]:
    mutate()
    found = []
    with DryDevice(lacks=[torch.float64]) as device:
        for number, run in enumerate(runs):
            with torch.device(NAME) if run.by_default else contextlib.nullcontext():
                found.append(train(run, f"{folder}/{number}", device))
    return found


# -------------------------------------------------------------------- the table
FLATS = 3  # two layers and the root, one type each
GATHERS = 5  # of a micro-batch: the layers in forward and backward, the root once


def expected(run: Run) -> Waits:
    """Host waits of a step: all that are allowed, how often, and why."""
    waits = collections.Counter[tuple[str, str]]()
    states, _, params = run.medium.partition("+")
    offloaded = states != "none"
    # The ballot: the norm must be known before clipping, and whether a sharded parameter was written to.
    waits["optim/step_ballot.py:_on_host", "to host"] += 1
    if params == "nvme" and not offloaded:
        # A shard that is written to a disk is in memory first.
        waits["sharding/shard.py:copy_from", "to host"] += FLATS
    if params == "nvme":
        # A tensor that a disk's store has lent goes back when the device has read it.
        waits["sharding/flat_param.py:end_gather", "event"] += GATHERS * run.accumulation
    if run.logs:
        # A time is read once its end is over.
        waits["extras/monitors/clocks.py:ms", "event"] += 6
    return dict(+waits)


STATES = ("none", "cpu", "nvme", "delayed", "by_torch")
MEDIA = {
    0: STATES[:1],
    1: STATES,
    2: STATES,
    3: (*STATES, "none+cpu", "none+nvme", "cpu+cpu", "nvme+nvme", "by_torch+cpu"),
}
WINDOWS = ((1, 0.0), (2, 1.0))  # accumulation, clip


def compare(runs: list[Run], found: list[Waits]) -> None:
    wrong = {str(run): waits for run, waits in zip(runs, found, strict=True) if waits != expected(run)}
    assert not wrong, f"{wrong}\nexpected: { {str(run): expected(run) for run in runs if str(run) in wrong} }"


@pytest.mark.parametrize("stage", list(MEDIA))
def test_host_waits_of_a_step(stage: int, tmp_path: Path) -> None:
    runs = [Run(stage, medium, *window) for medium in MEDIA[stage] for window in WINDOWS]
    compare(runs, run_ranks(waits_of, 1, runs, str(tmp_path), init_group=False, timeout=240)[0])


def test_other_ways_of_training(tmp_path: Path) -> None:
    runs = [
        *(Run(stage, optimizer=way) for stage in (0, 3) for way in ("foreach", "loop", "lamb")),
        *(Run(stage, "by_torch", optimizer="lamb") for stage in (1, 3)),
        Run(0, optimizer="onebit", steps=3),
        *(Run(stage, logs=True, steps=4) for stage in (0, 3)),
        *(Run(stage, precision=precision) for stage in (0, 3) for precision in ("fp32", "fp16")),
        *(Run(stage, clips_by_call=True) for stage in (0, 3)),
        # Numbers of the host stay there.
        *(Run(stage, medium, by_default=True) for stage, medium in ((0, "none"), (2, "cpu"), (3, "nvme+nvme"))),
        # A fused update wants its counts of steps on the device, wherever a checkpoint is read.
        *(Run(0, optimizer=way, world_size=1, resumes=True) for way in ("fused", "foreach")),
        *(Run(stage, medium, world_size=1) for stage, medium in ((2, "cpu"), (3, "none"), (3, "cpu+cpu"))),
        Run(2, "by_torch", world_size=1, resumes=True),
    ]
    compare(runs, run_ranks(waits_of, 1, runs, str(tmp_path), init_group=False, timeout=240)[0])


# -------------------------------------------------------------------- types that the device lacks
def build_of(dtype: str, lacks: torch.dtype) -> None:
    model = Net([Block(), Block()])  # of the host: the device could not hold it
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    else:
        model.double()
    with DryDevice([lacks]):
        resolved = ZeroConfig.load(config).resolve(
            model=model, world_size=2, client_optimizer=True, client_scheduler=True
        )
        build_units(model, BuildSettings.of(resolved), DryComm(0, 2))


@pytest.mark.parametrize(
    ("dtype", "lacks", "named"), [("float64", torch.float64, "float64"), ("bf16", torch.bfloat16, "bfloat16")]
)
def test_a_type_that_the_device_lacks_is_refused(dtype: str, lacks: torch.dtype, named: str) -> None:
    failure = run_ranks(build_of, 1, dtype, lacks, init_group=False, expect_error=True)[0]
    assert failure.kind == "ConfigError", failure.traceback
    assert (
        f"dry:0 cannot compute in torch.{named} (the type of " in failure.message
        and "cast the model" in failure.message
    )
    failure = run_ranks(build_of, 1, dtype, torch.complex32, init_group=False, expect_error=True)[0]
    assert "cannot move from cpu to dry" in failure.message, "it goes on to put parameters of the CPU on the device"


# -------------------------------------------------------------------- what would be found
def read_in_forward() -> None:
    plain = ShardUnit.wait_for_unshard

    def wait_for_unshard(unit: ShardUnit) -> None:
        plain(unit)
        unit.flats[0].full.sum().item()

    ShardUnit.wait_for_unshard = wait_for_unshard  # type: ignore[method-assign]


def copy_in_backward() -> None:
    """A gradient on another device than it should be on is copied."""
    plain = GradAccumulator.take

    def take(acc: GradAccumulator, grads: Mapping[int, torch.Tensor]) -> None:
        plain(acc, {index: torch.full(grad.shape, 1.0).to(grad.device) for index, grad in grads.items()})

    GradAccumulator.take = take  # type: ignore[method-assign]


def add_host_memory() -> None:
    plain = ShardUnit.wait_for_unshard

    def wait_for_unshard(unit: ShardUnit) -> None:
        plain(unit)
        unit.flats[0].full.add_(torch.zeros(unit.flats[0].full.shape, dtype=unit.flats[0].dtype))

    ShardUnit.wait_for_unshard = wait_for_unshard  # type: ignore[method-assign]


def gather_host_memory() -> None:
    plain = Comm.all_gather

    def all_gather(comm: Comm, full: torch.Tensor, part: torch.Tensor, what: str, **options: bool) -> Any:
        return plain(comm, full, torch.zeros(part.shape, dtype=part.dtype), what, **options)

    Comm.all_gather = all_gather  # type: ignore[method-assign]


def count_steps_on_the_host() -> None:
    """Put the counts of steps on the host, as a checkpoint would bring them: a fused update takes them on the device
    only.
    """
    plain = torch.optim.AdamW.step

    def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        for state in optimizer.state.values():
            state["step"] = torch.tensor(1.0)
        return plain(optimizer, closure)

    torch.optim.AdamW.step = step  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    ("mutate", "place"),
    [
        (read_in_forward, ("runtime/unshard.py:unshard", "value")),
        (copy_in_backward, ("runtime/arriving_grads.py:take_waiting", "to device")),
    ],
)
def test_a_wait_more_is_found(mutate: Callable[[], None], place: tuple[str, str], tmp_path: Path) -> None:
    run = Run(3)
    found = run_ranks(waits_of, 1, [run], str(tmp_path), mutate, init_group=False)[0][0]
    assert found.pop(place) > 0 and found == expected(run)


@pytest.mark.parametrize("mutate", [add_host_memory, gather_host_memory, count_steps_on_the_host])
def test_mixed_devices_are_found(mutate: Callable[[], None], tmp_path: Path) -> None:
    failures = run_ranks(waits_of, 1, [Run(3)], str(tmp_path), mutate, init_group=False, expect_error=True)
    assert failures[0].kind == MixedDevicesError.__name__, failures[0].traceback
