"""Compares the runs of language.py: curves of losses, distances to the seeds of bf16, and bytes.

    python recipes/fp8/report.py outputs/fp8 --output recipes/fp8

It writes report.md and a picture for each model. The band in a picture reaches from the least to the largest loss of
the bf16 runs, which differ in their seed.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAST = 20  # steps whose mean is the final loss of a run
KINDS = ("weights", "gradient", "master", "first", "second")
BASE = "bf16"
# In a grey print the lines differ by their pattern and their lightness, and the band by both.
LOOKS = {
    "fp32": {"color": "#000000", "linestyle": "-", "linewidth": 0.8},
    "O1": {"color": "#0072b2", "linestyle": "--", "linewidth": 1.6},
    "O2": {"color": "#d55e00", "linestyle": "-", "linewidth": 1.6},
    "O3": {"color": "#009e73", "linestyle": ":", "linewidth": 2.2},
}

Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """The lines of one file."""

    level: str
    stage: int
    seed: int
    lines: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.level}, stage {self.stage}" + (f", seed {self.seed}" if self.level == BASE or self.seed else "")

    @property
    def losses(self) -> Curve:
        return np.array([line["loss"] for line in self.lines])

    @property
    def final(self) -> float:
        return float(self.losses[-LAST:].mean())

    @property
    def sent(self) -> float:
        """The bytes that a rank sends for a step."""
        return float(sum(self.lines[-1]["sent"].values()))


@dataclass(frozen=True)
class Comparison:
    """All runs of one model. Those of another length than the bf16 runs are there for their bytes alone."""

    model: str
    runs: list[Run]

    @property
    def seeds(self) -> list[Run]:
        return [run for run in self.runs if run.level == BASE]

    @property
    def others(self) -> list[Run]:
        return [run for run in self.runs if run.level != BASE and self.is_whole(run)]

    @property
    def steps(self) -> int:
        return len(self.seeds[0].lines)

    def is_whole(self, run: Run) -> bool:
        return len(run.lines) == self.steps

    @property
    def spread(self) -> float:
        """The largest final loss of bf16 less the least."""
        finals = [run.final for run in self.seeds]
        return max(finals) - min(finals)

    @property
    def mean(self) -> float:
        return float(np.mean([run.final for run in self.seeds]))

    def distance(self, run: Run) -> float:
        """The final loss less the mean of bf16, in spreads."""
        return (run.final - self.mean) / self.spread

    def is_inside(self, run: Run) -> bool:
        finals = [seed.final for seed in self.seeds]
        return min(finals) <= run.final <= max(finals)

    def inside(self, run: Run) -> float:
        """The share of steps at which the smoothed curve of a run lies in the band of bf16."""
        curve, band = smooth(run.losses), np.array([smooth(seed.losses) for seed in self.seeds])
        return float(((band.min(0) <= curve) & (curve <= band.max(0))).mean())

    def from_twin(self, run: Run) -> float | None:
        """The largest distance of the smoothed curves of a run and of bf16 with the same seed."""
        twins = [seed for seed in self.seeds if seed.seed == run.seed]
        return float(np.abs(smooth(run.losses) - smooth(twins[0].losses)).max()) if twins else None

    def among_seeds(self) -> float:
        """The largest distance of the smoothed curves of two bf16 runs."""
        curves = np.array([smooth(seed.losses) for seed in self.seeds])
        return float((curves.max(0) - curves.min(0)).max())

    def sent(self, run: Run) -> str:
        """The bytes that a step sends, beside those of fp32 at the same stage."""
        plain = [one.sent for one in self.runs if (one.level, one.stage) == ("fp32", run.stage)]
        return f"{run.sent / plain[0]:.0%}" if plain and plain[0] else "-"


def smooth(losses: Curve) -> Curve:
    """The mean of each loss and those before it, at most LAST."""
    sums = np.concatenate([[0.0], losses.cumsum()])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - LAST, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def load(folder: Path) -> list[Comparison]:
    """The runs in a folder, by model."""
    models: dict[str, list[Run]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        named = re.fullmatch(r"(.+)-(\w+)-stage(\d)-seed(\d+)", path.stem)
        if named is not None:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            models.setdefault(named[1], []).append(Run(named[2], int(named[3]), int(named[4]), lines))
    found = [Comparison(model, runs) for model, runs in models.items()]
    for one in found:
        if len(one.seeds) < 2 or one.spread == 0:
            raise SystemExit(f"{folder}: {one.model} has {len(one.seeds)} runs of {BASE}, and a spread needs two.")
    if not found:
        raise SystemExit(f"{folder} has no file of language.py.")
    return found


def draw(one: Comparison, path: Path) -> None:
    """Write the curves, and their distances to the mean of bf16, as SVG, PNG or PDF by the name of the file."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('report.py needs matplotlib: pip install "hf_zero[recipes]"') from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, figsize=(9, 6.5), sharex=True, height_ratios=(3, 2), layout="constrained", facecolor="white"
    )
    steps = np.arange(1, one.steps + 1)
    band = np.array([smooth(seed.losses) for seed in one.seeds])
    mean = band.mean(0)
    for axes, zero in ((top, 0 * mean), (bottom, mean)):
        label = f"{BASE}: least to largest of {len(band)} seeds"
        axes.fill_between(steps, band.min(0) - zero, band.max(0) - zero, color="#c8c8c8", linewidth=0, label=label)
        for run in one.others:
            axes.plot(steps, smooth(run.losses) - zero, label=run.name, **LOOKS[run.level])
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    top.set_ylabel("loss")
    top.set_title(f"{one.model}: mean of the last {LAST} steps", loc="left", fontsize=11)
    top.legend(frameon=False)
    bottom.set_ylabel(f"loss less the mean of {BASE}")
    bottom.set_xlabel("step")
    bottom.set_xlim(1, one.steps)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def text_of(one: Comparison, picture: str) -> str:
    world_size = one.seeds[0].lines[0]["world_size"]
    outside = [run.name for run in one.others if not one.is_inside(run)]
    finals = [run.final for run in one.seeds]
    verdict = (
        f"The final loss of each of the other runs lies between those of the {BASE} seeds"
        if not outside
        else f"Outside of the final losses of the {BASE} seeds: {'; '.join(outside)}"
    )
    lines = [
        f"## {one.model}: {one.steps} steps on {world_size} process{'es' if world_size > 1 else ''}",
        "",
        f"![Curves of losses]({picture})",
        "",
        f"{verdict} ({min(finals):.4f} to {max(finals):.4f}).",
        "",
        f"| run | final loss | from the mean of {BASE}, in spreads | steps inside the band "
        f"| largest distance to {BASE} of the same seed |",
        "|---|---|---|---|---|",
    ]
    for run in [*one.seeds, *one.others]:
        row = [run.name, f"{run.final:.4f}", f"{one.distance(run):+.2f}"]
        if run.level != BASE:
            twin = one.from_twin(run)
            row += [f"{one.inside(run):.0%}", "-" if twin is None else f"{twin:.4f}"]
        else:
            row += ["", ""]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", f"Curves of two {BASE} seeds are {one.among_seeds():.4f} apart at most.", "", *bytes_of(one)]
    return "\n".join(lines)


def bytes_of(one: Comparison) -> list[str]:
    """The lines of the table of bytes, with one run for each level and stage."""
    lines = [
        f"| bytes of a rank for each parameter | {' | '.join(KINDS)} | sum | sent, of fp32's at that stage |",
        "|---|" + "---|" * (len(KINDS) + 2),
    ]
    for run in {(run.level, run.stage): run for run in reversed(one.runs)}.values():
        rest = run.lines[-1]["at_rest"]
        numbers = [*(rest[kind] for kind in KINDS), sum(rest[kind] for kind in KINDS)]
        cells = " | ".join(f"{number:.2f}" for number in numbers)
        lines.append(f"| {run.level}, stage {run.stage} | {cells} | {one.sent(run)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=Path("outputs/fp8"), help="folder [outputs/fp8]")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of report.md [this one]")
    parser.add_argument("--format", choices=("svg", "png", "pdf"), default="svg")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    sections = []
    for one in load(args.runs):
        picture = args.output / f"losses-{one.model}.{args.format}"
        draw(one, picture)
        sections.append(text_of(one, picture.name))
    path = args.output / "report.md"
    path.write_text("\n\n".join(["# FP8 beside bf16 and fp32", HOW, *sections]) + "\n")
    print(f"{path} compares {', '.join(one.model for one in load(args.runs))}")


HOW = f"""\
[report.py](report.py) wrote this from the files of [language.py](language.py); [README](README.md) has the commands.

- A **final loss** is the mean of the last {LAST} steps. The **spread** is the largest final loss of the {BASE} runs
  less the least. A seed chooses the order of texts, and the first weights of a model that is trained from scratch.
- All curves are means of the last {LAST} steps. The **band** reaches from the least to the largest of the {BASE} runs.
- Runs of O1, O2 and O3 compute in fp16 what has no 8 bits. **Bytes** are those of live tensors between two steps, of
  one rank. What it **sends** is counted for a ring, where an all-reduce is a reduce-scatter and an all-gather."""


if __name__ == "__main__":
    main()
