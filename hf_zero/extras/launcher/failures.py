"""The error that a script ends with: its process keeps it in a file, and the launcher shows one of all ranks'.

torch's agent names the file (TORCHELASTIC_ERROR_FILE) and reads it: its form is the one of torch's ErrorHandler.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_zero.errors import ZeroError

# Python's own, and the one that puts the rank before each line.
_STOCK_HOOKS = ("sys", "torch.distributed.distributed_c10d")
# Frames of ours above the script's own.
_OURS = tuple(os.path.join("launcher", name) for name in ("failures.py", "script.py", "worker.py"))


@contextlib.contextmanager
def recorded(*, print_too: bool) -> Iterator[None]:
    """Keep what the block raises in the agent's file, and end the process with status 1; SystemExit goes on.

    A script that has a hook of its own for errors gets the exception itself.
    """
    try:
        yield
    except Exception as error:
        text = _traceback(error)
        _write(os.environ["TORCHELASTIC_ERROR_FILE"], error, text)
        if sys.excepthook.__module__ not in _STOCK_HOOKS:
            raise
        if print_too:
            sys.stderr.write(text)
        sys.last_value = error  # what ends with Python asks for it, as after an error that Python shows
        sys.exit(1)


def _traceback(error: BaseException) -> str:
    shown = traceback.TracebackException.from_exception(error)
    own = [frame for frame in shown.stack if not frame.filename.endswith(("<frozen runpy>", *_OURS))]
    shown.stack = traceback.StackSummary.from_list(own)
    return "".join(shown.format())


def _write(path: str, error: BaseException, text: str) -> None:
    details = {
        "py_callstack": text,
        "timestamp": str(int(time.time())),
        "at": time.time(),
        "is_message": isinstance(error, ZeroError),  # it says what to do: the traceback adds nothing
    }
    with open(path, "w") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}, file)


def show_failure(failures: Mapping[int, Any], arguments: Sequence[str], *, pass_local_rank: bool) -> str:
    """Show the error that came first on this host, and return a line on it that names the file with all of them.

    Args:
        failures: Rank -> torch's ProcessFailure.
        arguments: What the line gave to the script.
        pass_local_rank: The script was given --local_rank too.
    """
    kept = {rank: one.message for rank, one in sorted(failures.items()) if isinstance(one.message, dict)}
    # A rank that exits or is killed leaves no error, and the others' follow from its end; the agent ends these by
    # SIGTERM.
    silent = {r: one for r, one in failures.items() if r not in kept and one.exitcode != -signal.SIGTERM}
    first = min(silent or kept or failures, key=lambda rank: _time(failures[rank]))
    failure, hint = failures[first], ""
    if first in kept:
        text, details = kept[first]["message"], kept[first]["extraInfo"]
        sys.stderr.write(f"{(text if details.get('is_message') else details['py_callstack']).rstrip()}\n")
        how = text.partition(":")[0]
    elif failure.exitcode < 0:
        how = f"killed by {failure.signal_name()}"
    else:
        how = f"exit status {failure.exitcode}"
        hint = _usage_hint(arguments, pass_local_rank) if failure.exitcode == 2 else ""
    if kept:
        hint = f"Tracebacks of rank(s) {', '.join(map(str, kept))}: {_file_of(kept)}"
    line = f"rank {first} failed on {socket.gethostname()} ({how}); the other processes were ended"
    return f"{line}. {hint}" if hint else line


def _usage_hint(arguments: Sequence[str], pass_local_rank: bool) -> str:
    """Say what may be wrong where argparse ends a script, with status 2."""
    if pass_local_rank:
        return "It got --local_rank=K: if it does not take that, write --no_local_rank before the script"
    if any(one.partition("=")[0] == "--zero" for one in arguments):
        return "If it has no option --zero, write --module hf_zero.run --zero FILE before the script"
    return "It got no --local_rank=K: if it needs that, write --pass_local_rank before the script"


def _time(failure: Any) -> float:
    message = failure.message
    return float(message["extraInfo"].get("at", failure.timestamp) if isinstance(message, dict) else failure.timestamp)


def _file_of(kept: Mapping[int, Mapping[str, Any]]) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="hf_zero-errors-", suffix=".log", delete=False) as file:
        for rank, message in kept.items():
            file.write(f"rank {rank}:\n{message['extraInfo']['py_callstack']}\n")
    return file.name
