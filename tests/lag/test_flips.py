"""Keys that say something of an accelerator change what a run does there; see tests/config/test_flips.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.flips import FLIPS, changes
from tests.harness.ranks import run_ranks
from tests.lag import device, group

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

HERE = [path for path, flip in FLIPS.items() if flip.device == "lag"]


def flip(folder: str) -> dict[str, list[str]]:
    device.enable()
    group.register()
    return {path: changes(path, FLIPS[path], Path(folder)) for path in HERE}


def test_a_flipped_key_changes_what_a_run_does(tmp_path: Path) -> None:
    device.build()
    assert len(HERE) == 4
    ranks = run_ranks(flip, 2, str(tmp_path), timeout=180)
    silent = [path for path in HERE if not any(rank[path] for rank in ranks)]
    assert not silent, f"no effect of {silent}"
