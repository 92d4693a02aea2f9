"""Trains every combination of stages, schedule, micro-batches, pipelines, ZeRO stage and kind of model, in fp64.

Each is compared with one process: losses, norms and parameters to 1e-9. 880 trainings of 5 steps; 10 to 17 minutes on
2 cores.

    python scripts/pipeline_matrix.py            # all
    python scripts/pipeline_matrix.py --world 2  # on 2 ranks
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness.ranks import run_ranks
from tests.pipeline.test_pipeline_parity import check_equal, run_all, settings_for

_AT_ONCE = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="*", default=[1, 2, 3, 4, 6, 8], help="numbers of ranks")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    began, failed, total = time.monotonic(), 0, 0
    for world_size in arguments.world:
        settings = settings_for(world_size)
        for start in range(0, len(settings), _AT_ONCE):
            some = settings[start : start + _AT_ONCE]
            by_rank = run_ranks(run_all, world_size, some, timeout=600)
            for setting, outcomes in zip(some, zip(*by_rank, strict=True), strict=True):
                total += 1
                try:
                    check_equal(setting, outcomes)
                except AssertionError as error:
                    failed += 1
                    print(f"DIFFERENT {setting}\n{error}")
        print(f"{world_size} ranks: {len(settings)} settings, {time.monotonic() - began:.0f} s so far", flush=True)
    print(f"{total} settings, {failed} differ from one process")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
