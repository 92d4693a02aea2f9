"""Two thousand ranks end, in every way, on a machine that is busy; each with the status of its way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]


def test_two_thousand_ends() -> None:
    command = [sys.executable, "-m", "tests.distributed.process_ends", "1000", "--together", "4"]
    ended = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=7200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
