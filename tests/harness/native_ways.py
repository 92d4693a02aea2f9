"""Comparison of the native library's results with those of torch's operations, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from hf_zero.native.library import library
from hf_zero.native.machine import THREADS_VARIABLE
from hf_zero.native.simd import SIMD_LEVELS, SIMD_VARIABLE


def assert_same(first: torch.Tensor, second: torch.Tensor) -> None:
    """Compare the bits, but of fp32 NaN, which have many."""
    if first.dtype == torch.float32:
        assert torch.equal(first.isnan(), second.isnan())
        first, second = first.nan_to_num(7.0), second.nan_to_num(7.0)
    assert torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def assert_same_on_all_ways(
    module: ModuleType, run: Callable[[], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare what `run` returns by torch's operations with the library's, at every instruction set and some threads.

    Args:
        module: The one that asks `has_library` where to compute.
    """
    with monkeypatch.context() as patch:
        patch.setattr(module, "has_library", lambda: False)
        wanted = run()
    for level in SIMD_LEVELS[: library().hz_simd_level() + 1]:
        monkeypatch.setenv(SIMD_VARIABLE, level)
        for threads in "123":
            monkeypatch.setenv(THREADS_VARIABLE, threads)
            for ours, theirs in zip(run(), wanted, strict=True):
                assert_same(ours, theirs)
