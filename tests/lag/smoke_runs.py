"""Runs the smoke scripts of scripts/ on the lag device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = ("--device", "lag", "--size", "tiny", "--brief", "--patience", "2")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in scripts/, on a host with two lag devices."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LAG_DEVICES": "2", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT / "scripts", env=env, capture_output=True, text=True, timeout=600, check=False
    )
