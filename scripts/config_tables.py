"""Writes hf_zero/config/SUPPORTED.md: key by key what hf_zero does with it, and what becomes of public configurations.

    python scripts/config_tables.py                   # after a change of hf_zero/config/refusals.py or the keys
    python scripts/config_tables.py --corpus FOLDER   # tests/data/ds_configs: with the verdicts on its *.json files

Without --corpus the verdicts on public configurations stay as they are. A test checks that the keys are up to date.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hf_zero.config import ZeroConfig
from hf_zero.config.supported import NOTHING_TO_DO, OBEYED, OTHER_NAME, REFUSED, keys
from hf_zero.errors import ConfigError

OUT = Path(__file__).resolve().parents[1] / "hf_zero" / "config" / "SUPPORTED.md"
INTRODUCTION = """# What hf_zero does with each key

Written by scripts/config_tables.py from the tables in this folder; do not edit. Every key of DeepSpeed 0.19.8 is known
(tests/golden/deepspeed_keys.json), under the names DeepSpeed has for it, deprecated ones with a warning. None is
silently ignored: it is obeyed, or taken because there is nothing to do, or refused by its name when it is on. A key
that is not in these tables is an error that names the nearest one. `hf-zero config check FILE` tells all problems.
"""
PUBLIC = "## Public configurations"
VERDICTS = {
    OBEYED: "obeyed",
    NOTHING_TO_DO: "taken; there is nothing to do for it",
    REFUSED: "refused when on, taken when off or empty",
    OTHER_NAME: "another name of a key, taken with a warning",
}


def key_tables() -> str:
    """One table for each verdict. Keys of a block that is refused as a whole stand in one row."""
    found = list(keys())
    parts = [INTRODUCTION]
    for verdict, title in VERDICTS.items():
        rows: dict[tuple[str, str], list[str]] = {}
        for path, fate in found:
            if fate.verdict == verdict:
                inside = fate.decided_at if fate.decided_at not in ("", path) else ""
                rows.setdefault((inside, fate.reason if inside else f"{path}\0{fate.reason}"), []).append(path)
        count = sum(fate.verdict == verdict for _, fate in found)
        parts.append(f"## {title[0].upper()}{title[1:]} ({count})\n\n{_table(verdict, rows)}")
    return "\n".join(parts)


def _table(verdict: str, rows: dict[tuple[str, str], list[str]]) -> str:
    if verdict == OBEYED:
        named = [(path, key[1].rpartition("\0")[2]) for key, paths in rows.items() for path in paths]
        return "\n".join(f"- `{path}`{f', {reason}' if reason else ''}" for path, reason in named) + "\n"
    head = {NOTHING_TO_DO: "why", REFUSED: "instead", OTHER_NAME: "name"}[verdict]
    lines = [f"| key | {head} |", "|---|---|"]
    for (inside, reason), paths in rows.items():
        text = reason.rpartition("\0")[2]
        name = f"`{paths[0]}`"
        if inside:
            block = inside.removesuffix(".enabled")
            names = ", ".join(path.removeprefix(f"{block}.") for path in paths)
            name = f"with `{inside}`: {names}"
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines) + "\n"


def corpus_table(folder: Path) -> str:
    """What becomes of each public configuration, on its own: no arguments, no model."""
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
