"""The compiled casts: the bits of torch's operations, however they are run, and nothing written beside."""

from __future__ import annotations

import random

import pytest
import torch

from hf_zero.errors import ConfigError
from hf_zero.fp8 import scaled_casts
from hf_zero.fp8.scaled_casts import FORMATS, SOURCES, Segments, amaxes, cast, cast_and_amax, uncast
from hf_zero.native.simd import SIMD_VARIABLE
from tests.harness.native_ways import assert_same_on_all_ways

NUMEL = (1 << 20) + 12_345  # past the caches, and enough for three threads
BESIDE = 5  # elements before and after, so that nothing starts at a line


def cut(numel: int, num_cuts: int) -> Segments:
    """Cut a memory at random: into segments of all lengths, empty ones too, with gaps between most of them."""
    rng = random.Random(num_cuts)
    edges = sorted(rng.randrange(numel + 1) for _ in range(2 * num_cuts))
    edges[5] = edges[4]
    edges[8] = edges[7]
    return Segments(list(zip(edges[::2], edges[1::2], strict=True)))


SEGMENTS = {"few": cut(NUMEL, 5), "many": cut(NUMEL, 5000), "small": cut(3000, 20), "one": Segments([(0, NUMEL)])}


def any_bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    nbytes = numel * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)


def any_scales(segments: Segments) -> torch.Tensor:
    return torch.ldexp(torch.rand(len(segments)) + 0.5, torch.randint(-20, 20, (len(segments),)))


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_casts_have_torchs_bits(
    name: str, source: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    segments = SEGMENTS[name]
    memory, scales = any_bits(segments.end + 20 + BESIDE, source)[BESIDE:], any_scales(segments)
    numel = memory.numel()

    def run() -> list[torch.Tensor]:
        out = torch.full((numel + 2 * BESIDE,), 2.0).to(dtype)
        found = cast_and_amax(memory, out[BESIDE:-BESIDE], segments, scales)
        only = torch.full((numel,), 2.0).to(dtype)
        cast(memory, only, segments, scales)
        return [out, found, only, amaxes(memory, segments)]

    assert_same_on_all_ways(scaled_casts, run, monkeypatch)
    out, found, *_ = run()
    assert torch.equal(out[-BESIDE:].float(), torch.full((BESIDE,), 2.0)), "written beside"
    assert found.isnan().any() or name != "few", "vacuous: no NaN was met"


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    """Return each finite number of a 16-bit type, and the same count of fp32 numbers of all exponents."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    if dtype == torch.float32:
        values = ((bits << 16) + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)).view(torch.float32)
    else:
        values = bits.to(torch.int16).view(dtype)
    return values[values.isfinite()]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_numbers_that_stay_normal_and_their_neighbours(
    source: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shorter ways are taken where all results are normal numbers, or zero: a neighbour on either side ends that."""
    torch.manual_seed(0)
    values, limits = every_finite(source), torch.finfo(dtype)
    sizes = values.double().abs()
    pieces, scales = [], []
    for scale in [2.0**power for power in range(-120, 121, 5)] + [1.5, -1.0, -0.25]:
        results = sizes * abs(scale)
        normal = values[(results >= limits.tiny) & (results <= limits.max)]
        if not len(normal):
            continue
        normal = normal[torch.randperm(len(normal))][:3000]
        subnormal, too_large = sizes[results < 0.7 * limits.tiny], sizes[results > limits.max]
        for neighbour in (sizes[:0], subnormal.sort()[0][-1:], too_large.sort()[0][:1]):
            pieces.append(torch.cat([normal, torch.zeros(100, dtype=source), neighbour.to(source)]))
            scales.append(scale)
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
    segments = Segments(list(zip([0, *ends], ends, strict=False)))
    memory, factors = torch.cat(pieces), torch.tensor(scales)

    def run() -> list[torch.Tensor]:
        out = torch.empty(len(memory), dtype=dtype)
        return [cast_and_amax(memory, out, segments, factors), out]

    assert len(segments) > 20, "vacuous: no piece had normal results"
    assert_same_on_all_ways(scaled_casts, run, monkeypatch)


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_uncasts_have_torchs_bits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    segments = SEGMENTS[name]
    memory, scales = any_bits(segments.end + 20 + BESIDE, dtype)[BESIDE:], any_scales(segments)
    before = torch.randn(memory.numel() + 2 * BESIDE)

    def run() -> list[torch.Tensor]:
        outs = [before.clone() for _ in range(3)]
        uncast(memory, outs[0][BESIDE:-BESIDE], segments, scales)
        uncast(memory, outs[1][BESIDE:-BESIDE], segments, scales, add=True)
        uncast(memory, outs[2][BESIDE:-BESIDE], segments, scales, add=True, factor=-0.3)
        return outs

    assert_same_on_all_ways(scaled_casts, run, monkeypatch)


def test_it_is_the_library_that_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    segments, ones = Segments([(0, 4)]), torch.ones(1)
    out = torch.empty(4, dtype=torch.float8_e4m3fn)
    for call in (
        lambda: amaxes(torch.ones(4), segments),
        lambda: cast(torch.ones(4), out, segments, ones),
        lambda: cast_and_amax(torch.ones(4), out, segments, ones),
        lambda: uncast(out, torch.ones(4), segments, ones),
    ):
        call()
        monkeypatch.setenv(SIMD_VARIABLE, "v5")
        with pytest.raises(ConfigError, match=f"{SIMD_VARIABLE}='v5'"):
            call()
        monkeypatch.delenv(SIMD_VARIABLE)
