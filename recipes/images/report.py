"""Draws what train.py left in its folder, and writes report.md beside the pictures.

python recipes/images/report.py outputs/images --output recipes/images
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from recipes.images.train import CLASSES, WAYS
from recipes.pictures import LINES, picture, smooth
from recipes.reports import report_parser, table

LAST = 20  # steps whose mean is the final loss, and over which curves are smoothed
BASE = WAYS["plain"]
PRECISIONS = ("fp32", "fp16", "bf16", "O1", "O2", "O3")
LEAST = 1e-8  # smaller differences are drawn here, as their axis is logarithmic
# The lines of its log between which the walk-through with ds_config.json has a scale of 65536 that overflows twice.
IN_THE_LOG = ((1, 101), (1001, 1101))
BARS: dict[str, dict[str, Any]] = {
    "parameters": {"color": "#0072b2"},
    "gradients": {"color": "#56b4e9", "hatch": "///"},
    "master": {"color": "#e69f00"},
    "optimizer": {"color": "#e0e0e0", "hatch": "..."},
}

Run = dict[str, Any]


def load(folder: Path) -> list[Run]:
    """The runs in a folder, first those without ZeRO, then by precision and stage."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not any(run["name"] == BASE for run in runs):
        raise SystemExit(f"{folder} has no run of one process: python recipes/images/train.py --way plain")
    order = [*WAYS.values(), *PRECISIONS]
    return sorted(runs, key=lambda run: (order.index(run["name"].split(",")[0]), run["name"]))


def compared(runs: Sequence[Run]) -> list[Run]:
    """The runs as long as that of one process, of the same network, which comes first."""
    base = next(run for run in runs if run["name"] == BASE)
    return [run for run in runs if run["net"] == base["net"] and len(run["losses"]) == len(base["losses"])]


def differences(run: Run, base: Run) -> list[float]:
    """The distances of losses to those of one process, step by step."""
    return [abs(one - other) for one, other in zip(run["losses"], base["losses"], strict=True)]


def draw_losses(runs: Sequence[Run], path: Path) -> None:
    """Draw the losses of all that differ from one process, and by how much; the others are named."""
    base = runs[0]
    steps = np.arange(1, len(base["losses"]) + 1)
    others = [run for run in runs if any(differences(run, base))]
    same = [run["name"] for run in runs[1:] if run not in others]
    with picture(path, 2, figsize=(9, 7), sharex=True) as (top, bottom):
        top.plot(
            steps,
            smooth(base["losses"], LAST),
            color="#c8c8c8",
            linewidth=6,
            label="\n".join([base["name"], "and without any difference", *same]),
        )
        for look, run in zip(LINES, others, strict=False):
            top.plot(steps, smooth(run["losses"], LAST), label=run["name"], **look)
            bottom.plot(steps, np.maximum(smooth(differences(run, base), LAST), LEAST), label=run["name"], **look)
        top.set(ylabel="loss", yscale="log")
        top.set_title(f"{base['net']}: means of the last {LAST} steps", loc="left", fontsize=11)
        bottom.set(ylabel="difference", xlabel="step", yscale="log", xlim=(1, len(base["losses"])))
        bottom.set_title("Differences from one process in fp32", loc="left", fontsize=11)
        top.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_scales(runs: Sequence[Run], path: Path) -> None:
    """Draw the loss scale of the longest fp16 run of each network, and what the log of the walk-through says."""
    longest = {run["net"]: run for run in sorted(runs, key=lambda run: len(run["losses"])) if "fp16" in run["name"]}
    with picture(path, figsize=(9, 3.6)) as (axes,):
        for look, (net, run) in zip(LINES[1:], longest.items(), strict=False):
            steps = range(1, len(run["scales"]) + 1)
            axes.step(steps, run["scales"], where="post", label=f"{net}: {run['skipped']} steps skipped", **look)
        for begin, end in IN_THE_LOG:
            axes.axvspan(
                begin,
                end,
                color="#e4e4e4",
                label=None if begin > 1 else "the walk-through's ConvNet halves 65536 in here",
            )
        axes.set_yscale("log", base=2)
        axes.set(xlabel="step", ylabel="loss scale", xlim=(1, None))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
        axes.legend(frameon=False)


def draw_costs(runs: Sequence[Run], path: Path) -> None:
    """Draw the bytes of a parameter, and the processor time of a step, as bars."""
    names, places = [run["name"] for run in runs], np.arange(len(runs))
    with picture(path, 1, 2, figsize=(9, 0.6 + 0.3 * len(runs)), sharey=True) as (left, right):
        ends = np.zeros(len(runs))
        for kind, look in BARS.items():
            widths = np.array([run["bytes"][kind] for run in runs])
            left.barh(places, widths, left=ends, label=kind, edgecolor="white", **look)
            ends += widths
        right.barh(places, [run["processor_ms"] for run in runs], color="#7f7f7f")
        left.set_yticks(places, names)
        left.invert_yaxis()
        left.set_xlabel("bytes of a rank for each parameter")
        right.set_xlabel("processor time of a step, all processes, ms")
        left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)


def text_of(runs: Sequence[Run], suffix: str) -> str:
    base = runs[0]
    learned = [
        [
            run["name"],
            f"{smooth(run['losses'], LAST)[-1]:.4f}",
            f"{max(differences(run, base)):.1g}",
            run.get("skipped", 0),
            *(f"{share:.0f}" for share in run["accuracy"].values()),
        ]
        for run in runs
    ]
    cost = [
        [
            f"{run['name']} ({run['world_size']})",
            *(f"{run['bytes'][kind]:.2f}" for kind in BARS),
            f"{sum(run['bytes'][kind] for kind in BARS):.2f}",
            f"{run['bytes']['host']:.2f}",
            f"{run['sent']:.2f}",
            f"{run['peak_mb']:.0f}",
            f"{run['step_ms']:.1f}",
            f"{run['processor_ms']:.1f}",
        ]
        for run in runs
    ]
    sent, peak = "sent in a step", "most memory of a process, MB"
    return "\n".join(
        [
            HOW,
            "",
            f"## {base['net']}: {len(base['losses'])} steps",
            "",
            f"![Losses and differences](losses.{suffix})",
            "",
            *table(["run", "final loss", "largest difference", "skipped", "accuracy, %", *CLASSES], learned),
            "",
            "## Costs",
            "",
            f"![Bytes and times](costs.{suffix})",
            "",
            *table(["run (processes)", *BARS, "sum", "on the host", sent, peak, "ms of a step", "processor"], cost),
            "",
            "## Loss scale",
            "",
            f"![Loss scale](scale.{suffix})",
        ]
    )


def main() -> None:
    parser = report_parser(__doc__, "images")
    parser.add_argument("--format", choices=("svg", "png", "pdf"), default="svg")
    args = parser.parse_args()
    runs = load(args.runs)
    draw_losses(compared(runs), args.output / f"losses.{args.format}")
    draw_costs(compared(runs), args.output / f"costs.{args.format}")
    draw_scales(runs, args.output / f"scale.{args.format}")
    path = args.output / "report.md"
    path.write_text(text_of(compared(runs), args.format) + "\n")
    print(path)


HOW = f"""\
# Images: ways of training beside one process

[report.py](report.py) writes this file from those of [train.py](train.py); [README](README.md) has the commands, and
what these figures say.

- A **final loss** is the mean of the last {LAST} steps. **Differences** are those of the losses of single steps from
  one process in fp32, which takes the images of each step in two parts and updates by torch's fused AdamW.
- **Accuracy** is the share of 1,000 test images that are named rightly, then that of each class.
- **Bytes** are those that rank 0 keeps for each parameter between two steps, and those that it **sends** in a step in
  a ring. DDP keeps 4 more in buckets; ZeRO and DDP hold gradients for a moment that are not counted.
- The **time of a step** is the median, with one thread for each process. Other jobs on the machine lengthen it, so
  compare by **processor** time: the mean, of all processes together."""


if __name__ == "__main__":
    main()
