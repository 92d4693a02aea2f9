"""What an engine says of itself: what its units are, and what they take of every medium."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_zero.config import ResolvedConfig
from hf_zero.runtime.homes import Homes
from hf_zero.runtime.reducer import GradReducer
from hf_zero.shards.partition import UnitKind
from hf_zero.shards.unit import ShardUnit


def start_line(config: ResolvedConfig, world_size: int, units: Sequence[ShardUnit], reducer: GradReducer) -> str:
    """Stage, units and the types of gradients in one sentence, and at stage 3 DeepSpeed's line on what stays whole."""
    kept = [unit for unit in units if unit.kind is UnitKind.PERSISTENT]
    grads = sorted({f"{buffer.dtype}".removeprefix("torch.") for buffer in reducer.buffers})
    numel = sum(buffer.layout.numel for unit in kept for buffer in unit.buffers)
    count = sum(len(buffer.params) for unit in kept for buffer in unit.buffers)
    line = (
        f"stage {config.stage} on {world_size} rank(s), {len(units)} units; gradients accumulate in "
        f"{'/'.join(grads) or 'nothing'} and are reduced in {config.communication_data_type or 'the same type'}"
    )
    if config.stage == 3:
        line += f"; Parameter Offload: Total persistent parameters: {numel} in {count} params"
    return line


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
