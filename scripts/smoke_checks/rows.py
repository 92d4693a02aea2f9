"""The findings of a smoke run: one row for each thing, the table of them, and the section that RESULTS.md gets."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, FAILED, NOT_SEEN = "ok", "FAILED", "not seen"
_SHOWN_VARIABLES = ("CUDA", "NCCL", "PYTORCH", "TORCH_NCCL", "HIP", "ROCR", "OMP")


@dataclass(frozen=True)
class Row:
    what: str
    status: str  # OK, FAILED or NOT_SEEN
    detail: str

    @classmethod
    def judged(cls, what: str, good: bool, detail: str) -> Row:
        return cls(what, OK if good else FAILED, detail)


def write(path: Path, rows: Iterable[Row]) -> None:
    path.write_text(json.dumps([vars(row) for row in rows]))


def read(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())]


def summary(rows: Sequence[Row]) -> str:
    """One sentence: how much was seen, what failed, and what was not seen."""
    names = {status: [row.what for row in rows if row.status == status] for status in (OK, FAILED, NOT_SEEN)}
    parts = [f"{len(names[OK])} of {len(rows)} seen and right"]
    for status, words in ((FAILED, "failed"), (NOT_SEEN, "not seen")):
        if names[status]:
            parts.append(f"{len(names[status])} {words} ({'; '.join(names[status])})")
    return ", ".join(parts) + "."


def as_text(rows: Sequence[Row]) -> str:
    width = max((len(row.what) for row in rows), default=0)
    return "\n".join(f"{row.what:{width}}  {row.status:8}  {row.detail}" for row in rows)


def as_section(title: str, facts: dict[str, Any], command: str, rows: Sequence[Row]) -> str:
    """Markdown for RESULTS.md: the machine, the command, every row."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    head = f"\n## {title} on {facts['device']}\n\n{today}: {about}.\n\n```bash\n{command}\n```\n\n"
    lines = ["| what | result | detail |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.status} | {row.detail.replace('|', '/')} |" for row in rows]
    text = head + "\n".join(lines) + f"\n\n{summary(rows)}\n"
    return text.encode("ascii", "replace").decode()  # as all files here: errors of libraries may hold anything


def set_variables() -> str:
    """The variables of the environment that change what a GPU does."""
    names = sorted(name for name in os.environ if name.startswith(_SHOWN_VARIABLES))
    return " ".join(f"{name}={os.environ[name]}" for name in names) or "none"
