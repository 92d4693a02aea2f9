"""Rounding to the digits of fp16 at random."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_zero.fp8 import stochastic_rounding
from hf_zero.fp8.stochastic_rounding import round_to_fp16_digits
from hf_zero.native.library import library
from hf_zero.native.simd import SIMD_LEVELS, SIMD_VARIABLE


def mixed(number: int) -> int:
    """MurmurHash3's finalizer, on Python's integers."""
    number = (number ^ number >> 16) * 0x85EBCA6B % 2**32
    number = (number ^ number >> 13) * 0xC2B2AE35 % 2**32
    return number ^ number >> 16


def reference(value: float, place: int, seed: int) -> float:
    """Up if the random number in [0, 1) and the digits beyond the eleventh come to one."""
    if value == 0 or not math.isfinite(value):
        return value
    unit = 2.0 ** (math.frexp(abs(value))[1] - 11)
    below = math.floor(abs(value) / unit)
    part = abs(value) / unit - below
    noise = (mixed((place * 0x9E3779B1 + seed) % 2**32) & 0x1FFF) / 0x2000
    return math.copysign((below + (part + noise >= 1)) * unit, value)


@pytest.mark.parametrize("simd", ["torch", *SIMD_LEVELS])
def test_it_is_the_reference(simd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if simd == "torch":
        monkeypatch.setattr(stochastic_rounding, "has_library", lambda: False)
    elif SIMD_LEVELS.index(simd) > library().hz_simd_level():
        pytest.skip(f"this CPU has no {simd}")
    else:
        monkeypatch.setenv(SIMD_VARIABLE, simd)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3000, generator=generator) * 10.0 ** torch.randint(-9, 9, (3000,), generator=generator)
    special = [0.0, -0.0, math.inf, -math.inf, 1.0, -2.0, 2049 / 2048, 4095.5, 3.4e38, 1.1754944e-38]
    values[: len(special)] = torch.tensor(special)
    values[20] = math.nan
    pieces = [(0, 7, 1000), (1000, 50_000, 2000)]
    places = [*range(7, 1007), *range(50_000, 52_000)]
    for seed in (0, 5, 2**31 - 1):
        got = values.clone()
        round_to_fp16_digits(got, pieces, seed)
        want = [reference(value, place, seed) for value, place in zip(values.tolist(), places, strict=True)]
        np.testing.assert_array_equal(got.numpy(), np.array(want, dtype=np.float32))
        assert torch.equal(torch.signbit(got), torch.signbit(values))


def test_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(300_007, generator=torch.Generator().manual_seed(3))
    results = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("HF_ZERO_CPU_THREADS", threads)
        results.append(values.clone())
        round_to_fp16_digits(results[-1], [(0, 11, 100_000), (100_000, 900_000, 200_007)], 12345)
    monkeypatch.setattr(stochastic_rounding, "has_library", lambda: False)
    by_torch = values.clone()
    round_to_fp16_digits(by_torch, [(0, 11, 100_000), (100_000, 900_000, 200_007)], 12345)
    assert all(torch.equal(one, by_torch) for one in results) and not torch.equal(by_torch, values)


def test_the_mean_of_many_roundings_is_the_value() -> None:
    values = torch.rand(512, generator=torch.Generator().manual_seed(1)) + 0.5
    total, rounds = torch.zeros(512, dtype=torch.float64), 400
    for seed in range(rounds):
        once = values.clone()
        round_to_fp16_digits(once, [(0, 0, 512)], seed * 0x632BE5AB % 2**31)
        assert torch.equal(once, once.half().float())
        total += once
    error = (total / rounds - values.double()) / 2.0**-10  # in units of the last digit of [1, 2)
    assert error.abs().max() < 5 * 0.5 / math.sqrt(rounds) and abs(error.mean()) < 0.01
    assert (values.half().float() - values).abs().max() > 0.4 * 2.0**-11, "vacuous: nothing was rounded"
