"""A hundred faults of one rank of three: errors on every rank, and restarts that end in the right run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fault_campaign.py"


def test_a_hundred_faults() -> None:
    command = [sys.executable, str(_SCRIPT), "--cases", "100"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
