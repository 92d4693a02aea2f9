"""Writes hf_zero/config/SUPPORTED.md: key by key what hf_zero does with it, and what becomes of public configurations.

    python scripts/config_tables.py                   # after a change of a row in hf_zero/config
    python scripts/config_tables.py --corpus FOLDER   # tests/data/ds_configs: with the verdicts on its *.json files

Without --corpus the verdicts on public configurations stay as they are. A test checks that the keys are up to date.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hf_zero.config import ZeroConfig
from hf_zero.config.keys import NOTHING_TO_DO, OBEYED, OTHER_NAME, REFUSED, statuses
from hf_zero.errors import ConfigError

OUT = Path(__file__).resolve().parents[1] / "hf_zero" / "config" / "SUPPORTED.md"
INTRODUCTION = """# What hf_zero does with each key

Written by scripts/config_tables.py from the tables in this folder; do not edit. Every key of DeepSpeed 0.19.8 is known
(tests/golden/deepspeed_keys.json), under the names DeepSpeed has for it, deprecated ones with a warning. None is
silently ignored: it is obeyed, or taken because there is nothing to do, or refused by its name when it is on. What is
called obeyed changes something that a run does: a test flips each of these keys (tests/config/test_flips.py). Where it
needs a stage, a device or another key to have an effect, and is given without, a line says so, at the start and in
`hf-zero config check FILE`, which tells all problems too. A block in the third table is refused with all that is
inside; while it is off, only its switch is read. A key that is in no table is an error that names the nearest one.
"""
PUBLIC = "## Public configurations"
VERDICTS = {
    OBEYED: "obeyed",
    NOTHING_TO_DO: "taken; there is nothing to do for it",
    REFUSED: "refused when on, taken when off or empty",
    OTHER_NAME: "another name of a key, taken with a warning",
}


def key_tables() -> str:
    """One table for each verdict. A block that is refused as a whole stands in one row."""
    parts = [INTRODUCTION]
    for verdict, title in VERDICTS.items():
        found = [(path, status.reason) for path, status in statuses() if status.verdict == verdict]
        parts.append(f"## {title[0].upper()}{title[1:]} ({len(found)})\n\n{_table(verdict, found)}")
    return "\n".join(parts)


def _table(verdict: str, found: list[tuple[str, str]]) -> str:
    head = {OBEYED: "what it does", NOTHING_TO_DO: "why", REFUSED: "instead", OTHER_NAME: "name"}[verdict]
    lines = [f"| key | {head} |", "|---|---|", *(f"| `{path}` | {reason} |" for path, reason in found)]
    return "\n".join(lines) + "\n"


def corpus_table(folder: Path) -> str:
    """Return the verdict on each public configuration, on its own: no arguments, no model."""
    lines = [PUBLIC, "", "| file | verdict |", "|---|---|"]
    for path in sorted(folder.glob("*.json")):
        lines.append(f"| {path.stem.replace('__', '/')} | {verdict_on(path)} |")
    return "\n".join(lines) + "\n"


def verdict_on(path: Path) -> str:
    try:
        config = ZeroConfig.load(path, defer=True)
    except ConfigError as error:
        found = re.search(r"line \d+", str(error))
        return f"not JSON: a template ({found.group() if found else 'no line'})"
    named = dict.fromkeys(problem.text.partition(" = ")[0] for problem in config.check())
    if named:
        return f"refused: {', '.join(f'`{key}`' for key in named)}"
    return f"taken, stage {config.stage}"


def current() -> tuple[str, str]:
    """(the tables of keys, the table of public configurations) as they are written."""
    text = OUT.read_text(encoding="utf-8") if OUT.exists() else ""
    tables, mark, public = text.partition(PUBLIC)
    return tables, mark + public


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="folder of public configurations")
    args = parser.parse_args()
    public = current()[1] if args.corpus is None else corpus_table(args.corpus)
    OUT.write_text(f"{key_tables()}\n{public}", encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
