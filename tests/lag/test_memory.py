"""The peak of the device's memory, as its allocator counts it, is the one that `hf-zero estimate` plans."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from tests.estimate.test_estimate_plan import batch, jobs, llama, planned
from tests.harness.ranks import run_ranks
from tests.lag import device, group

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

# Large beside the few bytes of norms and flags. The lag device has no fused attention, which plans count on.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 512}
SIZES["attn_implementation"] = "eager"
SHAPE, STEPS = (4, 64), 3
TOLERANCE = 0.03


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def measured(all_jobs: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """The peak of each training's steps."""
    device.enable()
    group.register()
    peaks = []
    for _, config in all_jobs:
        gc.collect()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        model = llama(**SIZES)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(STEPS * engine.accumulation_steps):
            engine.backward(engine(**batch("lag", SHAPE)).loss)
            engine.step()
        engine.finish_updates()
        peaks.append(torch.accelerator.max_memory_allocated() - before)
        engine.teardown()
        del engine, model, optimizer
    return peaks


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_peak_is_the_planned_one(world_size: int, tmp_path: Path) -> None:
    all_jobs = jobs(str(tmp_path))
    by_rank = run_ranks(measured, world_size, all_jobs, timeout=240)
    wrong = []
    for (name, config), *peaks in zip(all_jobs, *by_rank, strict=True):
        plans, _ = planned(copy.deepcopy(config), world_size, on_host=False, shape=SHAPE, **SIZES)
        for rank, (peak, plan) in enumerate(zip(peaks, plans, strict=True)):
            ratio = peak / plan.device_peak
            if abs(ratio - 1) > TOLERANCE:
                wrong.append(f"{name}, rank {rank}: {peak} measured, {plan.device_peak} planned, x {ratio:.3f}")
    assert not wrong, "\n".join(wrong)
