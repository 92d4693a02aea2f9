"""What becomes of each key of the schema in this release: the one answer to "is it obeyed, taken, or refused?".

The rows of `refusals.py` decide. scripts/config_tables.py writes the table for readers, SUPPORTED.md, from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_zero.config.keys import ROOT
from hf_zero.config.refusals import NO_EFFECT, NOT_YET
from hf_zero.config.schema import Alias, Block, walk

OBEYED = "obeyed"
NOTHING_TO_DO = "taken, nothing to do"
REFUSED = "refused when on"
OTHER_NAME = "another name"


@dataclass(frozen=True)
class Fate:
    """What happens with a key: one of the four words above, and why or what instead."""

    verdict: str
    reason: str = ""
    decided_at: str = ""  # the key or block whose row decides: itself, a block around it, or the switch beside it


def fate(path: str) -> Fate:
    """What happens with the key or block at a dotted path of the schema."""
    refused = {row.path: row.remedy for row in NOT_YET if not row.values}
    partly = {row.path: f"but for {', '.join(row.values)}" for row in NOT_YET if row.values}
    row = dict(walk(ROOT)).get(path)
    if isinstance(row, Alias):
        return Fate(OTHER_NAME, f"of {row.target}", path)
    for place in _deciders(path):
        if place in refused:
            return Fate(REFUSED, refused[place], place)
        if place in NO_EFFECT:
            return Fate(NOTHING_TO_DO, NO_EFFECT[place], place)
    return Fate(OBEYED, partly.get(path, ""))


def _deciders(path: str) -> Iterator[str]:
    """The key itself, the switch of its block, then the block around, outwards."""
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield f"{path}.enabled"
        yield path


def keys() -> Iterator[tuple[str, Fate]]:
    """Every key of the schema with its fate, in the order of the tables. Blocks stand for what is inside them only."""
    for path, row in walk(ROOT):
        if not isinstance(row, Block) or row.free:
            yield path, fate(path)
