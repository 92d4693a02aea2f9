"""DeepSpeed's schedules: its own values, the formulas of its documentation, and transformers' curves beside them.

`tests/golden/schedules.json` was written by DeepSpeed itself, through `tests/golden/schedules.py`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, StepLR
from transformers import get_constant_schedule_with_warmup, get_linear_schedule_with_warmup

from hf_zero import optim
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, StateError
from hf_zero.optim import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from hf_zero.optim.schedule_types import TYPES
from hf_zero.optim.schedules.base import Schedule
from hf_zero.optim.schedules.build_schedule import build_schedule, choose_scheduler

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())
CASES = GOLDEN["cases"]
NAMES = [f"{case['type']}-{number}" for number, case in enumerate(CASES)]


def make_optimizer(rates: tuple[float, ...] = (0.1,), kind: Any = torch.optim.Adam, **more: Any) -> Any:
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0, **more)


def optimizer_of_golden() -> Any:
    return make_optimizer(tuple(GOLDEN["groups"]))


def rates_of(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def follow(scheduler: Any, steps: int) -> list[float]:
    """The rate that each step uses, of the first group."""
    used = []
    for _ in range(steps):
        used.append(rates_of(scheduler.optimizer)[0])
        scheduler.optimizer.step()
        scheduler.step()
    return used


def test_the_golden_values_cover_every_type_and_move() -> None:
    assert {case["type"] for case in CASES} == set(TYPES)
    for case in CASES:
        assert len({rate for rates in case["lr"] for rate in rates}) > 1, case
    assert sum("betas" in case for case in CASES) == 2


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_value_is_deepspeeds(case: dict[str, Any]) -> None:
    optimizer = optimizer_of_golden()
    scheduler = build_schedule(case, optimizer)
    assert isinstance(scheduler, LRScheduler)
    for step, want in enumerate(case["lr"]):
        assert rates_of(optimizer) == pytest.approx(want, rel=0, abs=1e-12), step
        assert scheduler.get_last_lr() == rates_of(optimizer) == scheduler.get_lr()
        betas = case["betas"][step] if "betas" in case else [(0.9, 0.999)] * 2
        for group, pair in zip(optimizer.param_groups, betas, strict=True):
            assert group["betas"] == pytest.approx(tuple(pair), rel=0, abs=1e-12), step
        scheduler.step()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("resume_at", [0, GOLDEN["resume_at"]])
def test_a_resume_stays_on_the_curve(case: dict[str, Any], resume_at: int) -> None:
    first = build_schedule(case, optimizer_of_golden())
    for _ in range(resume_at):
        first.step()
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"last_batch_iteration": resume_at - 1}, "DeepSpeed's own form"
    for again in (
        build_schedule(case, optimizer_of_golden()),
        pickle.loads(pickle.dumps(first)),
        copy.deepcopy(first),
    ):
        again.load_state_dict(state)
        for step in range(resume_at, len(case["lr"])):
            assert rates_of(again.optimizer) == pytest.approx(case["lr"][step], rel=0, abs=1e-12), step
            again.step()
    begun = getattr(optim, case["type"])(optimizer_of_golden(), **case["params"], last_batch_iteration=resume_at - 1)
    assert begun.get_last_lr() == pytest.approx(case["lr"][resume_at], rel=0, abs=1e-12)


# The formulas, each written for the rate that step n uses (n = 0 is the first step)


def warmth(n: int, steps: int, kind: str) -> float:
    i = n - 1
    if i < 0:
        return 0.0
    return 1.0 if i >= steps else i / steps if kind == "linear" else math.log(i + 1) / math.log(steps)


def warmup(kind: str) -> Callable[[int], float]:
    return lambda n: 0.01 + 0.09 * warmth(n, 6, kind)


def decay(kind: str) -> Callable[[int], float]:
    return lambda n: 0.1 * (warmth(n, 6, kind) if n <= 6 else max(0.0, (17 - (n - 1)) / 11))


def cosine(kind: str) -> Callable[[int], float]:
    def value(n: int) -> float:
        if n == 0:
            return 0.0
        if n <= 6:
            return 0.1 * (0.3 + 0.7 * warmth(n, 6, kind))
        return 0.1 * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (n - 6) / 11))))

    return value


def triangle(n: int) -> float:
    if n < 5:
        return 0.01 + 0.09 * n / 5
    if n < 13:
        return 0.1 - 0.09 * (n - 5) / 8
    return 0.01 / (1 + 0.5 * (n - 13) / 2)


TOTAL = {"total_num_steps": 17, "warmup_num_steps": 6}
FORMULAS: list[tuple[type[Schedule], dict[str, Any], Callable[[int], float]]] = [
    *(
        (kind, {**params, "warmup_type": shape}, formula(shape))
        for shape in ("log", "linear")
        for kind, params, formula in (
            (WarmupLR, {"warmup_min_lr": 0.01, "warmup_num_steps": 6}, warmup),
            (WarmupDecayLR, {"warmup_max_lr": 0.1, **TOTAL}, decay),
            (WarmupCosineLR, {"warmup_min_ratio": 0.3, "cos_min_ratio": 0.02, **TOTAL}, cosine),
        )
    ),
    (
        OneCycle,
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 5,
            "cycle_second_step_size": 8,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
        },
        triangle,
    ),
    (
        LRRangeTest,
        {"lr_range_test_min_lr": 0.02, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.5},
        lambda n: 0.02 * (1 + 0.5 * n / 4),
    ),
    (
        LRRangeTest,
        {"lr_range_test_min_lr": 0.02, "lr_range_test_step_size": 4, "lr_range_test_staircase": True},
        lambda n: 0.02 * (1 + n // 4),
    ),
]


@pytest.mark.parametrize(("kind", "params", "formula"), FORMULAS)
def test_every_curve_is_its_formula(
    kind: type[Schedule], params: dict[str, Any], formula: Callable[[int], float]
) -> None:
    used = follow(kind(make_optimizer(), **params), 25)
    assert used == pytest.approx([formula(n) for n in range(25)], rel=0, abs=1e-12)
    assert len(set(used)) > 4


@pytest.mark.parametrize(("kind", "params", "formula"), FORMULAS)
def test_rates_that_are_tensors_are_set_in_place(
    kind: type[Schedule], params: dict[str, Any], formula: Callable[[int], float]
) -> None:
    """Rates are set like those of torch's schedulers for capturable optimizers."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.1, dtype=torch.float64))
    rate = optimizer.param_groups[0]["lr"]
    scheduler = kind(optimizer, **params)
    last = scheduler.get_last_lr()
    assert follow(scheduler, 20) == pytest.approx([formula(n) for n in range(20)], rel=0, abs=1e-12)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(last[0]) == pytest.approx(formula(0)), "what get_last_lr gave does not change afterwards"


# Beside transformers


def test_linear_warm_ups_are_those_of_transformers_one_step_later_and_log_is_not() -> None:
    """WarmupLR is constant_with_warmup, and WarmupDecayLR is linear, with warmup_type linear only."""
    steps, total = 6, 17

    def ours(kind: str) -> tuple[list[float], list[float]]:
        params: dict[str, Any] = {"warmup_max_lr": 0.1, "warmup_num_steps": steps, "warmup_type": kind}
        constant = WarmupLR(make_optimizer(), **params)
        return follow(constant, 22), follow(WarmupDecayLR(make_optimizer(), total, **params), 22)

    theirs = (
        follow(get_constant_schedule_with_warmup(make_optimizer(), steps), 22),
        follow(get_linear_schedule_with_warmup(make_optimizer(), steps, total), 22),
    )
    for linear, log, want in zip(ours("linear"), ours("log"), theirs, strict=True):
        assert linear[0] == want[0] == 0.0
        assert linear[1:] == pytest.approx(want[:-1], rel=0, abs=1e-12), "the same curve, one step later"
        assert max(abs(one - other) for one, other in zip(log[1:], want[:-1], strict=True)) > 0.02
    default = WarmupLR(make_optimizer(), warmup_num_steps=steps)
    assert default.warmup_type == "log" and follow(default, 22) == pytest.approx(ours("log")[0])


# Details


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_warm_up_of_less_than_two_steps_takes_two(steps: int) -> None:
    """DeepSpeed refuses 0 since 0.19 and took it before; accelerate's DummyScheduler gives 0."""
    linear = {"warmup_num_steps": steps, "warmup_type": "linear"}
    assert follow(WarmupLR(make_optimizer(), **linear), 5) == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.1])
    decay = WarmupDecayLR(make_optimizer(), 4, warmup_max_lr=0.1, **linear)
    assert follow(decay, 5) == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.05])
    cosine = WarmupCosineLR(make_optimizer(), 3, cos_min_ratio=0.5, **linear)
    assert follow(cosine, 4) == pytest.approx([0.0, 0.0, 0.05, 0.05])
    assert ZeroConfig.load({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": steps}}}).check() == []


def test_a_second_scheduler_starts_from_the_optimizers_own_rates() -> None:
    """Torch's schedulers do the same: the rate that the first one left behind is not the rate that was asked for."""
    optimizer = make_optimizer((0.1, 0.2))
    follow(WarmupCosineLR(optimizer, 10, warmup_num_steps=2), 9)
    assert rates_of(optimizer)[0] < 0.02
    for scheduler in (WarmupCosineLR(optimizer, 10, warmup_num_steps=2), WarmupLR(optimizer, warmup_num_steps=2)):
        assert scheduler.max_lrs == [0.1, 0.2]


def test_betas_are_told() -> None:
    optimizer = make_optimizer()
    scheduler = OneCycle(optimizer, 0.01, 0.1, cycle_first_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9)
    told = [scheduler.get_mom()]
    for _ in range(3):
        scheduler.step()
        told.append([group["betas"] for group in optimizer.param_groups])
        assert scheduler.get_mom() == told[-1]
    assert [one[0] for one in told] == [pytest.approx((beta1, 0.99)) for beta1 in (0.9, 0.85, 0.8, 0.85)]


def test_momentum_without_betas_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make_optimizer(kind=torch.optim.SGD, momentum=0.85)
    with caplog.at_level(logging.WARNING):
        scheduler = OneCycle(optimizer, 0.01, 0.1, cycle_first_step_size=3)
    assert "SGD" in caplog.text and "cycle_momentum" in caplog.text
    assert follow(scheduler, 4) == pytest.approx([0.01, 0.04, 0.07, 0.1])
    assert optimizer.param_groups[0]["momentum"] == 0.85 and "betas" not in optimizer.param_groups[0]


def test_a_jump_to_an_iteration() -> None:
    scheduler = WarmupLR(make_optimizer(), warmup_num_steps=8, warmup_type="linear")
    scheduler.step(3)
    assert scheduler.get_last_lr() == pytest.approx([0.1 * 3 / 8])
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.1 * 4 / 8])


def test_the_state_of_another_scheduler_is_refused() -> None:
    scheduler = WarmupLR(make_optimizer(), warmup_num_steps=4)
    for state in (StepLR(make_optimizer(), 3).state_dict(), {}, {"last_batch_iteration": "7"}):
        with pytest.raises(StateError, match="WarmupLR cannot go on from the state of another scheduler"):
            scheduler.load_state_dict(state)


def test_the_default_peak_of_the_decay_is_told(caplog: pytest.LogCaptureFixture) -> None:
    block = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2}}
    with caplog.at_level(logging.WARNING):
        assert max(follow(build_schedule(block, make_optimizer()), 9)) == pytest.approx(0.001)
    assert "warmup_max_lr is not given" in caplog.text and "0.001" in caplog.text and "0.1" in caplog.text


def test_the_callers_scheduler_goes_before_the_block(caplog: pytest.LogCaptureFixture) -> None:
    block = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    optimizer = make_optimizer()
    assert isinstance(choose_scheduler(None, block, optimizer), WarmupLR)
    assert choose_scheduler(None, None, optimizer) is None and not caplog.text
    mine = StepLR(optimizer, 2)
    assert choose_scheduler(mine, block, optimizer) is mine
    assert "the scheduler block (WarmupLR) is not used" in caplog.text
    assert isinstance(choose_scheduler(lambda one: StepLR(one, 2), None, optimizer), StepLR)
    assert isinstance(choose_scheduler(WarmupLR, None, optimizer), WarmupLR), "a class is a function of the optimizer"
    for wrong in ("cosine", lambda one: None):
        with pytest.raises(ConfigError, match="expected an object with a method step"):
            choose_scheduler(wrong, None, optimizer)


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_no_number_of_warmup_steps_is_the_default(kind: Any) -> None:
    """Old scripts pass an argument that nobody set."""
    more = {} if kind is WarmupLR else {"total_num_steps": 5000}
    rates = []
    for steps in ({}, {"warmup_num_steps": 1000}, {"warmup_num_steps": None}, {"warmup_num_steps": 10}):
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.001)
        schedule = kind(optimizer, **steps, **more)
        schedule.step(500)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] == rates[2] != rates[3]
