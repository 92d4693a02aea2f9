"""Damage to every file of a checkpoint folder, one bit or one cut at a time, is named.

Bits are looked for by `hf-zero inspect --verify`, cuts by what a Trainer does before it resumes.
"""

from __future__ import annotations

from pathlib import Path

from tests.harness.damage import unseen_cuts, unseen_flips, verified
from tests.harness.ranks import run_ranks
from tests.hf.test_damaged_files import load_says, save_over

FLIPS = 200


def test_every_flipped_bit_and_every_cut_is_named(tmp_path: Path) -> None:
    run_ranks(save_over, 2, str(tmp_path), init_group=False)
    folder = tmp_path / "checkpoint-2"
    assert not verified(folder), "vacuous: the folder is damaged as it is"
    assert not unseen_flips(folder, FLIPS, 0)
    assert not unseen_cuts(folder, 0, lambda: load_says(folder))
