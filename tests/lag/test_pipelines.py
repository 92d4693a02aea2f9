"""A pipeline on devices that the host does not wait for: bit-equal to the CPU, whenever their tasks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.extras.pipeline.module import PipelineModule
from tests.harness.ranks import run_ranks
from tests.lag import device, group
from tests.pipeline import models

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

SCHEDULES = ["late", "early", "random:1"]
# Stages, chunks, schedule of the pipeline, kind of model, further configuration
SETTINGS: list[tuple[int, int, str, str, dict[str, Any]]] = [
    (2, 1, "1f1b", "tied", {"gradient_clipping": 0.5}),
    (2, 1, "zero_bubble", "plain", {}),
    (2, 2, "interleaved", "tied", {"bf16": {"enabled": True}}),
    (1, 1, "gpipe", "plain", {"zero_optimization": {"stage": 1}}),
    (1, 1, "1f1b", "plain", {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
]
MICROS, STEPS = 3, 3


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def train(number: int) -> list[Any]:
    """Losses, the norm, and this rank's weights."""
    stages, chunks, schedule, variant, more = SETTINGS[number]
    torch.manual_seed(0)
    module = PipelineModule(
        models.layers_of(variant), num_stages=stages, virtual_stages=chunks, **models.options_of(variant)
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "pipeline": {"schedule": schedule},
        **more,
    }
    engine, *_ = hf_zero.initialize(model=module, config=config)
    found: list[Any] = []
    for batch in models.batches(STEPS, 2 // stages, MICROS):
        found.append(engine.train_batch(iter(batch[engine.grid.data_parallel_id])).item())
    found += [engine.get_global_grad_norm(), engine.eval_batch(iter(batch[engine.grid.data_parallel_id])).item()]
    engine.teardown()
    return [*found, *(param.detach().cpu() for param in module.parameters())]


def on_cpu() -> list[list[Any]]:
    return [train(number) for number in range(len(SETTINGS))]


def on_lag() -> dict[str, list[list[Any]]]:
    device.enable()
    group.register()
    found = {}
    for schedule in SCHEDULES:
        device.set_schedule(schedule)
        found[schedule] = [train(number) for number in range(len(SETTINGS))]
        torch.accelerator.synchronize()
        assert device.take_reports() == [], schedule
    return found


def test_it_is_bit_equal_to_the_cpu() -> None:
    expected = run_ranks(on_cpu, 2, timeout=60)
    for rank, found in enumerate(run_ranks(on_lag, 2, timeout=200)):
        for schedule, by_setting in found.items():
            for number, mine in enumerate(by_setting):
                its = expected[rank][number]
                assert its[0] != its[STEPS - 1]
                numbers = STEPS + 2
                assert mine[:STEPS] == its[:STEPS], (schedule, SETTINGS[number])
                assert mine[STEPS:numbers] == pytest.approx(its[STEPS:numbers], rel=1e-6)
                for value, other in zip(mine[numbers:], its[numbers:], strict=True):
                    assert torch.equal(value, other), (schedule, SETTINGS[number])
