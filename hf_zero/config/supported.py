"""What becomes of each key in this release: the one answer to "is it obeyed, taken, or refused?".

The rows decide. scripts/config_tables.py writes the table for readers, SUPPORTED.md, from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_zero.config.keys import ROOT
from hf_zero.config.schema import Alias, Block, Entry

OBEYED = "obeyed"
NOTHING_TO_DO = "taken, nothing to do"
REFUSED = "refused when on"
OTHER_NAME = "another name"


@dataclass(frozen=True)
class Fate:
    """What happens with a key: one of the four words above, and why or what instead."""

    verdict: str
    reason: str = ""


def fate(row: Entry) -> Fate:
    """What happens with a key, or with all of a block."""
    if isinstance(row, Alias):
        return Fate(OTHER_NAME, f"of {row.target}")
    if row.no_effect:
        return Fate(NOTHING_TO_DO, row.no_effect)
    if isinstance(row, Block):
        return Fate(REFUSED, row.refused) if row.refused else Fate(OBEYED)
    if row.offered:
        return Fate(OBEYED, f"but for {', '.join(name for name in row.choices if name not in row.offered)}")
    return Fate(REFUSED, row.refused) if row.refused else Fate(OBEYED)


def keys(block: Block = ROOT, prefix: str = "") -> Iterator[tuple[str, Fate]]:
    """Every key with its fate, in the order of the tables. A refused block stands for all that is inside."""
    for name, row in block.keys.items():
        if not isinstance(row, Block) or row.refused or row.no_effect:
            yield f"{prefix}{name}", fate(row)
        if isinstance(row, Block) and not row.refused:
            yield from keys(row, f"{prefix}{name}.")
