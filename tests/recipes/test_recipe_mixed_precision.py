"""The recipe that makes a step in fp16 by hand: its figures, and that the engine's step is the same."""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.mixed_precision.walk import SCALE, Findings, walk
from tests.harness.ranks import run_ranks

README = Path(__file__).resolve().parents[2] / "recipes" / "mixed_precision" / "README.md"


def walk_on_cpu() -> Findings:
    return walk(torch.device("cpu"))


def test_the_walk_shows_what_it_says() -> None:
    first, second = run_ranks(walk_on_cpu, 2)
    assert first == second
    assert (first.master_mb, first.both_mb, first.output_type) == (1.001953125, 1.5029296875, "torch.float16")
    assert first.without_gradients == 0.0
    assert first.never_unscaled > 1.0 > 0.1 > first.unscaled > 0.0
    assert abs(first.never_unscaled / first.unscaled / SCALE - 1) < 1e-2
    assert first.by_engine == 0.0
    assert "1.5029296875 MB" in README.read_text()
