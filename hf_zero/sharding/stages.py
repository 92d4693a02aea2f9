"""THE table: what a ZeRO stage means. Nothing else but `ResolvedConfig.shards_parameters` asks which stage it is.

ZeRO (Rajbhandari et al., 2020) is three independent choices, and a stage is one row of them:

| stage | parameters | gradients | after the step |
|---|---|---|---|
| 0 | resident, replicated | all-reduce at the boundary | nothing |
| 1 | resident | unsharded across micro-steps, reduce-scatter at the boundary | all-gather |
| 2 | resident | reduce-scatter in every backward, accumulate in the shard | all-gather |
| 3 | on demand | as stage 2 | nothing: the shard is the parameter |

An optimizer that exchanges something smaller than gradients (OneBitAdam, stage 0) may turn the all-reduce of stage 0
off while it trains: GradAccumulator.stay_local.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.sharding.partition import UnitKind


@dataclass(frozen=True)
class UnitPlan:
    """The policy of one unit."""

    on_demand: bool  # parameters are unsharded around their use only
    sharded: bool  # each rank owns a shard of parameters' masters, gradients and optimizer states
    eager: bool  # gradients are reduced in every backward, not only at the boundary


_ROWS = {
    0: UnitPlan(on_demand=False, sharded=False, eager=False),
    1: UnitPlan(on_demand=False, sharded=True, eager=False),
    2: UnitPlan(on_demand=False, sharded=True, eager=True),
    3: UnitPlan(on_demand=True, sharded=True, eager=True),
}


def plan_unit(
    stage: int, kind: UnitKind, world_size: int, *, params_offloaded: bool, updates_offloaded: bool
) -> UnitPlan:
    """The row for `stage`. Persistent units stay unsharded as at stage 2.

    In a world of one there is nothing to gather and nothing to reduce: parameters stay unsharded, and gradients
    accumulate where the update reads them, as at stage 1. Not where they go to another medium than device memory.
    """
    alone = world_size == 1
    if stage == 3 and (kind is UnitKind.PERSISTENT or (alone and not params_offloaded)):
        stage = 2
    if stage == 2 and alone and not updates_offloaded:
        stage = 1
    return _ROWS[stage]
