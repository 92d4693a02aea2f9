"""The account that an engine gives of itself: what its units are, and what they take of every medium."""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Sequence

import torch

from hf_zero.config import ResolvedConfig
from hf_zero.config.notices import run_notices, start_text
from hf_zero.distributed.comm import Comm
from hf_zero.logs import log_start
from hf_zero.runtime.prefetch import PrefetchLimits
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.runtime.unreduced_grads import UnreducedPool
from hf_zero.runtime.unshard import LiveUnits
from hf_zero.sharding.placement import Placements
from hf_zero.sharding.unit import ShardUnit, UnitKind

# In the name of what is announced
logger = logging.getLogger("hf_zero.engine.engine")


def announce_engine(
    config: ResolvedConfig,
    comm: Comm,
    units: Sequence[ShardUnit],
    reducer: GradReducer,
    *,
    trains: bool,
) -> None:
    """Log what a reader of the log needs to know, once, from rank 0."""
    world_size = comm.world_size
    if trains:
        log_start(zero_line(config, comm.device, world_size, units))
    facts = {"@device": comm.device.type, "@whole_units": comm.max_bucket_numel is None}
    for notice in (*config.notices, *run_notices(config, facts)):
        logger.warning(notice)
    if not config.dump_state:  # which logs it whatever the level
        logger.info("%s", start_text(config, changed=not logger.isEnabledFor(logging.DEBUG)))
    logger.info("hf_zero: %s", start_line(config, world_size, units, reducer))
    if config.fp8.enabled:
        logger.info("hf_zero: %s", fp8_line(config, world_size, units))


def zero_line(config: ResolvedConfig, device: torch.device, world_size: int, units: Sequence[ShardUnit]) -> str:
    """Return the line that says that ZeRO is on, and how, for everybody who reads the log."""
    numel: dict[torch.dtype, int] = collections.Counter()
    for flat in (flat for unit in units for flat in unit.flats):
        numel[flat.full.dtype] += flat.layout.numel
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    parts = [f"hf_zero: ZeRO stage {config.stage} over {ranks} on {device.type}"]
    if numel:
        parts.append(_short(max(numel, key=lambda dtype: numel[dtype])))
    if config.precision.autocast is not None:
        parts.append(f"autocast to {_short(getattr(torch, config.precision.autocast))}")
    if scaled := sum(len(flat.params) for unit in units for flat in unit.flats if flat.scaled):
        parts.append(f"FP8 (msamp {config.fp8.opt_level}) in {scaled} layers")
    parts += [f"{what} on {block.device}" for what, block in config.zero.offloaded.items()]
    if config.shards_parameters and numel and all(unit.kind is UnitKind.PERSISTENT for unit in units if unit.flats):
        parts.append("no parameter sharded: all are smaller than stage3_param_persistence_threshold")
    return ", ".join(parts)


def _short(dtype: torch.dtype) -> str:
    """`bf16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")


def start_line(config: ResolvedConfig, world_size: int, units: Sequence[ShardUnit], reducer: GradReducer) -> str:
    """Stage, units and types of gradients in one sentence, and at stage 3 DeepSpeed's on persistent parameters."""
    kept = [unit for unit in units if unit.kind is UnitKind.PERSISTENT]
    grads = sorted({f"{acc.stored_dtype}".removeprefix("torch.") for acc in reducer.accumulators})
    numel = sum(flat.layout.numel for unit in kept for flat in unit.flats)
    count = sum(len(flat.params) for unit in kept for flat in unit.flats)
    line = (
        f"stage {config.stage} on {world_size} rank(s), {len(units)} units; gradients accumulate in "
        f"{'/'.join(grads) or 'nothing'} and are reduced in {config.communication_data_type or 'the same type'}"
    )
    if config.shards_parameters:
        line += f"; Parameter Offload: Total persistent parameters: {numel} in {count} params"
        why_not = PrefetchLimits.of(config.zero).why_none_ahead(units)
        line += f"; nothing is gathered ahead: {why_not}" if why_not else "; layers are gathered ahead"
    return line


def fp8_line(config: ResolvedConfig, world_size: int, units: Sequence[ShardUnit]) -> str:
    """Return the settings of msamp by DeepSpeed's names, and the elements of 8-bit gradients on each rank."""
    layouts = [flat.layout for unit in units for flat in unit.flats if flat.scaled]
    owned = sum(layout.shard_numel for layout in layouts)
    padding = sum(layout.padded_numel - layout.numel for layout in layouts)
    given = config.fp8
    return (
        f"msamp_enabled {given.enabled}, msamp_optlevel {given.opt_level}, msamp_use_te {given.use_te}; "
        f"partitions: {[owned] * world_size}, paddings: [{padding}]"
    )


def memory_report(
    units: Iterable[ShardUnit], reducer: GradReducer, placements: Placements, state_bytes: int
) -> dict[str, int]:
    """Bytes on this rank between steps, by kind and by medium; `state_bytes` are the optimizer's."""
    report = {"parameters": 0, "gradients": 0, "master": 0, "optimizer": 0}
    for unit in units:
        for flat in unit.flats:
            for kind, shard in flat.owned().items():
                report[kind] += shard.nbytes
            report["parameters"] += flat.row_bytes
    report["gradients"] = sum(acc.nbytes for acc in reducer.accumulators)
    report["optimizer"] = state_bytes
    report["total"] = sum(report.values())
    report["disk"] = placements.disk_bytes()
    report["host"] = sum(placements.host_usage().values())
    report["device"] = max(report["total"] - report["disk"] - placements.host_bytes(), 0)
    return report


def allocation_counts(live: LiveUnits, pool: UnreducedPool, comm: Comm, placements: Placements) -> dict[str, int]:
    """Count how often, so far, the engine needed memory that neither it nor torch's allocator had from before.

    For unsharded parameters, for gradients and what a reduce receives, and for what comes from disk and goes there.
    """
    return {
        "gather_allocations": live.demand.allocations,
        "reduce_allocations": pool.allocations + comm.receive_allocations,
        "staging_allocations": sum(stats.memory_allocations for stats in placements.stats().values()),
    }


def cast_line(before: Sequence[torch.dtype], after: Sequence[torch.dtype]) -> str | None:
    """Return a line on parameters that were given a type with fewer digits as they were made; None without any."""
    casts = [(old, new) for old, new in zip(before, after, strict=True) if old.itemsize > new.itemsize]
    if not casts:
        return None
    old, new = (str(dtype).removeprefix("torch.") for dtype in casts[0])
    return (
        f"{len(casts)} parameters are cast from {old} to {new} as they are made (bf16.enabled or fp16.enabled), and "
        f"fp32 masters start from the {new} values, as with DeepSpeed; dtype=torch.{old} keeps all digits"
    )
