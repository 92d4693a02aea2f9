"""Tests of what travels in a step: calls and elements of every collective equal a formula per unit.

With `a` micro-steps per step, for a trainable unit of n elements (padding counted) in b buckets:

| unit | all-gathers | reduces |
|---|---|---|
| layer at stage 3 | 2ab, 2an elements: before forward and before backward | ab reduce-scatters, an elements |
| root at stage 3 | ab, an elements: held from forward to the end of backward | ab reduce-scatters, an elements |
| persistent at stage 3, every unit at stage 2 | b after the step, n elements | ab reduce-scatters, an elements |
| every unit at stage 1 | b after the step, n elements | b reduce-scatters, n elements, at the boundary |
| every unit at stage 0 | none | b all-reduces, n elements, at the boundary (counted 2n on a ring) |

So at a = 1 layers at stage 3 move 3n, everything else 2n. A frozen unit is only gathered. Beside it one vote per step.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from tests.harness.at_night import all_at_night
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case
from tests.harness.sharded import Options, micro_step, start

Counts = dict[str, tuple[int, int]]  # operation -> calls, elements
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    stage: int
    accumulation: int = 1
    model: str = "plain"
    zero: tuple[tuple[str, Any], ...] = ()
    evaluate: bool = False  # count a forward without gradients instead of a step


def count(settings: list[Setting]) -> list[tuple[list[Counts], Counts]]:
    """Return what, per setting, was counted in each step, and the formula's value."""
    return [_count_one(setting) for setting in settings]


def _count_one(setting: Setting) -> tuple[list[Counts], Counts]:
    case = Case(setting.model, dist.get_world_size(), setting.accumulation)
    options = Options(setting.stage, zero=setting.zero)
    engine = start(case, options)
    counted = []
    for step in range(STEPS):
        engine.comm.counts.clear()
        if setting.evaluate:
            engine.eval()
            with torch.no_grad():
                engine(**case.batch(step, 0, engine.rank))
        else:
            for micro in range(case.accumulation):
                micro_step(engine, case, step, micro, options)
        counted.append({op: (c.calls, c.numel) for op, c in engine.comm.counts.items() if op != "vote"})
        votes = engine.comm.counts["vote"].calls
        assert votes == (0 if setting.evaluate else 1), f"{votes} votes in a step"
    return counted, expected(engine, setting)


def expected(engine: ZeroEngine, setting: Setting) -> Counts:
    want: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    a = setting.accumulation
    for unit in engine.units:
        for buffer in unit.flats:
            layout = buffer.layout
            kind = unit.kind.value
            for op, times in _times(setting, kind, layout.trainable, a):
                want[op][0] += times * layout.num_buckets
                want[op][1] += times * layout.padded_numel
    return {op: (calls, numel) for op, (calls, numel) in want.items() if calls}


def _times(setting: Setting, kind: str, trainable: bool, a: int) -> list[tuple[str, int]]:
    """Return how often each collective runs over one flat parameter."""
    on_demand = setting.stage == 3 and kind != "persistent"
    if setting.evaluate:
        return [("all_gather", 1 if on_demand else 0)]
    gathers = (2 * a if kind == "layer" else a) if on_demand else 1
    if not trainable:
        return [("all_gather", gathers if on_demand else 0)]
    if setting.stage == 0:
        return [("all_reduce", 1)]
    return [("all_gather", gathers), ("reduce_scatter", a if setting.stage >= 2 else 1)]


SMALL_BUCKETS = (("reduce_bucket_size", 200), ("allgather_bucket_size", 200))
# The biases, norms and gains of every layer stay whole.
PERSISTENT = (("stage3_param_persistence_threshold", 20),)
ALL_PERSISTENT = (("stage3_param_persistence_threshold", 10**6),)
NO_PREFETCH = (("stage3_prefetch_bucket_size", 0),)
SETTINGS = [
    *(Setting(stage, accumulation) for stage in range(4) for accumulation in (1, 4)),
    *(Setting(stage, 1, zero=SMALL_BUCKETS) for stage in range(4)),
    *(Setting(stage, 1, "frozen") for stage in range(4)),
    *(Setting(stage, 1, "tied") for stage in range(4)),
    *(Setting(stage, 1, "convnet") for stage in range(4)),
    *(Setting(stage, evaluate=True) for stage in range(4)),
    *(Setting(3, 2, model) for model in ("reentrant", "non_reentrant")),
    Setting(3, 1, zero=PERSISTENT),
    Setting(3, 2, zero=PERSISTENT),
    Setting(3, 2, zero=NO_PREFETCH),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", all_at_night((2, 3), (3,)))
def test_collectives_equal_the_formula(world: int) -> None:
    by_rank = run_ranks(count, world, SETTINGS)
    for setting, (counted, want), *others in zip(SETTINGS, *by_rank, strict=True):
        # The first step records the order of use; prefetch, from the second on, must not change the numbers.
        for step, got in enumerate(counted):
            assert got == want, f"{setting}, step {step}"
        assert all(other == (counted, want) for other in others)


def moved_per_step(settings: list[Setting]) -> list[tuple[int, int]]:
    """Return, per setting, the elements that the second step moved, and how many of all buffers are padding."""
    return [_moved_in_one(setting) for setting in settings]


def _moved_in_one(setting: Setting) -> tuple[int, int]:
    case, options = Case(setting.model, dist.get_world_size()), Options(setting.stage, zero=setting.zero)
    engine = start(case, options)
    for step in range(2):
        engine.comm.counts.clear()
        micro_step(engine, case, step, 0, options)
    on_a_ring = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "vote": 0}
    layouts = [buffer.layout for unit in engine.units for buffer in unit.flats]
    padding = sum(layout.padded_numel - sum(slot.numel for slot in layout.slots) for layout in layouts)
    return sum(on_a_ring[op] * counted.numel for op, counted in engine.comm.counts.items()), padding


def test_a_step_moves_three_or_two_times_the_elements() -> None:
    """The accumulation is 1: layers at stage 3 move 3 times their elements, everything else 2 times."""
    settings = [*map(Setting, range(4)), Setting(3, zero=ALL_PERSISTENT)]
    by_rank = run_ranks(moved_per_step, 2, settings)
    # The sizes are those of the plain model.
    sizes = {name: param.numel() for name, param in Case("plain").build().named_parameters()}
    layers = sum(numel for name, numel in sizes.items() if name.startswith("layers."))
    everything = sum(sizes.values())
    assert 0 < layers < everything
    wanted = [2 * everything] * 3 + [2 * everything + layers, 2 * everything]
    for want, *moved in zip(wanted, *by_rank, strict=True):
        for elements, padding in moved:
            assert 3 * padding < layers / 2, "vacuous: padding hides the difference"
            assert want <= elements <= want + 3 * padding


def test_one_process_moves_nothing() -> None:
    (counted,) = run_ranks(count_bytes_of_one, 1)
    assert counted == [0, 0, 0, 0]


def count_bytes_of_one() -> list[int]:
    """Process groups that a world of one would need."""
    groups = []
    for stage in range(4):
        engine = start(Case("plain", 1), Options(stage))
        groups.append(0 if engine.comm._processes is None else 1)
    return groups


LENGTHS = (0, 1, *range(400, 520), 5000)


def _objects_of_every_length() -> list[list[bytes]]:
    comm = Comm.join()
    with torch.device("meta"):  # the default device of what is made inside is of no interest
        return [comm.all_gather_object(bytes(length * comm.rank), "bytes") for length in LENGTHS]


def test_objects_of_every_length_arrive() -> None:
    for gathered in run_ranks(_objects_of_every_length, 3):
        sizes = [[len(value) for value in values] for values in gathered]
        assert sizes == [[0, length, 2 * length] for length in LENGTHS]


def profiled_step() -> set[str]:
    engine, case = start(Case("plain", 2), Options(3)), Case("plain", 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.backward(engine(**case.batch(0, 0, dist.get_rank()))["loss"])
        engine.step()
    return {event.key.partition(" (")[0] for event in profile.key_averages() if event.key.startswith("hf_zero::")}


def test_a_profile_names_the_collectives() -> None:
    assert run_ranks(profiled_step, 2)[0] >= {"hf_zero::gather", "hf_zero::reduce"}
