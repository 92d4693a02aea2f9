"""Copies past the caches are copies, for every length and alignment, and write nothing beside."""

from __future__ import annotations

import random

import pytest
import torch

from hf_zero.native import host_copy
from hf_zero.native.host_copy import AUTO, copy_past_caches

_WAYS = [AUTO, 0, 1, 2]  # hz_simd; what this CPU lacks is its default


@pytest.mark.parametrize("simd", _WAYS)
def test_every_byte_arrives_and_no_other(simd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_FROM", 0)
    rng = random.Random(simd)
    for nbytes in (*range(300), *(rng.randrange(1 << 17) for _ in range(40))):
        start, place = rng.randrange(64), rng.randrange(64)
        data = torch.randint(0, 256, (start + nbytes,), dtype=torch.uint8)[start:]
        memory = torch.full((place + nbytes + 64,), 7, dtype=torch.uint8)
        copy_past_caches(memory[place : place + nbytes], data, simd)
        assert torch.equal(memory[place : place + nbytes], data), nbytes
        assert (memory[:place] == 7).all() and (memory[place + nbytes :] == 7).all(), "it wrote beside"


def test_large_tensors_of_all_types_are_copied_and_others_left_to_torch() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        source = torch.randint(0, 2, (1 << 21,)).to(dtype)
        target = torch.empty_like(source)
        copy_past_caches(target, source)
        assert torch.equal(target, source)
    across = torch.arange(1 << 21, dtype=torch.float32).view(1 << 10, 1 << 11).t()
    target = torch.empty(across.shape)
    copy_past_caches(target, across)
    assert torch.equal(target, across)
    halves = torch.empty(across.shape, dtype=torch.float64)
    copy_past_caches(halves, across)
    assert torch.equal(halves, across.double())


def test_it_is_the_native_copy_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(host_copy, "_function", lambda: lambda to, of, nbytes, simd: sizes.append(nbytes))
    copy_past_caches(torch.empty(1 << 20), torch.empty(1 << 20))
    copy_past_caches(torch.empty(1 << 10), torch.empty(1 << 10))
    assert sizes == [4 << 20]


def test_without_the_library_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "has_library", lambda: False)
    source, target = torch.randn(1 << 20), torch.empty(1 << 20)
    copy_past_caches(target, source)
    assert torch.equal(target, source)


def test_other_numbers_of_elements_are_refused() -> None:
    with pytest.raises(AssertionError, match="2097152 elements into 1048576"):
        copy_past_caches(torch.empty(1 << 20), torch.empty(1 << 21))
