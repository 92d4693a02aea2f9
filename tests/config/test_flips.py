"""Every key that is said to be obeyed changes something that a run does: no key is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero.config.keys import OBEYED, statuses
from tests.harness.flips import FLIPS, Flip, changes
from tests.harness.ranks import run_ranks

# Keys that say something of an accelerator are flipped on one: tests/lag/test_flips.py.
HERE = [path for path, flip in FLIPS.items() if flip.device == "cpu"]
_JOB = 12  # keys that one job of ranks flips


def flip(paths: list[str], folder: str) -> dict[str, list[str]]:
    return {path: changes(path, FLIPS[path], Path(folder)) for path in paths}


def flip_in_vain(folder: str) -> list[list[str]]:
    stage = {"zero_optimization.stage": 2}
    idle = {
        "zero_optimization.contiguous_gradients": Flip(False, stage),
        "zero_optimization.stage3_max_reuse_distance": Flip(10**6, stage),
        "aio.queue_depth": Flip(3, stage),
        "activation_checkpointing.number_checkpoints": Flip(3, stage),
    }
    return [changes(path, one, Path(folder)) for path, one in idle.items()]


def test_a_key_without_effect_would_be_found(tmp_path: Path) -> None:
    assert run_ranks(flip_in_vain, 2, str(tmp_path)) == [[[]] * 4] * 2


def test_every_obeyed_key_is_flipped() -> None:
    assert set(FLIPS) == {path for path, status in statuses() if status.verdict == OBEYED}
    assert len(HERE) > 170


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.nightly if first % (6 * _JOB) else [])
        for first in range(0, len(HERE), _JOB)
    ],
)
def test_a_flipped_key_changes_what_a_run_does(first: int, tmp_path: Path) -> None:
    ranks = run_ranks(flip, 2, HERE[first : first + _JOB], str(tmp_path), timeout=180)
    silent = [path for path in ranks[0] if not any(rank[path] for rank in ranks)]
    assert not silent, f"no effect of {silent}"
