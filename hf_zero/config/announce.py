"""The log lines of a configuration when training starts: every resolved value, and the file as it was given."""

from __future__ import annotations

import json
import logging

from hf_zero.config.resolved import ResolvedConfig

TITLE = "hf_zero configuration:"


def start_text(config: ResolvedConfig) -> str:
    """A line `key ..... value [origin]` for each resolved key, then `json = ...` with what the user gave."""
    lines = [f"  {line}" for line in config.describe().splitlines()]
    given = json.dumps(config.raw, indent=4, default=str)
    return "\n".join([f"{TITLE} ({config.source})", *lines, f"  json = {given}"])


def announce(config: ResolvedConfig, logger: logging.Logger) -> None:
    """Log notices as warnings, and the configuration at level INFO. `dump_state` shows it elsewhere, always."""
    for notice in config.notices:
        logger.warning(notice)
    if not config.dump_state:
        logger.info("%s", start_text(config))
