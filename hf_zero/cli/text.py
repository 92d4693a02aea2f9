"""Words and tables for people, shared by the commands."""

from __future__ import annotations

from collections.abc import Iterable


def format_bytes(count: float) -> str:
    """Decimal units, three digits: "1.23 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_table(rows: Iterable[tuple[str, str]]) -> None:
    """Two columns: names, and what belongs to them."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"{name:<{width}}  {value}".rstrip())
