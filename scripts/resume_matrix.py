"""The resume matrix: a run that is saved and goes on, against the same run resumed in another place.

Sources and targets are worlds of 1 to 4 ranks x stages 0 to 3 x offload to none, cpu, nvme (stage 0 has no offload).
The next 5 losses are equal to the uninterrupted run's to 1e-6, bit for bit where the place is the same; the weights
that were loaded are equal bit for bit everywhere, learning rates too. The same processes resume from all sources at
one place, into a new model and engine each; where they fail, each pair is tried by processes of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.checkpoint.test_resume import resume_each, save_each
from tests.harness import ranks

EXAMPLES = """examples:
  python scripts/resume_matrix.py                      all 1600 pairs, 27 minutes on two busy cores
  python scripts/resume_matrix.py --sample 50 --seed 7 as many, drawn by chance
  python scripts/resume_matrix.py --worlds 1,2         fewer ranks

exit status: 0 all pairs went on as they must; 1 some did not"""


class Place(NamedTuple):
    """Where a run is."""

    world: int
    stage: int
    medium: str

    def __str__(self) -> str:
        return f"{self.world} x stage {self.stage} x {self.medium}"


def places(worlds: list[int]) -> list[Place]:
    every = itertools.product(worlds, range(4), ("none", "cpu", "nvme"))
    return [Place(*one) for one in every if one[1] or one[2] == "none"]


def save_at(sources: list[Place], scratch: str) -> dict[Place, dict[str, Any]]:
    """Save a run at each place; what it went on as."""
    found: dict[Place, dict[str, Any]] = {}
    for world, group in itertools.groupby(sources, key=lambda place: place.world):
        mine = list(group)
        calls = [(place.stage, folder_of(place, scratch), place.medium) for place in mine]
        found.update(zip(mine, ranks.run_ranks(save_each, world, calls, timeout=limit(mine))[0], strict=True))
    return found


def folder_of(source: Place, scratch: str) -> str:
    return f"{scratch}/{source}".replace(" ", "-")


def limit(places: list[Place]) -> float:
    """Seconds for one job."""
    return 60 + 10 * len(places)


def resume_at(target: Place, sources: list[Place], scratch: str) -> tuple[list[dict[str, Any]], str]:
    """What the runs of `sources` go on as at `target`; or nothing, and why."""
    call: Any = (resume_each, (target.stage, [folder_of(source, scratch) for source in sources], target.medium), {})
    ended = ranks.try_ranks(call, target.world, timeout=limit(sources), wait_for_all=False)
    failed = [one for one in ended.outcomes if isinstance(one, ranks.RankFailure)]
    if ended.hang or failed:
        return [], f"it failed: {ended.hang or failed[0]}"
    return ended.outcomes[0], ""


def problems_at(target: Place, sources: list[Place], scratch: str, want: dict[Place, dict[str, Any]]) -> list[str]:
    """What is wrong with the resumes at one place."""
    results, reason = resume_at(target, sources, scratch)
    if reason and len(sources) > 1:
        alone = [text for source in sources for text in problems_at(target, [source], scratch, want)]
        return alone or [f"saved on {len(sources)} places, resumed on {target} by the same processes: {reason}"]
    if reason:
        return [f"saved on {sources[0]}, resumed on {target}: {reason}"]
    pairs = zip(sources, results, strict=True)
    texts = {source: problem_of(want[source], got, exact=source == target) for source, got in pairs}
    return [f"saved on {source}, resumed on {target}: {text}" for source, text in texts.items() if text]


def problem_of(want: dict[str, Any], got: dict[str, Any], *, exact: bool) -> str:
    """What is wrong with a run that was resumed; "" if nothing is."""
    other = [name for name, tensor in want["weights"].items() if not torch.equal(got["weights"][name], tensor)]
    if other:
        return f"other weights: {', '.join(other)}"
    if got["lr"] != want["lr"]:
        return f"other learning rates: {got['lr']}, {want['lr']}"
    pairs = zip(got["losses"], want["losses"], strict=True)
    worst = max(abs(mine - its) / abs(its) for mine, its in pairs)
    return (
        "" if worst <= (0 if exact else 1e-6) else f"losses differ by {worst:.1e}: {got['losses']}, {want['losses']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="so many pairs instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 3, 4])
    args = parser.parse_args()
    pairs = list(itertools.product(places(args.worlds), repeat=2))
    if args.sample:
        pairs = sorted(random.Random(args.seed).sample(pairs, min(args.sample, len(pairs))))
    failed, began = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        want = save_at(sorted({source for source, _ in pairs}), scratch)
        for target, group in itertools.groupby(sorted(pairs, key=lambda pair: pair[1]), key=lambda pair: pair[1]):
            for problem in problems_at(target, [source for source, _ in group], scratch, want):
                failed += 1
                print(f"FAILED {problem}", flush=True)
            print(f"{target}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    ranks.close()
    print(f"{len(pairs)} pairs, {failed} failed, {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
