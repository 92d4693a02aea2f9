"""Becomes a training script in this process, as `python script.py` or `python -m module` would."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

# argparse and click name an option so; dataclasses of HfArgumentParser and the functions of typer have a field.
_LOCAL_RANK = re.compile(r"""["']--local[-_]rank\b|\blocal_rank\s*:\s*["']?(?:int|Optional)\b""")


def missing_script(script: str, *, is_module: bool) -> str:
    """Return what is wrong with the name of the script; "" for nothing."""
    return "" if is_module or os.path.isfile(script) else f"there is no script {script!r}"


def takes_local_rank(script: str, kind: str) -> bool:
    """Whether the text of a script, or of a module below the working directory, declares an option --local_rank."""
    path = Path(*script.split(".")).with_suffix(".py") if kind == "module" else Path(script)
    if kind == "module" and not path.is_file():
        path = path.with_suffix("") / "__main__.py"
    return path.suffix == ".py" and path.is_file() and bool(_LOCAL_RANK.search(path.read_text(errors="replace")))


def become(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run it as `__main__`, with its arguments in sys.argv; returns at its end."""
    sys.argv = [script, *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        # `python script.py` does the same: modules beside the script can be imported.
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")
