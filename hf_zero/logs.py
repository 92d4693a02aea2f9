"""Sets the level from which on hf_zero logs, and writes the log of a program that set up no logging.

Every logger of the package is below "hf_zero". A program's own handlers get all its records. Python would show a
program without handlers warnings only, so the package has a handler of its own that works where there is no other: it
writes to standard error. Lines that the configuration asks for (steps_per_print, wall_clock_breakdown, ...) go through
"hf_zero.lines" to standard output, where DeepSpeed writes them. The line that says that ZeRO is on goes through
"hf_zero.start"; `logging.getLogger("hf_zero.start").setLevel("WARNING")` silences it alone.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

VARIABLE = "HF_ZERO_VERBOSITY"
_LEVELS = ("debug", "info", "warning", "error", "critical")
_FORMAT = "[%(asctime)s] [%(levelname)s] [hf_zero] %(message)s"

_package = logging.getLogger("hf_zero")
_lines = logging.getLogger("hf_zero.lines")
_start = logging.getLogger("hf_zero.start")


class _WithoutOthers(logging.StreamHandler[Any]):
    """Writes the records that no handler of the program gets, to a stream as it is at the moment of writing."""

    def __init__(self, stream: str) -> None:
        logging.Handler.__init__(self)  # not StreamHandler's, which would keep today's stream
        self._stream = stream
        self.setFormatter(logging.Formatter(_FORMAT))

    @property
    def stream(self) -> Any:
        return getattr(sys, self._stream)

    def filter(self, record: logging.LogRecord) -> bool:
        is_line = record.name == _lines.name
        return is_line == (self._stream == "stdout") and not _reaches_others(logging.getLogger(record.name))


def _reaches_others(logger: logging.Logger) -> bool:
    """Whether a handler of the program gets the records of `logger`."""
    if not all(isinstance(one, _WithoutOthers) for one in logger.handlers):
        return True
    return logger.propagate and logger.parent is not None and _reaches_others(logger.parent)


def _set_up() -> None:
    _package.addHandler(_WithoutOthers("stderr"))
    _lines.addHandler(_WithoutOthers("stdout"))
    for logger in (_lines, _start):
        if logger.level == logging.NOTSET:  # the program may have silenced it before
            logger.setLevel(logging.INFO)
    if level := os.environ.get(VARIABLE):
        try:
            set_verbosity(level)
        except ValueError as error:
            _package.warning("%s=%s is ignored: %s", VARIABLE, level, error)


def set_verbosity(level: str | int) -> None:
    """Log from `level` on: "debug", "info", "warning" (as without a call), "error", "critical", or logging's number.

    At "info" the log has what was decided for the run, at "debug" every value of the configuration as well.

    Raises:
        ValueError: There is no such level.
    """
    if isinstance(level, str):
        if level.lower() not in _LEVELS:
            raise ValueError(f"there is no level {level!r}: expected one of {', '.join(_LEVELS)}")
        level = level.upper()
    _package.setLevel(level)
    _start.setLevel(max(_package.level, logging.INFO))


def set_verbosity_debug() -> None:
    """Log everything that hf_zero says, as `set_verbosity("debug")` does."""
    set_verbosity("debug")


def set_verbosity_info() -> None:
    """Log what was decided and done, as `set_verbosity("info")` does."""
    set_verbosity("info")


def set_verbosity_warning() -> None:
    """Log warnings and errors, as `set_verbosity("warning")` does."""
    set_verbosity("warning")


def set_verbosity_error() -> None:
    """Log errors only, as `set_verbosity("error")` does."""
    set_verbosity("error")


def log_line(line: str) -> None:
    """Show a line that the user asked for. The caller sees to it that one rank says it."""
    _lines.info("%s", line)


def log_start(line: str) -> None:
    """Show what everybody has to know of a run that starts. The caller sees to it that one rank says it."""
    _start.info("%s", line)


_set_up()
