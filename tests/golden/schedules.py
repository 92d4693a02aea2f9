"""Writes tests/golden/schedules.json: learning rates and betas that DeepSpeed's own schedulers set, step by step.

Run it where DeepSpeed is installed:  python tests/golden/schedules.py tests/golden/schedules.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import lr_schedules

STEPS = 24
RESUME_AT = 9  # steps before the state is taken to another optimizer and scheduler
TWO_GROUPS = [0.003, 0.02]

CASES: list[dict[str, Any]] = [
    {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 7}},
    {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}},
    {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": [1e-4, 1e-3], "warmup_max_lr": [0.01, 0.1], "warmup_num_steps": 5},
    },
    {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 1}},
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 6}},
    {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": 18,
            "warmup_min_lr": [0.0, 1e-3],
            "warmup_max_lr": [0.01, 0.02],
            "warmup_num_steps": 5,
            "warmup_type": "linear",
        },
    },
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 8, "warmup_max_lr": 0.1}},
    {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 6}},
    {
        "type": "WarmupCosineLR",
        "params": {
            "total_num_steps": 17,
            "warmup_num_steps": 4,
            "warmup_min_ratio": 0.2,
            "cos_min_ratio": 0.05,
            "warmup_type": "linear",
        },
    },
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 5}},
    {
        "type": "LRRangeTest",
        "params": {
            "lr_range_test_min_lr": [1e-4, 3e-4],
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 2.5,
            "lr_range_test_staircase": True,
        },
    },
    {
        "type": "OneCycle",
        "params": {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.01,
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 6,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.01,
        },
    },
    {
        "type": "OneCycle",
        "params": {
            "cycle_min_lr": [0.001, 0.0],
            "cycle_max_lr": [0.01, 0.3],
            "cycle_first_step_size": 9,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
            "cycle_min_mom": [0.7, 0.75],
            "cycle_max_mom": 0.95,
        },
    },
    {
        "type": "OneCycle",
        "params": {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.02,
            "cycle_first_step_size": 10,
            "cycle_second_step_size": 0,
            "cycle_momentum": False,
            "decay_step_size": 2,
            "decay_lr_rate": 1.5,
        },
    },
]


def make(case: dict[str, Any]) -> tuple[torch.optim.Optimizer, Any]:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in TWO_GROUPS]
    optimizer = torch.optim.Adam(groups, lr=1.0)
    return optimizer, getattr(lr_schedules, case["type"])(optimizer, **case["params"])


def values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "lr": [group["lr"] for group in optimizer.param_groups],
        "betas": [list(group["betas"]) for group in optimizer.param_groups],
    }


def curve(case: dict[str, Any]) -> dict[str, Any]:
    optimizer, scheduler = make(case)
    steps = [values(optimizer)]
    resumed: list[dict[str, Any]] = []
    for step in range(STEPS):
        if step == RESUME_AT:
            other, after = make(case)
            after.load_state_dict(scheduler.state_dict())
            for _ in range(STEPS - RESUME_AT):
                after.step()
                resumed.append(values(other))
        scheduler.step()
        steps.append(values(optimizer))
    assert resumed == steps[RESUME_AT + 1 :], "DeepSpeed's own resume leaves the curve"
    rates = [step["lr"] for step in steps]
    betas = [step["betas"] for step in steps]
    moved = any(one != betas[0] for one in betas) or betas[0] != [[0.9, 0.999]] * 2
    return {**case, "lr": rates, **({"betas": betas} if moved else {})}


def main() -> None:
    found = {
        "deepspeed": deepspeed.__version__,
        "groups": TWO_GROUPS,
        "resume_at": RESUME_AT,
        "cases": [curve(case) for case in CASES],
    }
    lines = json.dumps(found).replace('{"type"', '\n{"type"')
    Path(sys.argv[1]).write_text(lines + "\n")


if __name__ == "__main__":
    main()
