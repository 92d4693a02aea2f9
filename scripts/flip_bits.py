"""Damage every file of a checkpoint folder, one bit or one cut at a time: is it named?

Bits are looked for by `hf-zero inspect --verify`, cuts by what a Trainer does before it resumes. The folder is copied
first. Without a folder, a Trainer writes one on two ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.harness import ranks
from tests.harness.damage import files_of, unseen_cuts, unseen_flips, verified
from tests.hf.test_damaged_files import load_says, save_over

EXAMPLES = """examples:
  python scripts/flip_bits.py                                   200 bits of a checkpoint made for it
  python scripts/flip_bits.py outputs/checkpoint-500 --flips 50

exit status: 0 all damage was named; 1 some was not, or the folder is damaged as it is"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, nargs="?", help="checkpoint-N folder of a Trainer")
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = args.checkpoint
        if source is None:
            ranks.run_ranks(save_over, 2, f"{scratch}/made", init_group=False)
            ranks.close()
            source = Path(scratch, "made", "checkpoint-2")
        folder = Path(scratch, "copy")
        shutil.copytree(source, folder)
        if said := verified(folder):
            print(f"before any damage: {said}")
            return 1
        began = time.perf_counter()
        unseen = unseen_flips(folder, args.flips, args.seed)
        cuts = unseen_cuts(folder, args.seed, lambda: load_says(folder))
        kinds = Counter(path.suffix for path in files_of(folder))
        print(
            f"{len(files_of(folder))} files ({', '.join(f'{count} {kind}' for kind, count in kinds.items())}), "
            f"{time.perf_counter() - began:.1f} s\n"
            f"bits: {args.flips - len(unseen)} of {args.flips} named; cuts: {len(cuts)} not named"
        )
        for text in unseen + cuts:
            print(f"NOT NAMED {text}")
    return 1 if unseen or cuts else 0


if __name__ == "__main__":
    sys.exit(main())
