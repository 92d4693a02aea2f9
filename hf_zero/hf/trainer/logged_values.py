"""ZeRO's own values among what Trainer logs, for `report_to`: loss scale, skipped steps, bytes, peaks, disk rates.

All of them are numbers that the host has already. There is no communication, and nothing waits for the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from hf_zero.engine.engine import ZeroEngine

_GB = 1e9


@dataclass(frozen=True)
class _Counters:
    """Counts what an engine has done so far, on this rank."""

    at_s: float
    steps: int
    moved: int  # bytes of the tensors in collectives, each counted whole
    read: int  # bytes, from disk
    written: int

    @classmethod
    def of(cls, engine: ZeroEngine) -> _Counters:
        disks = engine.placements.stats().values()
        return cls(
            at_s=time.monotonic(),
            steps=engine.global_steps,
            moved=sum(count.nbytes for count in engine.comm.counts.values()),
            read=sum(disk.bytes_read for disk in disks),
            written=sum(disk.bytes_written for disk in disks),
        )


class LoggedValues:
    """Values of one engine on this rank, of the time since the last log or, at first, since this was made."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._before = _Counters.of(engine)

    def take(self) -> dict[str, float]:
        """Return the values under the names that Trainer logs, without what the run does not have, such as a disk."""
        engine, before = self._engine, self._before
        now = self._before = _Counters.of(engine)
        values: dict[str, float] = {"zero/skipped_steps": engine.skipped_steps}
        if engine.config.dtype == "float16" and engine.optimizer is not None:
            values["zero/loss_scale"] = float(engine.optimizer.guard.scaler.cur_scale)
        if now.steps > before.steps:
            values["zero/comm_gb_per_step"] = (now.moved - before.moved) / (now.steps - before.steps) / _GB
        if engine.params.live.peak_bytes:
            values["zero/gathered_peak_gb"] = engine.params.live.peak_bytes / _GB
        seconds = now.at_s - before.at_s
        if engine.placements.disks and seconds > 0:
            values["zero/disk_read_gb_per_s"] = (now.read - before.read) / seconds / _GB
            values["zero/disk_write_gb_per_s"] = (now.written - before.written) / seconds / _GB
        return values
