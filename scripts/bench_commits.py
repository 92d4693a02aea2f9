"""Step time of this checkout beside another one's (the commit before), in one run.

    git worktree add /tmp/before HEAD~1
    python scripts/bench_commits.py /tmp/before                       # ddp and all stages, 2 gloo ranks
    python scripts/bench_commits.py /tmp/before --launches 6 --variants ddp,zero3-p0 --rounds 4

scripts/bench_step.py of both checkouts runs in turn, A B B A ..., with the arguments that this script does not know.
Every launch measures its variants relative to its own DDP (or the first of --variants); what is printed is the median
over pairs of launches of the ratio of these, by the clock and by CPU seconds. CPU seconds hardly move with the load of
the machine. Both checkouts use the native library of this environment, which must not be an editable installation: it
would be imported instead of either.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import benchlib
from benchlib import REPOSITORY, Series

Relative = dict[str, tuple[float, float]]  # variant -> step time and CPU seconds over the first variant's


def launch(checkout: Path, arguments: Sequence[str], timeout_s: float) -> Relative:
    """One run of the checkout's own benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        script = checkout / "scripts" / "bench_step.py"
        command = [sys.executable, str(script), *arguments, "--json", str(result)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, timeout=timeout_s, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        found = json.loads(result.read_text())["series"]
    series = {name: Series(**values) for name, values in found.items()}
    base = next(iter(series.values()))
    return {
        name: (benchlib.paired(one.round_s(), base.round_s()), benchlib.paired(one.cpu_s, base.cpu_s))
        for name, one in series.items()
    }


def report(mine: Sequence[Relative], theirs: Sequence[Relative]) -> str:
    rows = []
    for name in mine[0]:
        row = [name]
        for which in range(2):
            ratios = [a[name][which] / b[name][which] for a, b in zip(mine, theirs, strict=True)]
            row.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
        rows.append(row)
    return benchlib.table(["variant", "step time, this / other", "CPU seconds, this / other"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--launches", type=int, default=4, help="of each checkout (default 4)")
    parser.add_argument("--launch-timeout", type=float, default=600, metavar="SECONDS", help="of one (default 600)")
    args, passed_on = parser.parse_known_args()
    if not (args.other / "scripts" / "bench_step.py").is_file():
        parser.error(f"{args.other} is no checkout of hf_zero: it has no scripts/bench_step.py")
    if not any(one.startswith("--variants") for one in passed_on):
        passed_on += ["--variants", "ddp,zero1,zero2,zero3,zero3-p0"]
    results: dict[Path, list[Relative]] = {REPOSITORY: [], args.other.resolve(): []}
    for number in range(args.launches):
        for checkout in list(results) if number % 2 == 0 else reversed(list(results)):
            results[checkout].append(launch(checkout, passed_on, args.launch_timeout))
            print(f"[bench_commits] launch {number + 1} of {checkout}", file=sys.stderr, flush=True)
    print(report(*results.values()))


if __name__ == "__main__":
    main()
