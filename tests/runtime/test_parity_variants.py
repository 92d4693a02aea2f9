"""Settings and ways to write the training loop that must not change the result.

Each is compared with the same one-process reference as the parity matrix.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from tests.harness.compare import assert_not_vacuous, assert_same_exact
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case, Trace, train_reference
from tests.harness.sharded import Options, micro_step, record, start, train_all, zero_config
from tests.runtime.test_parity import STAGES, check

# Buckets that cut parameters, and into unequal pieces; a prefetch that reaches one layer, or none.
ZERO_SETTINGS: list[tuple[tuple[str, Any], ...]] = [
    (("reduce_bucket_size", 97), ("allgather_bucket_size", 97)),
    (("stage3_param_persistence_threshold", 20),),
    (("stage3_param_persistence_threshold", 10**6),),
    (("stage3_prefetch_bucket_size", 0),),
    (("stage3_prefetch_bucket_size", 1),),
    (("stage3_max_live_parameters", 0),),
    (("overlap_comm", False),),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_settings_do_not_change_the_result(world: int) -> None:
    case = Case("plain", world, 2, "adamw", steps=3)
    runs = []
    for zero in ZERO_SETTINGS:
        only_stage3 = all(key.startswith("stage3") for key, _ in zero)
        runs += [(case, Options(stage, zero=zero)) for stage in ((3,) if only_stage3 else STAGES)]
    check(runs)


# Combinations in which gradients arrive several times, or for some parameters only, under checkpointing.
COMBINED = (
    "twice+reentrant",
    "tied+twice+unequal",
    "frozen+non_reentrant",
    "unused_somewhere+reentrant",
    "unused_somewhere+twice",
)
# The same with the other way of checkpointing, or with one repetition less.
COMBINED_AT_NIGHT = (
    "twice+non_reentrant",
    "tied+reentrant",
    "frozen+reentrant",
    "unused_somewhere+non_reentrant",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [*COMBINED, *(pytest.param(model, marks=pytest.mark.nightly) for model in COMBINED_AT_NIGHT)]
)
def test_combinations_follow_one_process(model: str) -> None:
    check(
        [
            (Case(model, 2, accumulation, optimizer, steps=3), Options(stage))
            for stage in STAGES
            for accumulation, optimizer in ((1, "adamw"), (2, "sgd"))
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.nightly)])
def test_ways_to_call(optimizer: str) -> None:
    """loss.backward() is as good as engine.backward(loss), clip_grad_norm_ as gradient_clipping."""
    case = Case("twice", 2, 2, optimizer, steps=3)
    ways = ({"direct_backward": True}, {"clip_by_call": True}, {"direct_backward": True, "clip_by_call": True})
    check([(case, Options(stage, **way)) for stage in STAGES for way in ways])


@pytest.mark.parametrize("model", ["plain", "tied"])
def test_norm_without_clipping(model: str) -> None:
    case = Case(model, 2, 2, "adamw", steps=2, clip=1e9)
    runs = [(case, Options(stage, config=(("gradient_clipping", 0.0),))) for stage in STAGES]
    want = train_reference(case)
    for (_, options), trace in zip(runs, run_ranks(train_all, 2, runs)[0], strict=True):
        assert_same_exact(case, want, trace, str(options))


# ---------------------------------------------------------------- the caller scales the loss (Trainer, Accelerate)
def train_scaled_by_caller(case: Case, jobs: list[tuple[int, bool]]) -> list[Trace]:
    """A managed engine: the caller divides the loss, clips, and steps the optimizer at the boundary."""
    return [_train_scaled(case, stage, no_sync) for stage, no_sync in jobs]


def _train_scaled(case: Case, stage: int, no_sync: bool) -> Trace:
    model = case.build()
    config = ZeroConfig.load(zero_config(case, Options(stage))).resolve(model=model, world_size=case.world)
    engine = ZeroEngine(model, config, managed=True)
    optimizer = engine.attach_optimizer(case.make_optimizer(model))
    trace = Trace(params=[engine.full_state_dict(keep=True)])
    for step in range(case.steps):
        losses = []
        for micro in range(case.accumulation):
            waits = no_sync and micro < case.accumulation - 1
            with engine.no_sync() if waits else contextlib.nullcontext():
                loss = engine(**case.batch(step, micro, dist.get_rank()))["loss"]
                (loss / case.accumulation).backward()
            losses.append(loss.item())
        engine.clip_grad_norm_(case.clip)
        optimizer.step()
        optimizer.zero_grad()
        record(trace, engine, losses)
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("model", ["twice", "unequal", "unused_somewhere"])
def test_the_caller_may_scale_the_loss(model: str) -> None:
    case = Case(model, 2, 3, "adamw", steps=3)
    assert_not_vacuous(case, train_reference(case))
    jobs = [(stage, no_sync) for stage in STAGES for no_sync in (False, True)]
    for job, trace in zip(jobs, run_ranks(train_scaled_by_caller, 2, case, jobs)[0], strict=True):
        assert_same_exact(case, train_reference(case), trace, f"stage {job[0]}, no_sync {job[1]}")


def train_as_accelerate_does(case: Case, stages: tuple[int, ...]) -> list[Trace]:
    """Its wrapper for DeepSpeed says at every micro-batch that it is the last, and steps, inside `no_sync` too."""
    traces = []
    for stage in stages:
        engine = start(case, Options(stage))
        trace = Trace(params=[engine.full_state_dict(keep=True)])
        for step in range(case.steps):
            losses = []
            for micro in range(case.accumulation):
                with engine.no_sync() if micro < case.accumulation - 1 else contextlib.nullcontext():
                    engine.set_gradient_accumulation_boundary(True)
                    losses.append(micro_step(engine, case, step, micro, Options(stage)))
            record(trace, engine, losses)
        traces.append(trace)
    return traces


def test_no_step_updates_inside_no_sync() -> None:
    case = Case("plain", 2, 3, "adamw", steps=2)
    want = train_reference(case)
    for stage, trace in zip(STAGES, run_ranks(train_as_accelerate_does, 2, case, STAGES)[0], strict=True):
        assert_same_exact(case, want, trace, f"stage {stage}")


def step_at_the_end_of_a_window(case: Case, options: Options) -> None:
    engine = start(case, options)
    with engine.no_sync():
        for micro in range(case.accumulation):
            micro_step(engine, case, 0, micro, options)


@pytest.mark.parametrize(("accumulation", "config"), [(2, ()), (1, (("managed_gradient_accumulation", False),))])
def test_a_window_that_ends_inside_no_sync_is_an_error(accumulation: int, config: tuple[tuple[str, Any], ...]) -> None:
    job = Case("plain", 2, accumulation), Options(2, config=config)
    for failure in run_ranks(step_at_the_end_of_a_window, 2, *job, expect_error=True):
        assert failure.kind == "StateError"
        assert "Leave no_sync before the last micro-batch of a window" in failure.message


# ---------------------------------------------------------------- the engine's own accumulation
def watch_micro_steps(case: Case, stage: int) -> dict[str, Any]:
    options = Options(stage)
    engine = start(case, options)
    seen: dict[str, Any] = {"boundary": [], "moved": [], "global_steps": []}
    before = engine.full_state_dict(keep=True)
    for step in range(2):
        for micro in range(case.accumulation):
            seen["boundary"].append(engine.is_gradient_accumulation_boundary())
            micro_step(engine, case, step, micro, options)
            after = engine.full_state_dict(keep=True)
            seen["moved"].append(any(not torch.equal(before[name], after[name]) for name in after))
            seen["global_steps"].append(engine.global_steps)
            before = after
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_step_away_from_the_boundary_does_nothing(stage: int) -> None:
    for seen in run_ranks(watch_micro_steps, 2, Case("plain", 2, 3), stage):
        at_boundary = [False, False, True] * 2
        assert seen == {"boundary": at_boundary, "moved": at_boundary, "global_steps": [0, 0, 1, 1, 1, 2]}


# ---------------------------------------------------------------- schedulers and groups
def train_scheduled(case: Case, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The user's scheduler holds the user's optimizer; `stage` -1 is plain torch on the whole batch."""
    model = case.build()
    optimizer = case.make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    rates = []
    if stage >= 0:
        engine = hf_zero.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=zero_config(case, Options(stage))
        )[0]
    for step in range(case.steps):
        if stage >= 0:
            micro_step(engine, case, step, 0, Options(stage))
        else:
            batches = [case.batch(step, 0, rank) for rank in range(case.world)]
            whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
            model(**whole)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[1]["lr"] *= 0.5  # as a callback may
    return rates, engine.full_state_dict(keep=True) if stage >= 0 else model.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_schedulers_and_group_edits_take_effect(stage: int) -> None:
    case = Case("plain", 2, 1, "adamw", steps=4)
    rates, params = train_scheduled(case, -1)
    got_rates, got_params = run_ranks(train_scheduled, 2, case, stage)[0]
    assert got_rates == rates and len(set(rates)) == 4
    for name, value in params.items():
        torch.testing.assert_close(got_params[name], value, rtol=0, atol=1e-11, msg=name)
