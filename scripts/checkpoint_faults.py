"""Kills ranks at every named point of a save, and looks at what is left; then 50 saves in the background.

    python scripts/checkpoint_faults.py              # all points, rank 0, rank 1 and both, in the background and not
    python scripts/checkpoint_faults.py --saves 0    # the kills alone

After each kill the newest published checkpoint must load and the next save into the same folder must leave nothing of
the broken one behind. The points are in tests/harness/save_faults.py. Exit status 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_zero.checkpoint.manifest import zero_folder
from hf_zero.checkpoint.reader import open_checkpoint
from tests.checkpoint import test_background_saves as saves
from tests.harness.ranks import RankFailure, close, try_ranks
from tests.harness.save_faults import POINTS

VICTIMS = ([0], [1], [0, 1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=50)
    options = parser.parse_args()
    wrong = 0
    for in_background, point, victims in itertools.product((True, False), POINTS, VICTIMS):
        with tempfile.TemporaryDirectory() as root:
            said = killed(root, point, victims, in_background)
        wrong += "WRONG" in said
        where = "in the background" if in_background else "in the call"
        print(f"{where:17}  {point:26} ranks {victims!s:8} {said}", flush=True)
    if options.saves:
        with tempfile.TemporaryDirectory() as root:
            said = many(root, options.saves)
        wrong += "WRONG" in said
        print(said)
    close()
    return 1 if wrong else 0


def killed(root: str, point: str, victims: list[int], in_background: bool) -> str:
    """What became of one kill."""
    ended = try_ranks((saves.save_and_be_killed, (root, point, victims, in_background), {}), 2, timeout=60)
    dead = sum(isinstance(one, RankFailure) and one.kind == "Died" for one in ended.outcomes)
    if ended.hang:
        return f"WRONG: hung\n{ended.hang}"
    after = try_ranks((saves.newest_that_loads, (root,), {}), 1, timeout=60).outcomes[0]
    if isinstance(after, RankFailure) or after not in ((f"{root}/one", 1), (f"{root}/two", 2)):
        return f"WRONG: {after}"
    with open_checkpoint(Path(root, "two")) as reader:
        reader.verify()
        left = len([*zero_folder(Path(root, "two")).iterdir()]) - len(reader.manifest.files) - 1
    if left:
        return f"WRONG: {left} files left behind"
    return f"{dead} died; {Path(after[0]).name} loads"


def many(root: str, count: int) -> str:
    """Saves in the background at every step, beside the same run without."""
    plain, busy = try_ranks((saves.many_saves_beside_none, (root, count), {}), 2, timeout=300).outcomes[0]
    growth = (busy["memory"][-1] - busy["memory"][count // 5]) / 1024
    same = plain["losses"] == busy["losses"]
    word = "" if same and growth < 8 else "WRONG: "
    equal = "equal to the bit" if same else "different"
    grown = f"peak memory grew by {growth:.1f} MiB after the first fifth"
    return f"{word}{count} saves in the background: losses {equal}, {grown}"


if __name__ == "__main__":
    sys.exit(main())
