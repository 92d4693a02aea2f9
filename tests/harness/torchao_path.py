"""Puts torchao on the path of a process that trains in FP8; scripts/setup.sh says why it is not there for all."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "torchao"


def use_torchao() -> None:
    """Let this process import torchao from now on."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
