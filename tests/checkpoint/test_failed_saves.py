"""A save that fails, at whichever of its writes, leaves nothing and replaces nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint.replaced_files import drop, put_back, set_aside
from hf_zero.extras.launcher.node import free_port
from tests.checkpoint.failed_saves import KINDS, content
from tests.harness.refused_writes import refusing_environment

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PER_CHANGE = ("3 async",)
# Renames behind that of the manifest (of scripts, a description, latest), and syncs of folders, which may fail.
MOST_AFTER_THE_COMMIT = 16


def run(kind: str, folder: Path) -> dict[str, Any]:
    """The campaign of failed_saves.py."""
    target = folder / "saved"
    target.mkdir()
    environment = refusing_environment(folder)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "tests.checkpoint.failed_saves", kind, str(target)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outs[0][1][-4000:] + outs[1][1][-4000:]
    found: dict[str, Any] = json.loads(outs[0][0].splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in PER_CHANGE else pytest.mark.nightly) for kind in KINDS]
)
def test_every_write_of_a_save_may_fail(kind: str, tmp_path: Path) -> None:
    found = run(kind, tmp_path)
    seconds = found.pop("seconds")
    print(seconds, found)
    for what, count in found.items():
        assert not count["wrong"], (what, count)
        assert count["new"] <= MOST_AFTER_THE_COMMIT, (what, count)
    # Rank 0 writes its file, the manifest, scripts and latest; rank 1 its file, unless rank 0 holds everything.
    assert all(found[f"{tag}, rank 0"]["as before"] > 10 for tag in ("over", "new"))
    assert all((found[f"{tag}, rank 1"]["as before"] > 2) == (kind != "0") for tag in ("over", "new"))


@pytest.mark.parametrize("moment", ["moving", "saving", "over", "deleting"])
def test_the_next_save_finishes_what_a_killed_one_left(moment: str, tmp_path: Path) -> None:
    """A save into Trainer's folder repairs it: what was set aside comes back, or goes, whenever the process was
    killed.
    """
    folder = tmp_path / "checkpoint-1"
    (folder / "zero").mkdir(parents=True)
    for name in ("a", "zero/b", "mine"):
        (folder / name).write_text("old")
    before = content(str(folder))
    set_aside(folder)
    if moment == "moving":
        (folder / ".replaced").rename(folder / ".replaced.moving")
        (folder / ".replaced.moving" / "a").rename(folder / "a")
    else:
        (folder / "zero").mkdir()
        for name in ("a", "zero/b", "new"):
            (folder / name).write_text("new")
    if moment == "deleting":
        (folder / ".replaced").rename(folder / ".replaced.over")
    if moment == "over":
        drop(folder)
    set_aside(folder)  # of the next save
    put_back(folder)  # which fails
    if moment in ("moving", "saving"):
        assert content(str(folder)) == before
    else:
        assert {name: (folder / name).read_text() for name in ("a", "zero/b", "new", "mine")} == {
            **dict.fromkeys(("a", "zero/b", "new"), "new"),
            "mine": "old",
        }
    assert not [*folder.glob(".replaced*")]
