"""Scaled casts give the nearest number of the narrow type, by whichever path and on however many threads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hf_zero.fp8 import scaled_casts
from hf_zero.fp8.scaled_casts import (
    FORMATS,
    Segments,
    amaxes,
    cast,
    cast_and_amax,
    largest,
    scales_for,
    uncast,
)
from hf_zero.native.library import library
from hf_zero.native.simd import SIMD_LEVELS, SIMD_VARIABLE

E4M3, E5M2, F16 = FORMATS
SOURCES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (1.0, 2.0**-7, 2.0**9, 0.3, 3.7)
NAN, INF = float("nan"), float("inf")


class Format:
    """A narrow type by its definition: 1 sign bit, exponent bits, mantissa bits; subnormals at exponent 0."""

    def __init__(self, exponent_bits: int, mantissa_bits: int, nan: int, inf: int | None) -> None:
        self.nan, self.inf = nan, inf
        self.sign = 1 << (exponent_bits + mantissa_bits)
        bias = 2 ** (exponent_bits - 1) - 1
        exponents, mantissas = np.divmod(np.arange(self.sign), 1 << mantissa_bits)
        steps = np.ldexp(1.0, np.maximum(exponents, 1) - bias - mantissa_bits)
        every = (np.where(exponents > 0, 1 << mantissa_bits, 0) + mantissas) * steps
        # The finite ones come first, in ascending order: a number's index is its code.
        self.values = every[: nan if inf is None else inf]

    def decoded(self) -> np.ndarray:
        """Return what each code stands for, as float64."""
        half = np.full(self.sign, np.nan)
        half[: len(self.values)] = self.values
        if self.inf is not None:
            half[self.inf] = np.inf
        return np.concatenate([half, -half])

    def nearest(self, numbers: np.ndarray) -> np.ndarray:
        """Return the codes of float64 numbers, by a search in the table."""
        magnitudes = np.minimum(np.abs(numbers), self.values[-1])
        above = np.clip(np.searchsorted(self.values, np.nan_to_num(magnitudes)), 1, None)
        to_below, to_above = magnitudes - self.values[above - 1], self.values[above] - magnitudes
        is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
        codes = np.where(is_above, above, above - 1)
        codes = np.where(np.isinf(numbers) & (self.inf is not None), self.inf or 0, codes)
        codes = codes | np.where(np.signbit(numbers), self.sign, 0)
        no_number = np.isnan(numbers) | (np.isinf(numbers) & (self.inf is None))
        return np.where(no_number, self.nan, codes)


DEFINITIONS = {E4M3: Format(4, 3, 0x7F, None), E5M2: Format(5, 2, 0x7F, 0x7C), F16: Format(5, 10, 0x7E00, 0x7C00)}


@pytest.fixture(params=["torch", *SIMD_LEVELS[: library().hz_simd_level() + 1]], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test by torch's operations, and by the native library at each level."""
    if request.param == "torch":
        monkeypatch.setattr(scaled_casts, "has_library", lambda: False)
    else:
        monkeypatch.setenv(SIMD_VARIABLE, request.param)


def codes_of(narrow: torch.Tensor) -> np.ndarray:
    return narrow.view(torch.uint8 if narrow.element_size() == 1 else torch.uint16).numpy().astype(np.int64)


def from_codes(codes: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(codes.astype(np.uint8 if dtype.itemsize == 1 else np.uint16)).view(dtype)


def every_number(dtype: torch.dtype) -> torch.Tensor:
    return from_codes(np.arange(1 << 16), dtype)


def cast_whole(source: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    out = torch.empty(source.numel(), dtype=dtype)
    cast(source, out, Segments([(0, source.numel())]), torch.tensor([scale]))
    return out


def products(source: torch.Tensor, scale: float) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return (source.float().numpy() * np.float32(scale)).astype(np.float64)


def assert_nearest(source: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    wanted, got = DEFINITIONS[dtype].nearest(products(source, scale)), codes_of(cast_whole(source, dtype, scale))
    wrong = np.flatnonzero(wanted != got)
    assert not len(wrong), (len(wrong), source[wrong[0]], wanted[wrong[0]], got[wrong[0]])


def test_the_definitions_are_those_of_the_types() -> None:
    assert DEFINITIONS[E4M3].values[-1] == 448 == largest(E4M3) and DEFINITIONS[E4M3].values[1] == 2**-9
    assert DEFINITIONS[E5M2].values[-1] == 57344 == largest(E5M2) and DEFINITIONS[E5M2].values[1] == 2**-16
    assert DEFINITIONS[F16].values[-1] == 65504 == largest(F16) and DEFINITIONS[F16].values[1] == 2**-24


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_becomes_the_nearest(source: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    assert_nearest(every_number(source), dtype, scale)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_ties_and_what_lies_beside_them_are_rounded_once(dtype: torch.dtype) -> None:
    """A way through fp16 would round the neighbours of a tie to the tie, and then to even."""
    values = DEFINITIONS[dtype].values
    ties = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    ties = np.append(ties, np.float32(values[-1] + (values[-1] - values[-2]) / 2))
    beside = [np.nextafter(ties, np.float32(towards)) for towards in (0, np.inf)]
    numbers = torch.from_numpy(np.concatenate([ties, *beside]))
    assert_nearest(torch.cat([numbers, -numbers]), dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_random_bits_of_fp32_become_the_nearest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (50_000,), dtype=torch.int32).view(torch.float32)
    inside = torch.randn(50_000) * 2.0 ** torch.randint(-30, 20, (50_000,))
    for scale in SCALES:
        assert_nearest(torch.cat([anything, inside]), dtype, scale)


def test_what_is_no_number_and_what_is_too_large() -> None:
    source = torch.tensor([0.0, -0.0, NAN, -NAN, INF, -INF, 3e38, -3e38, 1e-45, -1e-45, 449.0])
    assert codes_of(cast_whole(source, E4M3)).tolist() == [0, 0x80, *[0x7F] * 4, 0x7E, 0xFE, 0, 0x80, 0x7E]
    assert codes_of(cast_whole(source, E5M2)).tolist()[2:8] == [0x7F, 0x7F, 0x7C, 0xFC, 0x7B, 0xFB]
    assert codes_of(cast_whole(source, F16)).tolist()[2:8] == [0x7E00, 0x7E00, 0x7C00, 0xFC00, 0x7BFF, 0xFBFF]
    # An overflow of the product in fp32 is an overflow too.
    assert codes_of(cast_whole(source[6:8], E5M2, 4.0)).tolist() == [0x7C, 0xFC]


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_each_segment_has_its_scale_and_padding_becomes_zero(source: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    memory = torch.randn(1000).to(source)
    segments = Segments([(3, 3), (3, 100), (100, 101), (150, 150), (170, 900)])
    scales = torch.tensor([5.0, 2.0, 0.5, 9.0, 16.0])
    out = torch.full((1000,), 1.0).to(dtype)
    largest_of_each = cast_and_amax(memory, out, segments, scales)
    rest = np.ones(1000, dtype=bool)
    for (start, end), scale, largest_one in zip(segments, scales.tolist(), largest_of_each.tolist(), strict=True):
        wanted = DEFINITIONS[dtype].nearest(products(memory[start:end], scale))
        assert codes_of(out[start:end]).tolist() == wanted.tolist()
        assert largest_one == max(map(abs, memory[start:end].tolist()), default=0)
        rest[start:end] = False
    assert rest.sum() == 172 and not codes_of(out)[rest].any()
    assert amaxes(memory, segments).tolist() == largest_of_each.tolist()


def test_nothing_at_all() -> None:
    for segments in (Segments([]), Segments([(0, 0)])):
        scales = torch.ones(len(segments))
        for numel in (0, 5):
            out = torch.ones(numel).to(E4M3)
            assert cast_and_amax(torch.ones(numel), out, segments, scales).tolist() == [0.0] * len(segments)
            assert not codes_of(out).any()
            uncast(out, torch.ones(numel), segments, scales)


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_amaxes_hide_no_overflow(source: torch.dtype) -> None:
    rows: list[list[float]] = [[1, -INF, 3], [NAN, INF], [INF, NAN, 1], [-NAN], [-4, 3], [-0.0, 0.0]]
    memory = torch.tensor([number for row in rows for number in row], dtype=source)
    edges = list(itertools.accumulate(map(len, rows), initial=0))
    segments = Segments(list(itertools.pairwise(edges)))
    out = torch.empty(memory.numel(), dtype=E4M3)
    for found in (amaxes(memory, segments), cast_and_amax(memory, out, segments, torch.ones(len(rows)))):
        assert found.dtype == torch.float32 and str(found.tolist()) == "[inf, nan, nan, nan, 4.0, 0.0]"


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_uncast_gives_every_number_back(dtype: torch.dtype) -> None:
    decoded = DEFINITIONS[dtype].decoded()
    source = from_codes(np.arange(len(decoded)), dtype)
    segments = Segments([(0, len(decoded) - 7)])
    before = torch.linspace(-3, 3, len(decoded))
    for scale, factor, add in itertools.product(SCALES, (1.0, 0.7), (False, True)):
        out = before.clone()
        uncast(source, out, segments, torch.tensor([scale]), add=add, factor=factor)
        # Each step in fp32, as the definition says; numpy rounds it the same way.
        wanted = decoded.astype(np.float32) * (np.float32(1) / np.float32(scale)) * np.float32(factor)
        wanted = before.numpy() + wanted if add else wanted
        wanted[-7:] = before.numpy()[-7:]
        np.testing.assert_array_equal(out.numpy(), wanted)


def test_scales_are_the_largest_powers_of_two() -> None:
    powers = torch.ldexp(torch.ones(276), torch.arange(-149, 127))
    up, down = powers.nextafter(torch.tensor(INF)), powers.nextafter(torch.tensor(0.0))
    amax = torch.cat([powers, up, down, torch.tensor([448.0, 449.0, 57344.0, 57345.0, 65504.0, 3.4028235e38, 1e-45])])
    amax = torch.cat([amax[amax > 0], torch.rand(1000) * 1000])
    for dtype in FORMATS:
        scales = scales_for(amax, dtype).double()
        assert (torch.frexp(scales)[0] == 0.5).all(), "a power of two"
        assert (amax.double() * scales <= largest(dtype)).all()
        at_limit = scales == 2.0**126
        assert (at_limit | (amax.double() * scales * 2 > largest(dtype))).all()
        assert at_limit.any() and not at_limit.all() and (scales >= 2.0**-126).all()
    assert scales_for(torch.tensor([0.0, INF, NAN]), E4M3).tolist() == [1.0, 1.0, 1.0]
    assert scales_for(torch.empty(0), E4M3).tolist() == []


def test_a_cast_with_these_scales_saturates_nothing() -> None:
    torch.manual_seed(0)
    source = torch.randn(10_000) * 1e-5
    segments = Segments([(0, 5000), (5000, 10_000)])
    for dtype in FORMATS:
        out, back = torch.empty(10_000, dtype=dtype), torch.zeros(10_000)
        scales = scales_for(amaxes(source, segments), dtype)
        cast(source, out, segments, scales)
        uncast(out, back, segments, scales)
        top = out.float().abs().max()
        assert largest(dtype) / 2 < top <= largest(dtype)
        step = {E4M3: 2**-4, E5M2: 2**-3, F16: 2**-11}[dtype]
        large = source.abs() > 1e-6
        assert ((back - source).abs() <= step * source.abs())[large].all()


def test_mistakes_are_refused() -> None:
    ones, segments = torch.ones(8), Segments([(0, 8)])
    narrow, scales = ones.to(E4M3), torch.ones(1)
    with pytest.raises(AssertionError, match="must ascend"):
        Segments([(4, 8), (0, 4)])
    with pytest.raises(AssertionError, match="ends at 8, the memory at 7"):
        amaxes(ones[:7], segments)
    with pytest.raises(AssertionError, match=r"1-D contiguous memory of .* is wanted"):
        cast(ones.double(), narrow, segments, scales)
    with pytest.raises(AssertionError, match="8 elements into 9"):
        cast(ones, torch.ones(9).to(E4M3), segments, scales)
    with pytest.raises(AssertionError, match=r"1 segments, and scales of torch.float32 \[2\]"):
        uncast(narrow, ones, segments, torch.ones(2))
    with pytest.raises(AssertionError, match="three devices"):
        uncast(narrow, ones, segments, scales.to("meta"))
