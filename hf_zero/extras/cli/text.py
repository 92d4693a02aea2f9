"""Words, tables and numbers for people, shared by the commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def count(text: str) -> int:
    """An argument that is a whole number from 1, also as 1e8."""
    try:
        number = float(text)
        if number < 1 or number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1, such as 8 or 1e8") from None
    return int(number)


def format_bytes(count: float) -> str:
    """Decimal units, three digits: "1.23 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table(rows: Iterable[Iterable[str]], *, left: int = 1) -> list[str]:
    """Lines with aligned columns: the first `left` columns to the left, figures to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    aligned = [
        [cell.ljust(width) if place < left else cell.rjust(width) for cell in column]
        for place, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]


def print_table(rows: Iterable[tuple[str, str]]) -> None:
    """Two columns: names, and what belongs to them."""
    print("\n".join(table(rows, left=2)))
