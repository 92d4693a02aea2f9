"""Mistakes in a scheduler block and in schedules made in Python: each is named with its value and its remedy."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.optim import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from hf_zero.optim.schedules.base import Schedule
from tests.optim.test_schedules import make_optimizer, rates_of

# Mistakes in the block


def block(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def message(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        ZeroConfig.load(config, defer=True).resolve()
    return str(raised.value)


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    (
        block("WarmupDecayLR", warmup_num_steps=3),
        ["total_num_steps = null: WarmupDecayLR cannot do without it", "of at"],
    ),
    (block("WarmupCosineLR", warmup_num_steps=3), ["total_num_steps = null: WarmupCosineLR cannot do without it"]),
    ({"scheduler": {"type": "WarmupCosineLR"}}, ["total_num_steps = null", 'or "auto" under Trainer']),
    (block("OneCycle", cycle_min_lr=0.1), ["cycle_max_lr = null: OneCycle cannot do without it: expected a number"]),
    (block("WarmupLR", warmup_num_steps=-1), ["warmup_num_steps = -1: expected an integer of at least 0", "Correct"]),
    (block("WarmupLR", warmup_num_steps=2.5), ["warmup_num_steps = 2.5: expected an integer"]),
    (
        block("WarmupDecayLR", total_num_steps=10, warmup_num_steps=11),
        ["warmup_num_steps = 11: the warm-up is longer than the training (total_num_steps = 10): expected at most 10"],
    ),
    (
        block("WarmupCosineLR", total_num_steps=10),
        [
            "warmup_num_steps = 1000: the warm-up is longer",
            "which is the default where it is not given",
            "Write fewer",
        ],
    ),
    (block("WarmupLR", warmup_max_lr=-0.1), ["warmup_max_lr = -0.1: expected a number or a list", "of at least 0"]),
    (block("WarmupLR", warmup_min_lr=[0.1, -1]), ["warmup_min_lr = [0.1, -1]: expected"]),
    (block("WarmupLR", warmup_type="cosine"), ['warmup_type = "cosine": expected "log" or "linear"']),
    (block("WarmupLR", total_num_steps=10), ["scheduler.params.total_num_steps = 10: "]),
    (
        block("OneCycle", **CYCLE, cycle_first_step_size=0),
        ["cycle_first_step_size = 0: expected an integer of at least"],
    ),
    (block("OneCycle", **CYCLE, cycle_max_mom=1.5), ["cycle_max_mom = 1.5: expected", "below 1"]),
    (
        block("LRRangeTest", lr_range_test_step_size=0),
        ["lr_range_test_step_size = 0: expected an integer of at least 1"],
    ),
    (
        block("WarmUp"),
        ['scheduler.type = "WarmUp": expected "WarmupLR", "WarmupDecayLR", "Warm', "The nearest known value is"],
    ),
    ({"scheduler": {"params": {"warmup_num_steps": 3}}}, ["the type is missing", "WarmupLR, WarmupDecayLR"]),
    (
        block("WarmupLR", warmup_max_lr="auto"),
        ["it takes its value from TrainingArguments, which do not give it here"],
    ),
]


@pytest.mark.parametrize(("config", "parts"), MISTAKES)
def test_a_mistake_in_the_block_is_one_problem_with_its_remedy(config: dict[str, Any], parts: list[str]) -> None:
    text = message(config)
    assert text.startswith("1 problem"), text
    for part in parts:
        assert part in text, text


def test_what_the_caller_brings_leaves_the_numbers_of_the_block_open() -> None:
    config = block("WarmupDecayLR", warmup_max_lr="auto", total_num_steps="auto", warmup_num_steps="auto")
    assert message(config).startswith("3 problems")
    assert ZeroConfig.load(config).resolve(client_scheduler=True).scheduler is not None
    filled = ZeroConfig.load(config).filled_in(
        {
            "scheduler.params.warmup_max_lr": 0.2,
            "scheduler.params.total_num_steps": 9,
            "scheduler.params.warmup_num_steps": 3,
            "optimizer.params.lr": 0.1,
            "gradient_clipping": 7.0,
        }
    )
    resolved = filled.resolve()
    assert resolved.scheduler == {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.2, "total_num_steps": 9, "warmup_num_steps": 3},
    }
    assert resolved.optimizer is None and resolved.gradient_clipping == 0.0, "only what the file leaves open"


def test_values_in_the_block_become_numbers() -> None:
    config = block("WarmupLR", warmup_max_lr=["1e-3", 2], warmup_num_steps=5e2)
    scheduler = ZeroConfig.load(config).resolve().scheduler
    assert scheduler == {"type": "WarmupLR", "params": {"warmup_max_lr": [0.001, 2.0], "warmup_num_steps": 500}}


# Mistakes in Python


PYTHON: list[tuple[type[Schedule], dict[str, Any], list[str]]] = [
    (
        WarmupLR,
        {"warmup_max_lr": [0.1, 0.2, 0.3]},
        ["warmup_max_lr = [0.1, 0.2, 0.3]: expected a number, or 2 numbers"],
    ),
    (OneCycle, {**CYCLE, "cycle_min_mom": [0.8]}, ["cycle_min_mom = [0.8]", "each param group"]),
    (LRRangeTest, {"lr_range_test_min_lr": [1.0]}, ["lr_range_test_min_lr = [1.0]", "Give one number for all groups"]),
    (WarmupLR, {"warmup_num_steps": -1}, ["params.warmup_num_steps = -1: expected an integer of at least 0."]),
    (
        WarmupLR,
        {"warmup_min_lr": -1.0, "warmup_type": "cos"},
        ["2 mistakes", "warmup_min_lr = -1.0", '"log" or "linear"'],
    ),
    (WarmupDecayLR, {"warmup_num_steps": 5}, ["total_num_steps = null: WarmupDecayLR cannot do without it"]),
    (WarmupCosineLR, {"total_num_steps": 4, "warmup_num_steps": 5}, ["the warm-up is longer than the training"]),
    (OneCycle, {}, ["2 mistakes", "cycle_min_lr = null", "cycle_max_lr = null"]),
]


@pytest.mark.parametrize(("kind", "params", "parts"), PYTHON)
def test_a_mistake_in_python_leaves_the_optimizer_alone(
    kind: type[Schedule], params: dict[str, Any], parts: list[str]
) -> None:
    optimizer = make_optimizer((0.1, 0.2))
    with pytest.raises(ConfigError) as raised:
        kind(optimizer, **params)
    for part in parts:
        assert part in str(raised.value), str(raised.value)
    assert rates_of(optimizer) == [0.1, 0.2] and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
