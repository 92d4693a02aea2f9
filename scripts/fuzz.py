"""Fuzz test: random configurations x odd models x world sizes, each against one process with torch.optim.

Every case ends equal to one process (fp64: 1e-10), or refused on every rank by the error that its features are
to be refused with. Anything else is a failure: a mismatch, NaN, a hang, an error of our insides, an error on some
ranks only.
A case is made of its seed and number alone, so a failure is run again by --replay SEED:NUMBER.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1")  # see tests/conftest.py

import torch

from tests.fuzz import campaign
from tests.fuzz.cases import Case, draw
from tests.fuzz.judge import FAILED, REFUSED, Verdict, judge
from tests.fuzz.registry import MODELS
from tests.harness import ranks

EXAMPLES = """examples:
  python scripts/fuzz.py --minutes 20                  20 minutes of new cases (the seed is the time, and is printed)
  python scripts/fuzz.py --minutes 5 --seed 7          the same cases every time
  python scripts/fuzz.py --cases 200 --seed 7          so many cases
  python scripts/fuzz.py --only "tied layers"          one model; --list names them
  python scripts/fuzz.py --replay 7:123                one case again, with the tracebacks of all ranks
  python scripts/fuzz.py --replay 7:123 --shrink       and the plainest case that still fails

exit status: 0 every case ended as it must; 1 a case failed, or a model was never compared; 2 bad usage"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default 20)")
    parser.add_argument("--cases", type=int, default=0, help="how many cases, however long that takes")
    parser.add_argument("--seed", type=int, help="of the cases (default: the time)")
    parser.add_argument("--world", type=int, default=0, choices=(1, 2, 3, 4), help="cases of this world size only")
    parser.add_argument("--only", metavar="MODEL", default="", help="cases of this model only")
    parser.add_argument("--replay", metavar="SEED:NUMBER", help="run this one case")
    parser.add_argument("--shrink", action="store_true", help="with --replay: look for the plainest case that fails")
    parser.add_argument("--list", action="store_true", help="name the models and their traits")
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    options = parser.parse_args(arguments)
    if options.only and options.only not in MODELS:
        parser.error(f"--only {options.only!r} is no model: --list names them")
    if options.minutes <= 0 or options.cases < 0:
        parser.error("--minutes must be above 0, --cases not below it")
    if options.shrink and not options.replay:
        parser.error("--shrink needs --replay SEED:NUMBER")
    if options.replay:
        try:
            options.seed, options.number = map(int, options.replay.split(":"))
        except ValueError:
            parser.error(f"--replay {options.replay!r}: SEED:NUMBER is meant, as a failure prints it")
    return options


def replay(options: argparse.Namespace) -> int:
    case = draw(options.seed, options.number)
    print(case, flush=True)
    verdict = judge(case)
    print(f"{verdict.kind}: {verdict.text}")
    if verdict.kind == FAILED and options.shrink:
        case = campaign.shrink(case, lambda text: print(text, flush=True))
        print(f"plainest: {case}\n{judge(case).text}")
    return int(verdict.kind == FAILED)


def fuzz(options: argparse.Namespace) -> int:
    seed = int(time.time()) if options.seed is None else options.seed
    chosen = campaign.cases(seed, only=options.only, world=options.world)
    until = time.monotonic() + 60 * options.minutes
    if options.cases:
        chosen, until = (case for _, case in zip(range(options.cases), chosen, strict=False)), float("inf")
    print(f"seed {seed}, {len(MODELS)} models", flush=True)
    progress = Progress(options.verbose)
    report = campaign.run(chosen, until=until, show=progress.show)
    print(report)
    if report.failures:
        print(
            "failed:",
            *(f"--replay {case.seed}:{case.number}  {case.model}" for case, _ in report.failures),
            sep="\n  ",
        )
    names = [options.only] if options.only else sorted(MODELS)
    never = report.never_compared(names) if sum(report.kinds.values()) >= len(names) else []
    if never:
        print("never compared, so nothing is known of:", ", ".join(never))
    return int(bool(report.failures or never))


class Progress:
    def __init__(self, verbose: bool) -> None:
        self._verbose, self._count, self._start = verbose, 0, time.monotonic()

    def show(self, case: Case, verdict: Verdict) -> None:
        self._count += 1
        if verdict.kind == FAILED:
            print(f"FAILED {case}\n{_short(verdict.text)}\n  again: --replay {case.seed}:{case.number}", flush=True)
        elif self._verbose:
            print(f"{verdict.kind} {case}" + (f"\n  {verdict.text}" if verdict.kind == REFUSED else ""), flush=True)
        if self._count % 50 == 0:
            print(f"{self._count} cases, {time.monotonic() - self._start:.0f} s", flush=True)


def _short(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(f"  {line}" for line in (lines if len(lines) < 60 else [*lines[:10], "...", *lines[-45:]]))


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    try:
        if options.list:
            print(*(f"{name}: {', '.join(sorted(MODELS[name].traits)) or '-'}" for name in sorted(MODELS)), sep="\n")
            return 0
        return replay(options) if options.replay else fuzz(options)
    finally:
        ranks.close()


if __name__ == "__main__":
    sys.exit(main())
