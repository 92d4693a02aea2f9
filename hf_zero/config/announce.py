"""The log text of a configuration when training starts: every resolved value, and the file as it was given."""

from __future__ import annotations

import json

from hf_zero.config.resolved import ResolvedConfig

TITLE = "hf_zero configuration:"


def start_text(config: ResolvedConfig) -> str:
    """A line `key ..... value [origin]` for each resolved key, then `json = ...` with what the user gave."""
    lines = [f"  {line}" for line in config.describe().splitlines()]
    given = json.dumps(config.public_raw, indent=4, default=str)
    return "\n".join([f"{TITLE} ({config.source})", *lines, f"  json = {given}"])
