"""Lines that the configuration asked for (steps_per_print, wall_clock_breakdown, ...): shown without set-up.

They go through the logger "hf_zero.lines" to whatever handlers the program has. A program that set up no logging would
lose them, because Python shows warnings only; they are then written to standard output, where DeepSpeed writes them.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

_PARENT = "hf_zero"
_FORMAT = "[%(asctime)s] [%(levelname)s] [hf_zero] %(message)s"


class _WhereNobodyListens(logging.StreamHandler[Any]):
    """Standard output as it is at the moment of writing, for records that no other handler gets."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # not StreamHandler's, which would keep today's stream

    @property
    def stream(self) -> Any:
        return sys.stdout

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger(_PARENT).hasHandlers()


def _make_logger() -> logging.Logger:
    logger = logging.getLogger(f"{_PARENT}.lines")
    logger.setLevel(logging.INFO)
    handler = _WhereNobodyListens()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    return logger


_logger = _make_logger()


def say(line: str) -> None:
    """Show a line that the user asked for. The caller sees to it that one rank says it."""
    _logger.info("%s", line)
