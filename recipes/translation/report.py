"""Compares the runs of the README: losses step by step, scores, translations. Writes report.md and a picture.

python recipes/translation/report.py outputs/translation
"""

from __future__ import annotations

import csv
import html
import json
import sys
from collections.abc import Iterable
from pathlib import Path

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from recipes.pictures import LINES, picture, smooth
from recipes.reports import report_parser, table

REFERENCE = "plain"
RUNS = {
    REFERENCE: "transformers alone, one process",
    "plain-halves": "the same, a batch in two halves",
    "zero2-one": "stage 2, offload, one process",
    "zero0": "stage 0, two processes",
    "zero2": "stage 2, offload, two processes",
    "zero3": "stage 3, offload, two processes",
}
TRAINED = "trained"
EARLY = 15  # Steps in which rounding has not grown yet.
PARTS = {"learnt": "trained on", "held_out": "held out"}


def losses_of(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def draw(runs: dict[str, list[float]], path: Path) -> None:
    """Draw the curves, and below how far each one is from that of the reference."""
    with picture(path, 2, figsize=(8, 5.6), sharex=True, height_ratios=(3, 2)) as (top, bottom):
        for look, (name, losses) in zip(LINES, runs.items(), strict=False):
            steps = range(1, len(losses) + 1)
            top.plot(steps, smooth(losses, 5), label=RUNS[name], **look)
            if name != REFERENCE:
                distances = np.abs(np.subtract(losses, runs[REFERENCE])).tolist()
                bottom.plot(steps, np.maximum(smooth(distances, 5), 1e-7), **look)
        top.set_title("A T5 learns to translate: means of the last 5 steps", loc="left", fontsize=11)
        top.set_ylabel("loss")
        top.legend(frameon=False)
        bottom.set_yscale("log")
        bottom.set_ylabel("from the first")
        bottom.set_xlabel("step")


def losses_table(runs: dict[str, list[float]]) -> Iterable[str]:
    rows = []
    for name, losses in runs.items():
        distances = np.abs(np.subtract(losses, runs[REFERENCE]))
        largest = [f"{distances[:EARLY].max():.0e}", f"{distances.max():.0e}"]
        rows.append([RUNS[name], f"{losses[0]:.4f}", f"{losses[-1]:.4f}", *largest])
    far = f"largest distance from the first run, in {EARLY} steps"
    return table(["run", "first loss", "last loss", far, "in all steps"], rows)


def scores_table(folder: Path) -> Iterable[str]:
    results = json.loads((folder / "eval_results.json").read_text())
    digits = {"loss": 3, "BLEU": 1, "chrF2": 1}
    rows = [
        [words, *(f"{results[f'{part}_{key}']:.{number}f}" for key, number in digits.items())]
        for part, words in PARTS.items()
    ]
    return table(["sentences", "loss", "BLEU", "chrF"], rows)


def examples(folder: Path, number: int) -> Iterable[str]:
    shown = []
    for part, words in PARTS.items():
        with (folder / f"{part}.tsv").open(encoding="utf-8", newline="") as file:
            rows = [
                row
                for row in csv.reader(file, delimiter="\t")
                if not set("%\n|<") & set(row[0]) and 3 <= len(row[0].split()) <= 12
            ]
        for row in rows[:: max(1, len(rows) // number)][:number]:
            cells = [html.escape(cell, quote=False).encode("ascii", "xmlcharrefreplace").decode() for cell in row]
            shown.append([words, *cells])
    return table(["sentences", "English", "translator", "model"], shown)


def main() -> None:
    parser = report_parser(__doc__, "translation")
    args = parser.parse_args()
    runs = {name: losses_of(args.runs / name) for name in RUNS if (args.runs / name).is_dir()}
    draw(runs, args.output / "losses.svg")
    lines = [
        "# Runs of the translation recipe",
        "",
        "[report.py](report.py) writes this file; [README](README.md) has the commands.",
        "",
        "![Losses of the runs](losses.svg)",
        "",
        *losses_table(runs),
        "",
        "After more steps, at stage 3:",
        "",
        *scores_table(args.runs / TRAINED),
        "",
        *examples(args.runs / TRAINED, 6),
    ]
    path = args.output / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
