"""Compares the runs of language.py: curves of losses, distances to the seeds of bf16 or fp32, and bytes.

    python recipes/fp8/report.py outputs/fp8 --output recipes/fp8

It writes report.md and a picture for each model. Runs are compared with those of bf16, or with those of fp32 where a
model has no two of bf16. The band in a picture reaches from the least to the largest loss of these, which differ in
their seed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray

from recipes.pictures import LINES, picture, smooth
from recipes.reports import report_parser, table

LAST = 20  # steps whose mean is the final loss of a run
KINDS = ("weights", "gradient", "master", "first", "second")
BASES = (("bf16", 0), ("fp32", 0))  # level and stage: the first one of which a model has several seeds
LOOKS = dict(zip(("fp32", "bf16", "O1", "O2", "O3", "Q8", "Q8_fp32"), LINES, strict=False))

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Runs:
    """The runs of one level and stage, by seed: the lines of their files."""

    level: str
    stage: int
    by_seed: dict[int, list[dict[str, Any]]]

    @property
    def name(self) -> str:
        return f"{self.level}, stage {self.stage}"

    @property
    def curves(self) -> Array:
        """The losses, [seeds, steps], each as the mean of itself and those before it, at most LAST."""
        return np.array([smooth([line["loss"] for line in lines], LAST) for lines in self.by_seed.values()])

    @property
    def finals(self) -> Array:
        return self.curves[:, -1]

    @property
    def last_line(self) -> dict[str, Any]:
        """The last step of one of the runs: all have the same bytes."""
        return next(iter(self.by_seed.values()))[-1]

    @property
    def sent(self) -> float:
        """The bytes that a rank sends for a step."""
        return float(sum(self.last_line["sent"].values()))


@dataclass(frozen=True)
class Comparison:
    """All runs of one model. Those that are shorter than the base's are there for their bytes alone."""

    model: str
    runs: dict[tuple[str, int], Runs]

    @property
    def base(self) -> Runs:
        return next(self.runs[base] for base in BASES if is_base(self.runs.get(base)))

    @property
    def steps(self) -> int:
        return int(self.base.curves.shape[1])

    @property
    def compared(self) -> list[Runs]:
        return [runs for runs in self.runs.values() if runs.curves.shape[1] == self.steps]

    @property
    def others(self) -> list[Runs]:
        return [runs for runs in self.compared if runs is not self.base]

    @property
    def spread(self) -> float:
        return float(np.ptp(self.base.finals))

    def distance(self, runs: Runs) -> float:
        """The mean of the final losses less that of the base, in spreads."""
        return float(runs.finals.mean() - self.base.finals.mean()) / self.spread

    def places(self, runs: Runs) -> tuple[int, int, int]:
        """The number of final losses below, in and above the range of those of the base."""
        below, above = runs.finals < self.base.finals.min(), runs.finals > self.base.finals.max()
        return int(below.sum()), int((~below & ~above).sum()), int(above.sum())

    def inside(self, runs: Runs) -> float:
        """The share of steps at which the mean of the curves lies in the band of the base."""
        mean, band = runs.curves.mean(0), self.base.curves
        return float(((band.min(0) <= mean) & (mean <= band.max(0))).mean())

    def from_twins(self, runs: Runs) -> list[float]:
        """The final losses less those of the base with the same seed."""
        twins = dict(zip(self.base.by_seed, self.base.finals, strict=True))
        finals = dict(zip(runs.by_seed, runs.finals, strict=True))
        return [float(final - twins[seed]) for seed, final in finals.items() if seed in twins]

    def sent(self, runs: Runs) -> str:
        """The bytes that a step sends, beside those of fp32 at the same stage."""
        plain = self.runs.get(("fp32", runs.stage))
        return f"{runs.sent / plain.sent:.0%}" if plain is not None and plain.sent else "-"


def is_base(runs: Runs | None) -> bool:
    """Tell if there are two seeds or more, whose difference can be compared with."""
    return runs is not None and len(runs.by_seed) > 1


def load(folder: Path) -> list[Comparison]:
    """The runs in a folder, by model."""
    models: dict[str, dict[tuple[str, int], Runs]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        named = re.fullmatch(r"(.+)-(\w+)-stage(\d)-seed(\d+)", path.stem)
        if named is not None:
            level, stage = named[2], int(named[3])
            runs = models.setdefault(named[1], {}).setdefault((level, stage), Runs(level, stage, {}))
            runs.by_seed[int(named[4])] = [json.loads(line) for line in path.read_text().splitlines()]
    for model, all_runs in models.items():
        if not any(is_base(all_runs.get(base)) for base in BASES):
            raise SystemExit(
                f"{folder}: {model} needs two runs of --level bf16 or fp32 with other seeds, for a spread."
            )
        for runs in all_runs.values():
            steps = {seed: len(lines) for seed, lines in runs.by_seed.items()}
            if len(set(steps.values())) > 1:
                said = ", ".join(f"{number} of seed {seed}" for seed, number in steps.items())
                raise SystemExit(
                    f"{folder}: {model} at {runs.name} has other numbers of steps ({said}). Finish these runs."
                )
    if not models:
        raise SystemExit(f"{folder} has no file of language.py.")
    order = list(LOOKS)
    return [
        Comparison(model, dict(sorted(all_runs.items(), key=lambda one: (order.index(one[0][0]), one[0][1]))))
        for model, all_runs in models.items()
    ]


def draw(one: Comparison, path: Path) -> None:
    """Write the curves, and their distances to the mean of the base, as SVG, PNG or PDF by the name of the file."""
    steps, seeds = np.arange(1, one.steps + 1), one.base.curves
    with picture(path, 2, figsize=(9, 6.5), sharex=True, height_ratios=(3, 2)) as (top, bottom):
        for axes, zero in ((top, 0.0), (bottom, seeds.mean(0))):
            label = f"{one.base.level}: least to largest of {len(seeds)} seeds"
            axes.fill_between(
                steps, seeds.min(0) - zero, seeds.max(0) - zero, color="#c8c8c8", linewidth=0, label=label
            )
            for runs in one.others:
                number = len(runs.by_seed)
                label = runs.name + (f": mean of {number} seeds" if number > 1 else "")
                axes.plot(steps, runs.curves.mean(0) - zero, label=label, **LOOKS[runs.level])
        top.set_ylabel("loss")
        top.set_title(f"{one.model}: means of the last {LAST} steps", loc="left", fontsize=11)
        top.legend(frameon=False)
        bottom.set_ylabel(f"loss less the mean of {one.base.level}")
        bottom.set_xlabel("step")
        bottom.set_xlim(1, one.steps)
        bottom.locator_params("x", integer=True)


def text_of(one: Comparison, picture: str) -> str:
    number = one.base.last_line["world_size"]
    return "\n".join(
        [
            f"## {one.model}: {one.steps} steps on {number} {'process' if number == 1 else 'processes'}",
            "",
            f"![Curves of losses]({picture})",
            "",
            *losses_of(one),
            "",
            *bytes_of(one),
        ]
    )


def losses_of(one: Comparison) -> Iterable[str]:
    """The lines of the table of losses."""
    base = one.base.level
    head = (
        "runs",
        "final loss of each seed",
        f"mean, from that of {base}, in spreads",
        f"below, in and above the range of {base}",
        f"from {base} of the same seed, mean",
        "steps in the band",
    )
    rows = []
    for runs in one.compared:
        finals = ", ".join(f"{final:.4f}" for final in runs.finals)
        cells = [runs.name, finals, f"{one.distance(runs):+.2f}"]
        if runs is not one.base:
            below, inside, above = one.places(runs)
            twins = one.from_twins(runs)
            cells += [f"{below}, {inside}, {above}", f"{np.mean(twins):+.4f}" if twins else "-"]
            cells.append(f"{one.inside(runs):.0%}")
        rows.append(cells + [""] * (len(head) - len(cells)))
    return table(head, rows)


def bytes_of(one: Comparison) -> Iterable[str]:
    """The lines of the table of bytes."""
    rows = []
    for runs in one.runs.values():
        rest = [runs.last_line["at_rest"][kind] for kind in KINDS]
        rows.append([runs.name, *(f"{number:.2f}" for number in [*rest, sum(rest)]), one.sent(runs)])
    return table(["bytes of a rank for each parameter", *KINDS, "sum", "sent, of fp32's at that stage"], rows)


def main() -> None:
    parser = report_parser(__doc__, "fp8")
    parser.add_argument("--format", choices=("svg", "png", "pdf"), default="svg")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    sections = []
    for one in load(args.runs):
        picture = args.output / f"losses-{one.model}.{args.format}"
        draw(one, picture)
        sections.append(text_of(one, picture.name))
    path = args.output / "report.md"
    path.write_text("\n\n".join([HOW, *sections]) + "\n")
    print(path)


HOW = f"""\
# FP8 beside bf16 and fp32

[report.py](report.py) writes this file from those of [language.py](language.py); [README](README.md) has the commands,
and what these figures say.

- A **final loss** is the mean of the last {LAST} steps, and curves are such means too. A seed chooses the order of
  texts, and the first weights of a model that is trained from scratch.
- The **range** of bf16 reaches from its least to its largest final loss, and the **spread** is how long that is. If
  only chance made a difference, a further run would lie outside of the range of three with a probability of 1/2.
- The **band** is the range of bf16 at each step. Lines are means over the seeds of a level, and the last column has
  the share of steps at which such a mean lies in the band.
- A model that was not trained with several seeds in bf16 is compared with fp32 instead.
- O1, O2 and O3 compute in fp16 what has no 8 bits; Q8 and Q8_fp32 are bf16 and fp32 with 8-bit messages
  between hosts.
- **Bytes** are those of live tensors between two steps, of one rank.
  What it **sends** is counted for a ring, where an all-reduce is a reduce-scatter and an all-gather."""


if __name__ == "__main__":
    main()
