"""The resume matrix: a run that is saved and goes on, against the same run resumed in another place.

Sources and targets are worlds of 1 to 4 ranks x stages 0 to 3 x offload to none, cpu, nvme (stage 0 has no offload).
The next 5 losses are equal to the uninterrupted run's to 1e-6, bit for bit where the place is the same; the weights
that were loaded are equal bit for bit everywhere.
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

from tests.checkpoint.test_resume import resume, save
from tests.harness import ranks

EXAMPLES = """examples:
  python scripts/resume_matrix.py                      all 1600 pairs
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


def problem_of(want: dict[str, Any], source: Place, target: Place, folder: str) -> str:
    """What is wrong with a resume at `target`; "" if nothing is."""
    ended = ranks.try_ranks((resume, (target.stage, folder, False, target.medium), {}), target.world)
    if ended.hang or any(isinstance(one, ranks.RankFailure) for one in ended.outcomes):
        return f"it failed: {ended.hang or ended.outcomes[0]}"
    got = ended.outcomes[0]
    other = [name for name, tensor in want["weights"].items() if not torch.equal(got["weights"][name], tensor)]
    if other:
        return f"other weights: {', '.join(other)}"
    exact = source == target
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
        for source, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            folder = f"{scratch}/{source}".replace(" ", "-")
            want = ranks.run_ranks(save, source.world, source.stage, folder, False, source.medium)[0]
            for _, target in group:
                if problem := problem_of(want, source, target, folder):
                    failed += 1
                    print(f"FAILED saved on {source}, resumed on {target}: {problem}", flush=True)
    ranks.close()
    print(f"{len(pairs)} pairs, {failed} failed, {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
