"""Options of a script for a learning-rate schedule: deepspeed.runtime.lr_schedules' add_tuning_arguments."""

from __future__ import annotations

import argparse
from typing import Any

from hf_zero.config.schema import Key
from hf_zero.optim.schedule_types import TYPES

# DeepSpeed's defaults, which give the type of each option.
_DEFAULTS: dict[str, Any] = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}
VALID_LR_SCHEDULES = list(TYPES)
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
# DeepSpeed has a constant for the name of each option: WARMUP_MIN_LR is "warmup_min_lr".
globals().update({name.upper(): name for name in ("lr_schedule", "total_num_steps", *_DEFAULTS)})
_NOT_GIVEN = (None, -1)
_SWITCH = "cycle_momentum"  # it stays out of the configuration, as in DeepSpeed


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --lr_schedule and an option for each parameter of the schedules; returns `parser`."""
    helps = {name: key.help for one in TYPES.values() for name, key in one.params.items() if isinstance(key, Key)}
    group = parser.add_argument_group("Convergence Tuning", "the learning-rate schedule")
    group.add_argument("--lr_schedule", help=f"the class of the schedule: {', '.join(TYPES)}")
    for name, default in _DEFAULTS.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        group.add_argument(f"--{name}", default=default, help=helps[name], **kind)
    return parser


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return the block `scheduler` of the options and None, or None and what is wrong with --lr_schedule."""
    kind = getattr(args, "lr_schedule", None)
    if kind is None:
        return None, "--lr_schedule not specified on command line"
    if kind not in TYPES:
        return None, f"{kind} is not supported LR schedule"
    given = {name: getattr(args, name, None) for name in TYPES[kind].params if name in _DEFAULTS and name != _SWITCH}
    return {"type": kind, "params": {name: one for name, one in given.items() if one not in _NOT_GIVEN}}, None
