"""Ranks that are killed at every named point of a save, and 50 saves in the background.

After each kill the newest published checkpoint must load, and the next save into the same folder must leave nothing of
the broken one behind. The points are in tests/harness/save_faults.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero.checkpoint.format import zero_folder
from hf_zero.checkpoint.reader import open_checkpoint
from tests.checkpoint import test_background_saves as saves
from tests.checkpoint import test_node_folders as nodes
from tests.harness.ranks import RankFailure, run_ranks, try_ranks
from tests.harness.save_faults import POINTS

VICTIMS = ([0], [1], [0, 1])
SAVES = 50


@pytest.mark.parametrize("victims", VICTIMS, ids=str)
@pytest.mark.parametrize("point", POINTS)
def test_a_node_that_is_killed_leaves_checkpoints_that_load(point: str, victims: list[int], tmp_path: Path) -> None:
    ended = try_ranks((nodes.save_and_be_killed, (str(tmp_path), point, victims), {}), 2, timeout=60)
    assert not ended.hang, ended.hang
    after = try_ranks((nodes.newest_that_loads, (str(tmp_path),), {}), 2, timeout=60).outcomes
    assert not any(isinstance(one, RankFailure) for one in after), after
    assert {(path, step) for path, step, _ in after} < {(f"{nodes.LOCAL}/one", 1), (f"{nodes.LOCAL}/two", 2)}
    left = [name for _, _, names in after for name in names]
    assert len(left) == 4, left


@pytest.mark.parametrize("in_background", [True, False], ids=["in the background", "in the call"])
@pytest.mark.parametrize("victims", VICTIMS, ids=str)
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_is_killed_leaves_checkpoints_that_load(
    point: str, victims: list[int], in_background: bool, tmp_path: Path
) -> None:
    ended = try_ranks((saves.save_and_be_killed, (str(tmp_path), point, victims, in_background), {}), 2, timeout=60)
    assert not ended.hang, ended.hang
    after = try_ranks((saves.newest_that_loads, (str(tmp_path),), {}), 1, timeout=60).outcomes[0]
    assert after in ((f"{tmp_path}/one", 1), (f"{tmp_path}/two", 2)), after
    with open_checkpoint(tmp_path / "two") as reader:
        reader.verify()
        left = len([*zero_folder(tmp_path / "two").iterdir()]) - len(reader.manifest.files) - 1
    assert left == 0, f"{left} files left behind"


def test_saves_in_the_background_change_no_loss_and_keep_no_memory(tmp_path: Path) -> None:
    plain, busy = run_ranks(saves.many_saves_beside_none, 2, str(tmp_path), SAVES, timeout=300)[0]
    assert plain["losses"] == busy["losses"]
    growth = (busy["memory"][-1] - busy["memory"][SAVES // 5]) / 1024
    assert growth < 8, f"peak memory grew by {growth:.1f} MiB after the first fifth"
