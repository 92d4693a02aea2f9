"""`hf-zero bench`: measures this machine. Finds the module of a measurement, and passes its exit status on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

from hf_zero.cli import bench_cpu_adam, bench_io

NAME = "bench"
SUMMARY = "measure this machine, beside what others and the hardware reach"
EXAMPLES = """
hf-zero bench cpu-adam
hf-zero bench cpu-adam --numel 1e8 --threads 1 2 --json
hf-zero bench io /local_nvme
"""


class Measurement(Protocol):
    """What a measurement's module has. It is loaded for --help, so what is heavy is imported inside `run`."""

    @property
    def add_arguments(self) -> Callable[[argparse.ArgumentParser], None]: ...

    @property
    def run(self) -> Callable[[argparse.Namespace], int]: ...  # returns the exit status; raises as a command may


class Entry(NamedTuple):
    measurement: Measurement
    summary: str


MEASUREMENTS = {
    "cpu-adam": Entry(bench_cpu_adam, "the Adam update on the CPU: torch's, and what memory allows"),
    "io": Entry(bench_io, "reading and writing a folder's disk, and the best aio settings for it"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_subparsers(title="measurements", metavar="WHAT", required=True)
    for name, (measurement, summary) in MEASUREMENTS.items():
        child = group.add_parser(name, help=summary, description=f"Measure {summary}.", allow_abbrev=False)
        measurement.add_arguments(child)
        child.set_defaults(measurement=measurement, prog=child.prog)


def run(args: argparse.Namespace) -> None:
    status = args.measurement.run(args)
    if status:
        sys.exit(status)
