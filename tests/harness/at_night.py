"""Parameters of tests of which a change runs a part: `scripts/test.sh --nightly` runs the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def all_at_night(values: Iterable[Any], by_day: Collection[Any]) -> list[Any]:
    """Return parameters of which those that are not in `by_day` are marked nightly. A tuple has one for each name."""
    values = list(values)
    assert all(value in values for value in by_day), by_day
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [[] if value in by_day else [pytest.mark.nightly] for value in values]
    return [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]
