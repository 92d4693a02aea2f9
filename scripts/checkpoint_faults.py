"""Kills ranks at every named point of a save, refuses every write of one, and looks at what is left; then 50 saves in
the background.

    python scripts/checkpoint_faults.py              # all points, rank 0, rank 1 and both, in every way of saving
    python scripts/checkpoint_faults.py --saves 0    # without the saves in the background

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

from hf_zero.checkpoint.format import zero_folder
from hf_zero.checkpoint.reader import open_checkpoint
from tests.checkpoint import failed_saves
from tests.checkpoint import test_background_saves as saves
from tests.checkpoint import test_failed_saves as refused
from tests.checkpoint import test_node_folders as nodes
from tests.harness.ranks import Ended, RankFailure, close, try_ranks
from tests.harness.save_faults import POINTS

VICTIMS = ([0], [1], [0, 1])
IN_BACKGROUND, IN_CALL, ON_NODES = "in the background", "in the call", "on two nodes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=50)
    options = parser.parse_args()
    wrong = 0
    for where, point, victims in itertools.product((IN_BACKGROUND, IN_CALL, ON_NODES), POINTS, VICTIMS):
        with tempfile.TemporaryDirectory() as root:
            said = killed_on_nodes(root, point, victims) if where == ON_NODES else killed(root, point, victims, where)
        wrong += "WRONG" in said
        print(f"{where:17}  {point:26} ranks {victims!s:8} {said}", flush=True)
    for kind in failed_saves.KINDS:
        with tempfile.TemporaryDirectory() as root:
            found = refused.run(kind, Path(root))
        del found["seconds"]
        wrong += any(count["wrong"] for count in found.values())
        print(f"writes refused, {kind:15} {found}", flush=True)
    if options.saves:
        with tempfile.TemporaryDirectory() as root:
            said = many(root, options.saves)
        wrong += "WRONG" in said
        print(said)
    close()
    return 1 if wrong else 0


def died(ended: Ended) -> int:
    return sum(isinstance(one, RankFailure) and one.kind == "Died" for one in ended.outcomes)


def killed_on_nodes(root: str, point: str, victims: list[int]) -> str:
    """As `killed`, in the background, with a node for each rank."""
    ended = try_ranks((nodes.save_and_be_killed, (root, point, victims), {}), 2, timeout=60)
    if ended.hang:
        return f"WRONG: hung\n{ended.hang}"
    after = try_ranks((nodes.newest_that_loads, (root,), {}), 2, timeout=60).outcomes
    if any(isinstance(one, RankFailure) for one in after):
        return f"WRONG: {after}"
    found = {(path, step) for path, step, _ in after}
    if not found < {(f"{nodes.LOCAL}/one", 1), (f"{nodes.LOCAL}/two", 2)}:
        return f"WRONG: {found}"
    left = [name for _, _, names in after for name in names]
    return f"{died(ended)} died; {Path(found.pop()[0]).name} loads" if len(left) == 4 else f"WRONG: left are {left}"


def killed(root: str, point: str, victims: list[int], where: str) -> str:
    """What became of one kill."""
    in_background = where == IN_BACKGROUND
    ended = try_ranks((saves.save_and_be_killed, (root, point, victims, in_background), {}), 2, timeout=60)
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
    return f"{died(ended)} died; {Path(after[0]).name} loads"


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
