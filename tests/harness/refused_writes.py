"""Lets the n-th step of a write below a folder fail, in processes started for that: see `refusing_environment`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def refusing_environment(folder: Path) -> dict[str, str]:
    """The environment of a process in which writes can be refused; what that takes is built in `folder`."""
    library = folder / "refused_writes.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


class Refused:
    """The count says how often a step was refused."""

    count = 0


@contextlib.contextmanager
def refused_from(step: int, folder: str, error: int = errno.ENOSPC) -> Iterator[Refused]:
    """Inside, step `step` of the writes of this process below `folder` fails, and those behind it; -1: none."""
    library = ctypes.CDLL(None)
    found = Refused()
    library.refuse_writes(folder.encode(), step, error)
    try:
        yield found
    finally:
        found.count = library.writes_were_refused()
        library.refuse_writes(b"", -1, 0)
