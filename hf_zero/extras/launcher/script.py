"""Becomes a training script in this process, as `python script.py` or `python -m module` would."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence


def missing_script(script: str, *, is_module: bool) -> str:
    """Return what is wrong with the name of the script; "" for nothing."""
    return "" if is_module or os.path.isfile(script) else f"there is no script {script!r}"


def become(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run it as `__main__`, with its arguments in sys.argv; returns at its end."""
    sys.argv = [script, *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        # `python script.py` does the same: modules beside the script can be imported.
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")
