"""`hf-zero bench`: measures this machine."""

from __future__ import annotations

import argparse

from hf_zero.extras.cli import bench_comm, bench_cpu_adam, bench_io

NAME = "bench"
SUMMARY = "measure this machine, beside what others and the hardware reach"
EXAMPLES = """
hf-zero bench cpu-adam
hf-zero bench cpu-adam --numel 1e8 --threads 1 2 --json
hf-zero bench io /local_nvme
hf-zero bench comm --size 64MiB
"""

MEASUREMENTS = {"comm": bench_comm, "cpu-adam": bench_cpu_adam, "io": bench_io}


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_subparsers(title="measurements", metavar="WHAT", required=True)
    for name, module in MEASUREMENTS.items():
        child = group.add_parser(
            name, help=module.SUMMARY, description=f"Measure {module.SUMMARY}.", allow_abbrev=False
        )
        module.configure(child)
        child.set_defaults(measure=module.run, prog=child.prog)


def run(args: argparse.Namespace) -> None:
    args.measure(args)
