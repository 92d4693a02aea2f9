"""Compares the runs of train.py: rewards, and what a step takes. It writes report.md and its pictures.

python recipes/grpo/report.py outputs/grpo --output recipes/grpo
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.pictures import LINES, draw_curves, picture
from recipes.reports import report_parser, table

NAMES = {
    "ddp-policy": "DDP, TRL alone",
    "zero3-policy": "stage 3, layer by layer",
    "zero3_once-policy": "stage 3, gathered once",
    "zero3-copy": "stage 3, a copy generates",
}
PARTS = ("states to the host", "weights to the copy", "generate", "states from the host", "score and train")
HATCHES = ("..", "//", "", "..", "xx")

Lines = list[dict[str, Any]]


def load(folder: Path, model: str) -> dict[str, Lines]:
    """Name -> lines of the runs of a model."""
    paths = {name: folder / f"{model}-{stem}.jsonl" for stem, name in NAMES.items()}
    found = {name: path.read_text().splitlines() for name, path in paths.items() if path.exists()}
    if not found:
        raise SystemExit(f"{folder} has no file of train.py for the model {model}.")
    return {name: [json.loads(line) for line in lines] for name, lines in found.items()}


def seconds_of(lines: Lines) -> dict[str, float]:
    """The median seconds of each part of a step; the first step is left out, as it allocates."""
    return {part: median(line["seconds"].get(part, 0.0) for line in lines[1:]) for part in PARTS}


def draw_parts(runs: dict[str, Lines], path: Path) -> None:
    with picture(path, figsize=(8, 1.2 + 0.5 * len(runs))) as (axes,):
        left = dict.fromkeys(runs, 0.0)
        for part, look, hatch in zip(PARTS, LINES[1:], HATCHES, strict=False):
            widths = [seconds_of(lines)[part] for lines in runs.values()]
            axes.barh(list(runs), widths, left=list(left.values()), label=part, color=look["color"], hatch=hatch,
                      edgecolor="white", height=0.6)  # fmt: skip
            left = {name: start + width for (name, start), width in zip(left.items(), widths, strict=True)}
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a step (medians)")
        axes.legend(frameon=False, ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))


def row_of(name: str, lines: Lines) -> list[str]:
    rewards = [line["reward"] for line in lines]
    first, last = (sum(part) / len(part) for part in (rewards[:10], rewards[-10:]))
    return [name, f"{first:.3f}, {last:.3f}", *(f"{seconds:.3f}" for seconds in seconds_of(lines).values())]


def main() -> None:
    parser = report_parser(__doc__, "grpo")
    parser.add_argument("--model", default="small")
    args = parser.parse_args()
    runs = load(args.runs, args.model)
    rewards = {name: [line["reward"] for line in lines] for name, lines in runs.items()}
    title = "The reward: share of small letters, means of 10 steps"
    draw_curves(args.output / "rewards.svg", rewards, title=title, ylabel="reward", smoothed=10)
    draw_parts(runs, args.output / "parts.svg")
    head = ["run", "reward, first and last 10 steps", *(f"{part}, s" for part in PARTS)]
    rows = [row_of(name, lines) for name, lines in runs.items()]
    text = [HOW, "", *table(head, rows), "", "![Rewards](rewards.svg)", "", "![Parts of a step](parts.svg)"]
    (args.output / "report.md").write_text("\n".join(text) + "\n")
    print(args.output / "report.md")


HOW = """\
# GRPO at stage 3

[report.py](report.py) writes this file from those of [train.py](train.py); [README](README.md) has the commands, and
what these figures say. Seconds are medians of rank 0, on two quiet cores (2026-11-26)."""


if __name__ == "__main__":
    main()
