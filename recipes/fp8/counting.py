"""Counts the bytes of an engine: those that live between steps, by kind, and those that a step sends."""

from __future__ import annotations

from collections.abc import Mapping

import hf_zero

MOMENTS = {"exp_avg": "first", "exp_avg_sq": "second"}  # what torch calls the moments of Adam
# The times that an element crosses a wire in a ring of ranks: an all-reduce is a reduce-scatter and an all-gather.
_TIMES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def at_rest(engine: hf_zero.ZeroEngine) -> dict[str, float]:
    """The bytes of this rank's tensors for each parameter of the model: weights, gradient, master and both moments.

    Raises:
        AssertionError: The tensors do not add up to what the engine reports.
    """
    params = list(engine.module.parameters())
    report = engine.memory_report()
    sharded = engine.zero_optimization_stage() == 3  # then parameters have no memory of their own between steps
    counted = {
        "weights": report["parameters"] if sharded else sum(param.nbytes for param in params),
        "gradient": report["gradients"],
        "master": report["master"],
        **_moments(engine),
    }
    beside = report["total"] - sum(counted.values())
    numel = sum(param.numel() for param in params)
    if abs(beside) > numel * 0.01:  # padding, and a count of steps for each parameter
        raise AssertionError(f"the tensors have {counted}, and the engine reports {report}")
    return {kind: round(nbytes / numel, 4) for kind, nbytes in counted.items()}


def _moments(engine: hf_zero.ZeroEngine) -> dict[str, int]:
    optimizer = engine.optimizer
    assert optimizer is not None
    found: dict[str, dict[int, int]] = {name: {} for name in MOMENTS.values()}  # by object: slices share a shard
    for owned in optimizer.owned:
        states = [optimizer.native_state(owned)] if owned.native else map(optimizer.state.get, owned.masters)
        for state in states:
            for kind, name in MOMENTS.items():
                if state and kind in state:
                    found[name][id(state[kind])] = state[kind].nbytes
    return {name: sum(sizes.values()) for name, sizes in found.items()}


def sent_since(engine: hf_zero.ZeroEngine, before: Mapping[str, float]) -> dict[str, float]:
    """The bytes that a rank has sent, by collective, since the result of an earlier call; {} counts from the start."""
    share = (engine.world_size - 1) / engine.world_size
    return {op: times * share * engine.comm.counts[op].nbytes - before.get(op, 0) for op, times in _TIMES.items()}
