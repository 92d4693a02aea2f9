"""Finds the medium of the bytes of a run: device, host or disk, of every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_zero.engine.engine import ZeroEngine

# The last part of a store's key that is no number -> what it is for the reader.
KINDS = {
    "param": "parameter shards",
    "master": "fp32 masters",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "grad": "gradients",
    "staged": "parameters of updates under way",
}


@dataclass(frozen=True)
class Media:
    """Bytes of one rank between steps."""

    device: int
    host: dict[str, int]  # by kind
    disk: dict[str, int]

    def line(self) -> str:
        sums = (self.device, sum(self.host.values()), sum(self.disk.values()))
        return "".join(f"{megabytes(number):>12}" for number in sums)

    def left_device(self) -> str:
        """The kinds of memory that are not on the device, with their media."""
        texts = []
        for name, kinds in (("host", self.host), ("disk", self.disk)):
            held = [f"{KINDS.get(kind, kind)} {megabytes(number)}" for kind, number in kinds.items() if number]
            if held:
                texts.append(f"{', '.join(held)} on the {name}")
        return "; ".join(texts) or "nothing"


def measure(engine: ZeroEngine) -> Media:
    """The media of this rank. Call it between steps."""
    report = engine.memory_report()
    host = engine.placements.host_usage()
    # A delayed update holds second copies, which the report does not count as parameters and gradients.
    second = sum(nbytes for key, nbytes in host.items() if key.endswith(("/staged", "/grad/2")))
    device = report["total"] - (report["host"] - second) - report["disk"]
    disk = [disk.usage() for disk in engine.placements.disks.values()]
    return Media(device, _by_kind([host]), _by_kind(disk))


def _by_kind(usages: Iterable[Mapping[str, int]]) -> dict[str, int]:
    held: Counter[str] = Counter()
    for usage in usages:
        for key, nbytes in usage.items():
            *_, before, last = key.split("/")
            held[before if last.isdigit() else last] += nbytes
    return {kind: held[kind] for kind in sorted(held, key=[*KINDS, *held].index)}


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
