"""What the units of one engine take of every medium."""

from __future__ import annotations

from collections.abc import Iterable

from hf_zero.runtime.grads import GradReducer
from hf_zero.runtime.homes import Homes
from hf_zero.shards.unit import ShardUnit


def memory_report(units: Iterable[ShardUnit], reducer: GradReducer, homes: Homes, state_bytes: int) -> dict[str, int]:
    """Bytes on this rank between steps, by kind and by medium; `state_bytes` are the optimizer's."""
    report = {"parameters": 0, "gradients": 0, "master": 0, "optimizer": 0}
    for unit in units:
        for buffer in unit.buffers:
            for kind, shard in buffer.owned().items():
                report[kind] += shard.nbytes
    report["gradients"] = sum(grads.shard.nbytes for grads in reducer.buffers)
    report["optimizer"] = state_bytes
    report["total"] = sum(report.values())
    report["disk"] = homes.disk_bytes()
    report["host"] = sum(homes.host.usage().values())
    report["device"] = max(report["total"] - report["disk"] - homes.host_bytes(), 0)
    return report
