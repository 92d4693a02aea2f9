"""Our resolver against transformers' own one, with a stand-in for the deepspeed package that it asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def stand_in(folder: Path) -> Path:
    """A folder for sys.path in which `deepspeed` is an installed package with nothing in it."""
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text("")
    info = folder / "deepspeed-0.19.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    return folder


@pytest.mark.slow
def test_a_thousand_random_configurations_resolve_as_in_transformers(tmp_path: Path) -> None:
    """Each value and each mismatch is the same. The two differences are named and counted in their_auto.compare.

    - "auto" that no rule fills stays "auto" there, and is DeepSpeed's default here;
    - under auto_find_batch_size the file's batch size stands there, and the one that is tried here.
    Keys that are missing are left alone there; here the batch numbers and the clipping follow the arguments.
    """
    path = os.pathsep.join([str(stand_in(tmp_path)), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-m", "tests.harness.their_auto", "20", "1000"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["differences"] == []
    counts = report["counts"]
    assert counts["cases"] == 1000
    assert counts["filled"] > 5000 and counts["mismatches"] > 500 and counts["several at once"] > 100
    assert counts["left over"] > 300 and counts["auto_find_batch_size"] > 100
