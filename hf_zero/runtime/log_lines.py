"""Lines that are shown without set-up: those that the configuration asked for (steps_per_print,
wall_clock_breakdown, ...), and that ZeRO is on.

They go through the loggers "hf_zero.lines" and "hf_zero.start" to whatever handlers the program has. A program that
set up no logging would lose them, because Python shows warnings only; what was asked for is then written to standard
output, where DeepSpeed writes it, and what was not to standard error, away from the program's own output.
`logging.getLogger("hf_zero.start").setLevel("WARNING")` silences the latter.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

_PARENT = "hf_zero"
_FORMAT = "[%(asctime)s] [%(levelname)s] [hf_zero] %(message)s"


class _WhereNobodyListens(logging.StreamHandler[Any]):
    """Standard output or error as it is at the moment of writing, for records that no other handler gets."""

    def __init__(self, stream: str) -> None:
        logging.Handler.__init__(self)  # not StreamHandler's, which would keep today's stream
        self._stream = stream

    @property
    def stream(self) -> Any:
        return getattr(sys, self._stream)

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger(_PARENT).hasHandlers()


def _make_logger(name: str, stream: str) -> logging.Logger:
    logger = logging.getLogger(f"{_PARENT}.{name}")
    if logger.level == logging.NOTSET:  # the program may have silenced it before
        logger.setLevel(logging.INFO)
    handler = _WhereNobodyListens(stream)
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    return logger


_asked_for = _make_logger("lines", "stdout")
_start = _make_logger("start", "stderr")


def log_line(line: str) -> None:
    """Show a line that the user asked for. The caller sees to it that one rank says it."""
    _asked_for.info("%s", line)


def log_start(line: str) -> None:
    """Show what everybody has to know of a run that starts. The caller sees to it that one rank says it."""
    _start.info("%s", line)
