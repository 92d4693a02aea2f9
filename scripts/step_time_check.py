r"""Planned beside measured times of a step, from what bench_step.py has written.

    python scripts/step_time_check.py RUN.json --per-host 2 --computing 1.8 --link 410MB/s --network 56MB/s \
        --latency 4000 --decode 500MB/s

RUN.json is what `bench_step.py --json` wrote on hosts of --per-host ranks each. --computing is the seconds of a step
of its variant "plain" in as many processes at once as this machine has ranks. The other options are those that
`hf-zero bench comm` prints on these hosts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_step import zero_config
from benchlib import ModelSize

from hf_zero.config import ZeroConfig
from hf_zero.estimate import measure, plan_model
from hf_zero.extras.cli.estimate import speed
from hf_zero.extras.cli.meta_model import make_batch
from hf_zero.extras.cli.text import table
from hf_zero.extras.estimate.step_time import Speeds, StepTime, step_time


def planned(name: str, measured: argparse.Namespace, args: argparse.Namespace, world: int) -> StepTime:
    """Return the planned time of the variant `name` of the run with the settings `measured`."""
    size = ModelSize.of(measured)
    with torch.device("meta"):
        model = size.build()
    config = ZeroConfig.load(zero_config(name, measured, size.hidden)).resolve(model=model, world_size=world)
    profile = measure(model, config, make_batch(model, measured.micro_batch, measured.seq), on_host=True)
    plan = plan_model(model, config, on_host=True, per_host=args.per_host, profile=profile)
    flops = (profile.forward_flops + profile.backward_flops) / args.computing
    seconds = args.latency / 1e6
    speeds = Speeds(flops, args.link, args.network, seconds, on_host=True, decode=args.decode)
    return step_time(plan.passes, profile, speeds, per_host=args.per_host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("measured", type=Path, metavar="RUN.json")
    add("--ranks", type=int, default=4, help="of the run (default 4)")
    add("--per-host", type=int, required=True)
    add("--computing", type=float, required=True, metavar="SECONDS")
    add("--link", type=speed, required=True)
    add("--network", type=speed, required=True)
    add("--latency", type=float, required=True, metavar="US")
    add("--decode", type=speed, required=True)
    args = parser.parse_args()
    run: dict[str, Any] = json.loads(args.measured.read_text())
    rows = [["variant", "measured, s", "planned, s", "planned / measured"]]
    for name, series in run["series"].items():
        if not name.startswith("zero"):
            continue  # the planned traffic is not a peer's
        seconds = statistics.median(value for one in series["wall_s"] for value in one)
        total = planned(name, argparse.Namespace(**run["settings"]), args, args.ranks).total
        rows.append([name, f"{seconds:.2f}", f"{total:.2f}", f"{total / seconds:.2f}"])
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
