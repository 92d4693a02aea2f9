"""Draws the losses and loss scales of the runs beside those that the document prints, and compares its figures.

    python recipes/engine_loop/report.py outputs/engine_loop --output recipes/engine_loop

It reads what run.sh left in the first folder, and writes report.md, losses.svg and scales.svg into the second.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from recipes.pictures import LINES, picture, smooth

EVERY = 10  # micro-batches from one line of the document to the next
SAME = 0.02  # runs whose losses differ by less share a line in the picture
REFERENCE = "hand"
ORDER = (
    "zero_dp_config.org zero_config zero_r_config zero_config.3.org zero_off_config zero_infinity_config "
    "zero_config.3 zero_dp_config zero_config.3.org-nan hand amp fp32"
).split()
GIB = 2.0**30
GPT2, MASKS, BUCKET = 124_439_808, 12 * 1024**2, 2 * 5e8  # parameters; bytes of causal masks; of a bucket of 5e8 fp16
# (configuration, what the log shows, GB, bytes by formula, kinds of memory_report that are the same here)
MEMORY: tuple[tuple[str, str, str, float, tuple[str, ...]], ...] = (
    ("zero_dp_config.org", "fp16 weights, 1/4 of the masters", "0.36", (2 + 4 / 4) * GPT2, ("parameters", "master")),
    ("zero_config.3", "1/4 of the fp16 weights, of the masters", "0.19", (2 + 4) / 4 * GPT2, ("parameters", "master")),
    ("zero_config.3", "the same, a bucket, 1/4 of the gradients", "1.18", 2 * GPT2 + BUCKET, ("device",)),
    ("zero_off_config", "a bucket on the GPU", "0.94", BUCKET, ("device",)),
)


@dataclass(frozen=True)
class Run:
    name: str
    losses: list[float]
    scales: list[float]
    seconds: float  # of a micro-batch, in the median

    @classmethod
    def read(cls, path: Path) -> Run:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return cls(
            path.name.removesuffix(".jsonl"),
            [line["loss"] for line in lines],
            [line["scale"] for line in lines],
            float(np.median([line["seconds"] for line in lines])),
        )

    def distance(self, other: Run) -> float:
        """The largest difference of two losses of the same micro-batch."""
        common = min(len(self.losses), len(other.losses))
        return max(abs(one - two) for one, two in zip(self.losses[:common], other.losses[:common], strict=True))


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Put runs together that are equally long and have the same losses, but for SAME."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if len(group[0].losses) == len(run.losses) and group[0].distance(run) < SAME:
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def draw(path: Path, kind: str, runs: Sequence[Run], document: Sequence[Run]) -> None:
    """Write a picture with the document's lines on the left and ours on the right, of `losses` or `scales`."""
    with picture(path, 1, 2, figsize=(11, 5.6), sharey=True) as both:
        for axes, all_runs, every in zip(both, (document, runs), (EVERY, 1), strict=True):
            for look, group in zip(LINES, grouped(all_runs), strict=False):
                values = getattr(group[0], kind)
                x = np.arange(len(values)) * every
                label = ",\n".join(run.name for run in group)
                axes.plot(x, smooth(values, EVERY) if kind == "losses" and every == 1 else values, label=label, **look)
            axes.set_xlabel("micro-batch")
            axes.legend(frameon=False, fontsize=7)
        both[0].set_title("document: a trained GPT-2 of 124 M, 4 GPUs", loc="left", fontsize=10)
        both[1].set_title("here: a small GPT-2 from scratch, 2 processes", loc="left", fontsize=10)
        both[0].set_ylabel("loss" if kind == "losses" else "loss scale")
        if kind == "scales":
            both[0].set_yscale("log", base=2)


def table_of_runs(runs: Sequence[Run], document: dict[str, Run]) -> Iterator[str]:
    reference = next(run for run in runs if run.name == REFERENCE)
    yield (
        "| run | document: losses at 0, 100, 200, 300 | scale at the end | here: losses at 0, 100, 200, 300 "
        "| scale at the end | largest difference from one process by hand | seconds of a micro-batch |"
    )
    yield "|---|---|---|---|---|---|---|"
    for run in runs:
        theirs = document.get(run.name)
        cells = [*(_summary(theirs, 100 // EVERY) if theirs else ("-", "-")), *_summary(run, 100)]
        comparable = abs(run.losses[0] - reference.losses[0]) < SAME
        cells += [f"{run.distance(reference):.1e}" if comparable else "other batches", f"{run.seconds:.2f}"]
        yield f"| {run.name} | {' | '.join(cells)} |"


def _summary(run: Run, every: int) -> tuple[str, str]:
    return ", ".join(f"{loss:.2f}" for loss in run.losses[::every]), f"{run.scales[-1]:g}"


def table_of_memory(found: dict[str, Any]) -> Iterator[str]:
    yield "| configuration | memory of a GPU before the first step | document, GB | by formula | here, memory_report |"
    yield "|---|---|---|---|---|"
    for name, what, printed, nbytes, kinds in MEMORY:
        ours = sum(found["gpt2"][name][kind] for kind in kinds)
        yield f"| {name} | {what} | {printed} | {(nbytes + MASKS) / GIB:.2f} | {ours / GIB:.2f}: {' + '.join(kinds)} |"


def table_of_stages(found: dict[str, Any]) -> Iterator[str]:
    ranks, stages = found["world_size"], found["stages"]
    formulas = (16.0, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)
    yield f"| stage | bytes of a parameter on each of {ranks} ranks, by formula | counted | sent, of stage 0's |"
    yield "|---|---|---|---|"
    for stage, (formula, counted) in enumerate(zip(formulas, stages, strict=True)):
        yield f"| {stage} | {formula:.2f} | {counted['total']:.2f} | {counted['sent'] / stages[0]['sent']:.2f} |"


TEXT = """# The engine's loop beside the document's lines

[report.py](report.py) writes this file from what [run.sh](run.sh) leaves; [README](README.md) says what differs.

![Losses](losses.svg)

Runs share a line where their losses differ by less than {same}. Ours are means of {every} micro-batches.

![Loss scales](scales.svg)

{runs}

A micro-batch of `zero_config.3` has 4 texts and one of `zero_dp_config` 8, of 32 for an update; the others have 16.

## Memory

{memory}

DeepSpeed keeps a bucket of 5e8 elements, whatever the model; hf_zero has none. It keeps gradients in fp32 instead.

{stages}

Factors of 4 and 8 are the limit for many ranks: 16 / (4 + 12 / N) and 16 / (2 + 14 / N).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=Path("outputs/engine_loop"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of report.md [this one]")
    args = parser.parse_args()
    paths = {path.name.removesuffix(".jsonl"): path for path in args.runs.glob("*.jsonl")}
    runs = [Run.read(paths[name]) for name in ORDER if name in paths]
    if REFERENCE not in paths:
        raise SystemExit(f"{args.runs} has no {REFERENCE}.jsonl: one_process.py --precision {REFERENCE} makes it.")
    printed = json.loads((Path(__file__).parent / "document.json").read_text())
    document = {name: Run(name, one["losses"], one["scales"], 0.0) for name, one in printed.items()}
    found = json.loads((args.runs / "memory.json").read_text())

    args.output.mkdir(parents=True, exist_ok=True)
    for kind in ("losses", "scales"):
        draw(args.output / f"{kind}.svg", kind, runs, list(document.values()))
    tables = {
        "runs": "\n".join(table_of_runs(runs, document)),
        "memory": "\n".join(table_of_memory(found)),
        "stages": "\n".join(table_of_stages(found)),
    }
    (args.output / "report.md").write_text(TEXT.format(same=SAME, every=EVERY, **tables))
    print(f"{args.output / 'report.md'} compares {len(runs)} runs")


if __name__ == "__main__":
    main()
