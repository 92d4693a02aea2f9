"""The pieces that the reports of the recipes share: their arguments, and tables of Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def report_parser(description: str | None, recipe: str) -> argparse.ArgumentParser:
    """Return a parser of `runs`, the folder of the files to read, and of `--output`, the folder of the report."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = Path("outputs") / recipe
    parser.add_argument("runs", type=Path, nargs="?", default=runs, help=f"folder [{runs}]")
    output = Path(__file__).parent / recipe
    parser.add_argument("--output", type=Path, default=output, help=f"folder of report.md [recipes/{recipe}]")
    return parser


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(map(str, head))} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
