"""Draws the losses and loss scales of the runs beside those that the document prints, and compares its figures.

    python recipes/engine_loop/report.py outputs/engine_loop --output recipes/engine_loop

It reads what run.sh left in the first folder, and writes report.md, losses.svg and scales.svg into the second.
"""

from __future__ import annotations

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
from recipes.reports import report_parser, table

EVERY = 10  # micro-batches from one line of the document to the next
SAME = 0.02  # runs whose losses differ by less share a line in the picture
REFERENCE = "hand"
ORDER = (
    "zero_dp_config.org zero_config zero_r_config zero_config.3.org zero_off_config zero_infinity_config "
    "zero_config.3 zero_dp_config zero_config.3.org-nan hand amp fp32"
).split()
LEADERS = "zero_dp_config.org fp32 zero_config.3 zero_dp_config zero_off_config amp zero_config.3.org".split()
LOOKS = dict(zip(LEADERS, LINES, strict=False))  # of the first run of those that share a line
LOOKS["zero_config.3.org-nan"] = LOOKS["zero_config.3.org"]
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

    def distance(self, other: Run, kind: str = "losses") -> float:
        """The largest difference of two losses, or `scales`, of the same micro-batch."""
        mine, theirs = (run.losses if kind == "losses" else run.scales for run in (self, other))
        return max(abs(one - two) for one, two in zip(mine, theirs, strict=False))


def grouped(runs: Sequence[Run], kind: str) -> list[list[Run]]:
    """Put runs together that are equally long and have the same losses, or `scales`, but for SAME."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if len(group[0].losses) == len(run.losses) and group[0].distance(run, kind) < SAME:
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def draw(path: Path, kind: str, runs: Sequence[Run], document: Sequence[Run]) -> None:
    """Write a picture with the document's lines on the left and ours on the right, of `losses` or `scales`."""
    with picture(path, 1, 2, figsize=(11, 5.6), sharey=True) as both:
        for axes, all_runs, every in zip(both, (document, runs), (EVERY, 1), strict=True):
            for group in grouped(all_runs, kind):
                look = LOOKS.get(group[0].name, LINES[-1])
                values = getattr(group[0], kind)
                x = np.arange(len(values)) * every
                label = ",\n".join(run.name for run in group)
                axes.plot(
                    x,
                    smooth(values, EVERY) if kind == "losses" and every == 1 else values,
                    label=label,
                    zorder=3 if group[0] is all_runs[0] else 2,
                    **look,
                )
            axes.set_xlabel("micro-batch")
            axes.legend(frameon=False, fontsize=7)
        both[0].set_title("document: a trained GPT-2 of 124 M, 4 GPUs", loc="left", fontsize=10)
        both[1].set_title("here: a small GPT-2 from scratch, 2 processes", loc="left", fontsize=10)
        both[0].set_ylabel("loss" if kind == "losses" else "loss scale")
        if kind == "scales":
            both[0].set_yscale("log", base=2)


def table_of_runs(runs: Sequence[Run], document: dict[str, Run]) -> Iterator[str]:
    reference = next(run for run in runs if run.name == REFERENCE)
    losses, scale = "losses at 0, 100, 200, 300", "scale at the end"
    far = "largest difference from one process by hand"
    rows = []
    for run in runs:
        theirs = document.get(run.name)
        cells = [*(_summary(theirs, 100 // EVERY) if theirs else ("-", "-")), *_summary(run, 100)]
        comparable = abs(run.losses[0] - reference.losses[0]) < SAME
        cells += [f"{run.distance(reference):.1g}" if comparable else "other batches", f"{run.seconds:.2f}"]
        rows.append([run.name, *cells])
    head = ["run", f"document: {losses}", scale, f"here: {losses}", scale, far, "seconds of a micro-batch"]
    return table(head, rows)


def _summary(run: Run, every: int) -> tuple[str, str]:
    return ", ".join(f"{loss:.2f}" for loss in run.losses[::every]), f"{run.scales[-1]:g}"


def table_of_memory(found: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name, what, printed, nbytes, kinds in MEMORY:
        ours = sum(found["gpt2"][name][kind] for kind in kinds)
        ours_in_words = f"{ours / GIB:.2f}: {' + '.join(kinds)}"
        rows.append([name, what, printed, f"{(nbytes + MASKS) / GIB:.2f}", ours_in_words])
    what = "memory of a GPU before the first step"
    return table(["configuration", what, "document, GB", "by formula", "here, memory_report"], rows)


def table_of_stages(found: dict[str, Any]) -> Iterator[str]:
    ranks, stages = found["world_size"], found["stages"]
    formulas = (16.0, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)
    rows = [
        [stage, f"{formula:.2f}", f"{counted['total']:.2f}", f"{counted['sent'] / stages[0]['sent']:.2f}"]
        for stage, (formula, counted) in enumerate(zip(formulas, stages, strict=True))
    ]
    formula = f"bytes of a parameter on each of {ranks} ranks, by formula"
    return table(["stage", formula, "counted", "sent, of stage 0's"], rows)


def table_of_claims(runs: Sequence[Run], found: dict[str, Any]) -> Iterator[str]:
    by_name = {run.name: run for run in runs}
    first, stages, ranks = by_name["zero_dp_config.org"], found["stages"], found["world_size"]
    sent = ", ".join(f"{stage['sent'] / stages[0]['sent']:.2f}" for stage in stages[1:])

    def near(*names: str) -> str:
        distances = [first.distance(by_name[name]) for name in names if name in by_name]
        return f"by {max(distances):.1g}" if distances else "not run"

    def less(stage: int) -> str:
        return f"{stages[0]['total'] / stages[stage]['total']:.2f} times less on {ranks} ranks"

    slower, ended = "-", "not run"
    if "fp32" in by_name:
        slower = f"{by_name[REFERENCE].seconds / by_name['fp32'].seconds:.0f} times as long as fp32"
    if "zero_config.3.org-nan" in by_name:
        ended = f"after {len(by_name['zero_config.3.org-nan'].losses) + 1} micro-batches"
    rows = (
        (
            "14 TFLOPS in fp32 and 100 in fp16, of a V100",
            f"open, no GPU; fp16 takes {slower} on this CPU",
            "one_process.py",
        ),
        ("1.0 MB of fp32, 1.5 MB with an fp16 copy", "1.002 and 1.503 MB", "../mixed_precision/walk.py"),
        ("the scale falls from 2^32 to 2^10, in 23 skipped steps", _fall(first), "zero_dp_config.org"),
        ("a file and a dict: losses differ by 0.004", near("zero_config"), "zero_config"),
        ("ZeRO-R: losses differ by 0.004", near("zero_r_config"), "zero_r_config"),
        ("torch's AMP does as well", f"losses differ {near('amp')}: it skips a step less", "one_process.py"),
        (
            "stage 3 ends at a scale of 1",
            f"it does not: losses differ {near('zero_config.3.org')}",
            "zero_config.3.org",
        ),
        ("... with an error", f"the same error, {ended}", "zero_config.3.org --nan_from 40"),
        ("offload: losses of its own, 3.66 at the end", f"losses differ {near('zero_off_config')}", "zero_off_config"),
        ("NVMe: not run", f"losses differ {near('zero_infinity_config')}", "zero_infinity_config"),
        ("stage 1: 4 times less memory", f"{less(1)}; the limit of 16 / (4 + 12 / N) is 4", "memory.py"),
        ("stage 2: 2 times less again", f"{less(2)}; the limit of 16 / (2 + 14 / N) is 8", "memory.py"),
        ("stage 3: less by the number of GPUs", less(3), "memory.py"),
        ("stages 1 to 3 send 1, 1 and 1.5 of stage 0's bytes", sent, "memory.py"),
        ("Total persistent parameters: 121344 in 98 params", "the same", "HF_ZERO_VERBOSITY=info, memory.py"),
        ("a delayed update costs no quality and saves time", "losses are near; open, no GPU", "../zero_offload"),
    )
    return table(["the document", "here", "run"], rows)


def _fall(run: Run) -> str:
    """Tell how far the scale falls before the first update, and where it ends."""
    settled = next(i for i in range(1, len(run.scales)) if run.scales[i] == run.scales[i + 1])
    settled_at, last = np.log2([run.scales[settled], run.scales[-1]])
    return f"to 2^{settled_at:.0f} in {settled + 1} skipped steps; 2^{last:.0f} at the end"


TEXT = """# The engine's loop beside the document's lines

[report.py](report.py) writes this file from what [run.sh](run.sh) leaves; [README](README.md) says what differs.

![Losses](losses.svg)

Runs share a line where their losses differ by less than {same}. Ours are means of {every} micro-batches.

![Loss scales](scales.svg)

{runs}

A micro-batch of `zero_config.3` has 4 texts and one of `zero_dp_config` 8, of 32 for an update; the others have 16.
In `hand` and `amp` one process has all 16; two ranks have 8 each.
Seconds are those of a machine that did other work beside.

## What the document says

{claims}

## Memory

{memory}

DeepSpeed keeps a bucket of 5e8 elements, whatever the model; hf_zero has none. It keeps gradients in fp32 instead.

{stages}

Gradients are fp16 here, added and sent. Without the two keys of [memory.py](memory.py) that ask for it they are fp32.
"""


def main() -> None:
    parser = report_parser(__doc__, "engine_loop")
    args = parser.parse_args()
    paths = {path.name.removesuffix(".jsonl"): path for path in args.runs.glob("*.jsonl")}
    runs = [Run.read(paths[name]) for name in ORDER if name in paths]
    if REFERENCE not in paths:
        raise SystemExit(f"{args.runs} has no {REFERENCE}.jsonl: one_process.py --precision {REFERENCE} makes it.")
    printed = json.loads((Path(__file__).parent / "document.json").read_text())
    document = {name: Run(name, one["losses"], one["scales"], 0.0) for name, one in printed.items()}
    found = json.loads((args.runs / "memory.json").read_text())

    args.output.mkdir(parents=True, exist_ok=True)
    scaled = [run for run in runs if run.name != "fp32"]
    for kind, drawn in (("losses", runs), ("scales", scaled)):
        draw(args.output / f"{kind}.svg", kind, drawn, list(document.values()))
    tables = {
        "runs": "\n".join(table_of_runs(runs, document)),
        "memory": "\n".join(table_of_memory(found)),
        "claims": "\n".join(table_of_claims(runs, found)),
        "stages": "\n".join(table_of_stages(found)),
    }
    (args.output / "report.md").write_text(TEXT.format(same=SAME, every=EVERY, **tables))
    print(f"{args.output / 'report.md'} compares {len(runs)} runs")


if __name__ == "__main__":
    main()
