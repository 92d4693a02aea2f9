"""Unmodified TRL trainers on two sharded ranks give the numbers of stock TRL in one process on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.at_night import all_at_night
from tests.harness.ranks import run_ranks
from tests.hf import trl_runs
from tests.hf.runs import Outcome

RUNS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dpo, handed-over reference": (trl_runs.dpo, ("model",)),
    "dpo, reference follows": (trl_runs.dpo, ("mixed",)),
    "dpo, loaded reference": (trl_runs.dpo, ("path",)),
    "dpo, adapters turned off": (trl_runs.dpo, ("lora",)),
    "dpo, precomputed reference": (trl_runs.dpo, ("precomputed",)),
    "reward": (trl_runs.reward, ()),
    "grpo": (trl_runs.grpo, (0.0,)),
    "grpo with a reference": (trl_runs.grpo, (0.2,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    all_at_night(RUNS, ("dpo, loaded reference", "dpo, adapters turned off", "reward", "grpo with a reference")),
)
def test_like_one_process(name: str, tmp_path: Path) -> None:
    function, own = RUNS[name]
    more = (trl_runs.base(str(tmp_path)), *own)
    want = run_ranks(function, 1, None, str(tmp_path / "one"), *more, timeout=120, init_group=False)[0]
    for stage in (3, 2):
        ranks = run_ranks(function, 2, stage, str(tmp_path / f"zero{stage}"), *more, timeout=120, init_group=False)
        assert ranks[0].norms == ranks[1].norms, f"{name}, stage {stage}: the ranks differ"
        assert_same(want, ranks[0], f"{name}, stage {stage}")


def assert_same(want: Outcome, got: Outcome, label: str, *, least: float = 0.05) -> None:
    """`least` is what the norm of a reference that trains must exceed."""
    assert len(set(want.norms)) == len(want.norms) >= 3 and min(want.norms) > least, "vacuous"
    # A loss of group-relative advantages is a sum around zero.
    assert got.losses == pytest.approx(want.losses, rel=2e-5, abs=1e-6), label
    assert got.norms == pytest.approx(want.norms, rel=2e-5), label
    assert got.evals == pytest.approx(want.evals, rel=2e-5), label
    assert got.weights.keys() == want.weights.keys(), label
    for key, value in want.weights.items():
        assert torch.isfinite(got.weights[key]).all(), f"{label}: {key}"
        worst = (got.weights[key] - value).abs().max().item()
        assert worst <= 2e-6 + 1e-5 * value.abs().max().item(), f"{label}: {key} differs by {worst}"
