"""Scaled casts to 8 bits and back, native and by torch's operations, beside what memory allows, in one run.

    python scripts/bench_casts.py --numel 1e8 --threads 1 2 --source bfloat16 --dtype float8_e5m2

"copy" is torch's, of as many bytes as a cast reads and writes; "same traffic" reads and writes as many bytes each: a
copy of the narrow tensor, and a sum (for an uncast, a fill) of as much as the wide one is larger. Ratios are medians
over rounds of the ratio within a round; above 1 a variant is faster than that column's name.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_zero.extras.cli import bench_cpu_adam as bench  # noqa: E402
from hf_zero.extras.cli.text import count, table  # noqa: E402
from hf_zero.fp8 import scaled_casts as casts  # noqa: E402
from hf_zero.native.machine import THREADS_VARIABLE  # noqa: E402

LIMITS = ("copy", "same traffic")
Runs = dict[str, Callable[[], Any]]


def limits(wide: torch.Tensor, narrow: torch.Tensor, rest: Callable[[torch.Tensor], Any]) -> Runs:
    target, source = torch.ones(2, (wide.nbytes + narrow.nbytes) // 2, dtype=torch.uint8)
    out, more = torch.ones_like(narrow), wide[narrow.nbytes // wide.itemsize :]
    return dict(zip(LIMITS, (lambda: target.copy_(source), lambda: (out.copy_(narrow), rest(more))), strict=True))


def variants(numel: int, source: torch.dtype, dtype: torch.dtype) -> dict[str, Runs]:
    """Make direction -> name -> one run. All memory is written before it is timed."""
    wide, full, narrow = torch.randn(numel).to(source), torch.randn(numel), torch.ones(numel).to(dtype)
    segments = casts.Segments([(i * numel // 10, (i + 1) * numel // 10) for i in range(10)])
    scales = casts.scales_for(casts.amaxes(wide, segments), dtype)

    def by_torch(call: Callable[..., Any], *args: Any) -> None:
        with patch.object(casts, "has_library", lambda: False):
            call(*args, segments, scales)

    return {
        f"{source} -> {dtype}": {
            "native": lambda: casts.cast(wide, narrow, segments, scales),
            "native, amaxes too": lambda: casts.cast_and_amax(wide, narrow, segments, scales),
            "torch": lambda: by_torch(casts.cast, wide, narrow),
            **limits(wide, narrow, torch.sum),
        },
        f"{dtype} -> torch.float32": {
            "native": lambda: casts.uncast(narrow, full, segments, scales),
            "native, added": lambda: casts.uncast(narrow, full, segments, scales, add=True),
            "torch": lambda: by_torch(casts.uncast, narrow, full),
            **limits(full, narrow, lambda more: more.fill_(1.0)),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=count, default=30_000_000)
    parser.add_argument("--threads", type=count, nargs="+", default=[1, 2])
    parser.add_argument("--source", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--dtype", default="float8_e4m3fn", choices=["float8_e4m3fn", "float8_e5m2", "float16"])
    parser.add_argument("--rounds", type=count, default=9)
    args = parser.parse_args()
    for threads in args.threads:
        torch.set_num_threads(threads)
        os.environ[THREADS_VARIABLE] = str(threads)
        for title, runs in variants(args.numel, getattr(torch, args.source), getattr(torch, args.dtype)).items():
            series = bench.measure(runs, args.numel, args.rounds)
            ratios = {name: [f"{bench.ratio(series, limit, name):.2f}" for limit in LIMITS] for name in runs}
            rows = [(name, f"{1e3 * statistics.median(series[name]):.1f}", *ratios[name]) for name in runs]
            print(f"\n{title}, {threads} thread(s), load {os.getloadavg()[0]:.1f}")
            print("\n".join(table([("variant", "ms", *(f"speed / {limit}" for limit in LIMITS)), *rows])))


if __name__ == "__main__":
    main()
