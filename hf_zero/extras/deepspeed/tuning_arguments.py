"""Options of a script for a learning-rate schedule: deepspeed.runtime.lr_schedules' add_tuning_arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
    return {"type": kind, "params": _options(args, kind)}, None


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Put the options that `args` has, of all schedules, into `params`."""
    for kind in TYPES:
        params.update(_options(args, kind))


def override_lr_range_test_params(args: Any, params: dict[str, Any]) -> None:
    params.update(_options(args, LR_RANGE_TEST))


def override_1cycle_params(args: Any, params: dict[str, Any]) -> None:
    params.update(_options(args, ONE_CYCLE))


def override_warmupLR_params(args: Any, params: dict[str, Any]) -> None:
    params.update(_options(args, WARMUP_LR))


def override_warmupCosineLR_params(args: Any, params: dict[str, Any]) -> None:
    params.update(_options(args, WARMUP_COSINE_LR))


def _options(args: Any, kind: str) -> dict[str, Any]:
    """Return the options of one schedule that `args` has."""
    given = {name: getattr(args, name, None) for name in TYPES[kind].params if name in _DEFAULTS and name != _SWITCH}
    return {name: one for name, one in given.items() if one not in _NOT_GIVEN}


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the rate that the block `scheduler` begins or warms up to, or None and why there is none."""
    missing = next((name for name in ("type", "params") if name not in config), None)
    if missing is not None:
        return None, f"LR schedule {missing} not defined in config"
    kind = config["type"]
    if kind not in TYPES:
        return None, f"{kind} is not a valid LR schedule"
    if kind == WARMUP_COSINE_LR:
        return None, f"{kind} multiplies the rate of the optimizer: its params have none"
    name = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}.get(kind, "warmup_max_lr")
    return config["params"][name], ""
