"""The memory that a process takes, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident (RssAnon)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon in /proc/self/status")
