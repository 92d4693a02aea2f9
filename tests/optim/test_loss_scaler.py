"""The rules of the loss scale: DeepSpeed's, value for value and line for line."""

from __future__ import annotations

import json

import pytest
import torch

from hf_zero import ConfigError, ZeroConfig
from hf_zero.config.resolved import LossScaling
from hf_zero.hf.accelerator.plain_loop import scaling_of
from hf_zero.hf.conflicts import scaler_conflicts
from hf_zero.optim.loss_scaler import HysteresisScaler, PlainScaler, StaticScaler, make_scaler
from tests.golden import loss_scales
from tests.golden.loss_scales import Pattern


def trace(pattern: Pattern) -> list[float | str]:
    rules = LossScaling(
        initial_power=pattern.power,
        window=pattern.window,
        hysteresis=pattern.hysteresis,
        consecutive_hysteresis=pattern.consecutive,
        min_scale=float(pattern.min_scale),
    )
    scaler = HysteresisScaler(rules)
    scales: list[float | str] = []
    for overflow in pattern.overflows:
        if overflow and scaler.is_exhausted:
            return [*scales, "minimum"]
        scaler.update(overflow)
        scales.append(scaler.cur_scale)
    return scales


def test_scales_are_those_of_deepspeed_for_5000_patterns() -> None:
    golden = json.loads(loss_scales.FILE.read_text())["digests"]
    assert len(golden) * loss_scales.PATTERNS == 5000
    assert [loss_scales.digest(block, trace) for block in range(len(golden))] == golden
    every = [trace(pattern) for block in range(3) for pattern in loss_scales.patterns(block)]
    assert any(scales[-1] == "minimum" for scales in every) and any(len(set(scales)) > 10 for scales in every)


def start(scale: int) -> str:
    return f"OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scale}, "


def test_from_2_to_the_32_one_hysteresis_and_22_halvings() -> None:
    scaler = HysteresisScaler(LossScaling(initial_power=32))
    lines = [line for _ in range(23) for line in scaler.update(True)]
    assert lines[0] == start(2**32) + "but hysteresis is 2. Reducing hysteresis to 1"
    assert lines[1:] == [start(2**power) + f"reducing to {2 ** (power - 1)}" for power in range(32, 10, -1)]
    assert scaler.cur_scale == 1024


def test_hysteresis_is_not_refilled_between_isolated_overflows() -> None:
    scaler = HysteresisScaler(LossScaling(initial_power=8, hysteresis=4))
    lines = []
    for _ in range(5):
        lines += scaler.update(True)
        lines += [line for _ in range(20) for line in scaler.update(False)]
    assert lines[1:] == [
        start(256) + "but hysteresis is 3. Reducing hysteresis to 2",
        start(256) + "but hysteresis is 2. Reducing hysteresis to 1",
        start(256) + "reducing to 128",
        start(128) + "reducing to 64",
    ]


def test_a_window_of_clean_steps_doubles_the_scale_and_refills_the_hysteresis() -> None:
    scaler = HysteresisScaler(LossScaling())
    for _ in range(3):
        assert scaler.update(True) == [start(65536) + "but hysteresis is 2. Reducing hysteresis to 1"]
        assert scaler.update(True) == [start(65536) + "reducing to 32768"]
        scales = []
        for _ in range(1001):
            assert scaler.update(False) == []
            scales.append(scaler.cur_scale)
        assert scales == [32768.0] * 1000 + [65536.0]


def test_stage_0_has_no_hysteresis_and_says_it_in_other_words() -> None:
    scaler = make_scaler(LossScaling(initial_power=15, window=500), stage=0)
    assert isinstance(scaler, PlainScaler) and not isinstance(scaler, HysteresisScaler)
    for _ in range(6023):
        lines = scaler.update(False)
        if scaler.cur_scale > 2**15:
            scaler.cur_scale = 2.0**15
    assert scaler.update(True) == [
        "Grad overflow on iteration 6023",
        "Reducing dynamic loss scale from 32768.0 to 16384.0",
        "[Rank 0] Overflow detected. Skipping step. Attempted loss scale: 32768.0, reducing to 16384.0",
    ]
    for _ in range(501):
        lines = scaler.update(False)
    assert lines == [
        "No Grad overflow for 500 iterations",
        "Increasing dynamic loss scale from 16384.0 to 32768.0",
    ]
    for _ in range(40):
        scaler.update(True)
    assert scaler.cur_scale == 1.0 and not scaler.is_exhausted


def test_a_static_scale_stays() -> None:
    scaler = make_scaler(LossScaling(static=128.0), stage=2)
    assert isinstance(scaler, StaticScaler)
    assert scaler.update(True) and not scaler.update(False) and scaler.cur_scale == 128.0


@pytest.mark.parametrize("scaler", [PlainScaler, HysteresisScaler])
def test_state_goes_on_where_it_was(scaler: type[PlainScaler]) -> None:
    pattern = [i % 5 == 0 or 30 < i < 34 for i in range(60)]
    rules = LossScaling(window=3)
    whole, first = scaler(rules), scaler(rules)
    expected = []
    for overflow in pattern:
        whole.update(overflow)
        expected.append(whole.cur_scale)
    for overflow in pattern[:32]:
        first.update(overflow)
    second = scaler(rules)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got = []
    for overflow in pattern[32:]:
        second.update(overflow)
        got.append(second.cur_scale)
    assert got == expected[32:]


WRONG: dict[str, list[object]] = {
    "fp16.loss_scale": [-1, True, "x", float("inf"), float("nan")],
    "fp16.loss_scale_window": [0, -5, 1.5],
    "fp16.hysteresis": [0],
    "fp16.min_loss_scale": [0, -1, 2**20],
    "fp16.initial_scale_power": [-1, 2.5],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_scales_that_lead_nowhere_are_refused_by_name(key: str, value: object) -> None:
    block = {"enabled": True, key.partition(".")[2]: value}
    with pytest.raises(ConfigError, match=key):
        ZeroConfig.load({"train_batch_size": 1, "fp16": block}).resolve(world_size=1)


@pytest.mark.parametrize(
    "blocks",
    [
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}},
        {"bf16": {"enabled": True}, "amp": {"enabled": True}},
    ],
)
def test_one_16_bit_type_at_a_time(blocks: dict[str, dict[str, bool]]) -> None:
    with pytest.raises(ConfigError, match="one 16-bit type at a time"):
        ZeroConfig.load({"train_batch_size": 1, **blocks}).resolve(world_size=1)


def test_amp_goes_with_stage_0_only() -> None:
    config = {"train_batch_size": 1, "amp": {"enabled": True}, "zero_optimization": {"stage": 1}}
    with pytest.raises(ConfigError, match="amp goes with stage 0 only"):
        ZeroConfig.load(config).resolve(world_size=1)


@pytest.mark.parametrize(("given", "static"), [(None, 0.0), ("dynamic", 0.0), (128, 128.0), ("128.0", 128.0)])
def test_scales_of_amp(given: object, static: float) -> None:
    block = {"enabled": True, **({} if given is None else {"loss_scale": given})}
    scaling = ZeroConfig.load({"train_batch_size": 1, "amp": block}).resolve(world_size=1).precision.scaling
    assert scaling is not None and scaling.static == static


@pytest.mark.parametrize("given", ["dynamc", -1, 0, True, "nan"])
def test_other_scales_of_amp_are_refused(given: object) -> None:
    config = {"train_batch_size": 1, "amp": {"enabled": True, "loss_scale": given}}
    with pytest.raises(ConfigError, match=r"amp.loss_scale = .*from 2 \*\* -24 to 2 \*\* 127, or \"dynamic\""):
        ZeroConfig.load(config).resolve(world_size=1)


@pytest.mark.parametrize(
    ("settings", "words"), [({"growth_factor": 3.0}, "grows by 3"), ({"init_scale": 10000.0}, "powers of 2")]
)
def test_gradient_scalers_that_cannot_be_followed_are_refused(settings: dict[str, float], words: str) -> None:
    (problem,) = scaler_conflicts(torch.amp.GradScaler("cpu", **settings))
    assert words in problem.text


def test_gradient_scalers_are_followed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    assert scaler_conflicts(scaler) == []
    scaling = scaling_of(scaler)
    assert scaling is not None and (scaling.initial_power, scaling.window, scaling.hysteresis) == (10, 7, 1)
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert scaler_conflicts(off) == [] and scaling_of(off) is None
