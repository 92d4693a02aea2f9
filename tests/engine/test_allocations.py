"""Constant memory: after two steps the engine allocates nothing, at every stage and on every medium."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

KEYS = ("gather_allocations", "reduce_allocations", "staging_allocations")
STEPS, SETTLED = 5, 2
MEDIA = ("none", "cpu", "nvme")
CASES = [(stage, medium) for stage in (1, 2, 3) for medium in MEDIA]


class Layers(nn.Module):
    """The layers have different sizes, so that no layer's memory serves another by accident."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(40 + i, 41 + i) for i in range(12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def counts(stage: int, medium: str, folder: str) -> list[dict[str, int]]:
    """Return the counts after each step."""
    offload = {"device": medium, "nvme_path": folder}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": offload, "stage3_param_persistence_threshold": 0}
    zero["reduce_bucket_size"] = 1000
    if stage == 3:
        zero["offload_param"] = {**offload, "max_in_cpu": 0}
    torch.manual_seed(0)
    model = Layers()
    keys = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "gradient_clipping": 1.0}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=keys)[0]
    found = []
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(2, 40)))
        engine.step()
        report = engine.memory_report()
        found.append({key: report[key] for key in KEYS})
        assert not any(value for key, value in report.items() if key.startswith("saved_inputs_"))
    engine.teardown()
    return found


def train(folder: str) -> list[list[dict[str, int]]]:
    return [counts(stage, medium, folder) for stage, medium in CASES]


def test_nothing_is_allocated_after_two_steps(tmp_path: Any) -> None:
    for results in run_ranks(train, 2, str(tmp_path)):
        for (stage, medium), steps in zip(CASES, results, strict=True):
            label = f"stage {stage}, {medium}: {steps}"
            assert all(step == steps[SETTLED - 1] for step in steps[SETTLED:]), label
            last = steps[-1]
            assert last["reduce_allocations"] > 0, label
            assert (last["gather_allocations"] > 0) == (stage == 3), label
            assert (last["staging_allocations"] > 0) == (medium == "nvme"), label
