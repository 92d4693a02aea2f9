"""The keys that say how much of a model is whole at stage 3: what they move and hold, and that no number changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.sharding.unit import ShardUnit, UnitKind
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case
from tests.harness.sharded import Options, micro_step, start
from tests.runtime.test_memory_law import NUM_LAYERS, Stack
from tests.runtime.test_parity import check

STEPS = 4
EVERYTHING = 10**9


@dataclasses.dataclass
class Seen:
    """One rank saw this in the last step, in which orders are agreed."""

    layer: int  # elements
    root: int
    events: list[tuple[str, int]]  # ("gather" | "forward" | "backward", number of the layer)
    peak: int  # elements whole at once, in all steps
    weights: dict[str, torch.Tensor]

    def gathers(self) -> int:
        return sum(what == "gather" for what, _ in self.events)

    def ahead(self, way: str) -> list[int]:
        """Return for each use in one direction: how many units that come later had their gather started before it."""
        order = [number for what, number in self.events if what == way]
        counts = []
        for position, number in enumerate(order):
            started = {n for what, n in self.events[: self.events.index((way, number))] if what == "gather"}
            if way == "backward":
                middle = self.events.index(("backward", order[0]))
                started = {n for what, n in self.events[middle : self.events.index((way, number))] if what == "gather"}
            counts.append(sum(later in started for later in order[position + 1 :]))
        return counts


def watch(settings: list[dict[str, Any]], dtype: torch.dtype = torch.float32) -> list[Seen]:
    return [_watch_one(setting, dtype) for setting in settings]


def _watch_one(setting: dict[str, Any], dtype: torch.dtype) -> Seen:
    torch.manual_seed(5)
    model = Stack().to(dtype)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **setting}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    layers = [unit for unit in engine.units if unit.kind is UnitKind.LAYER]
    root = next(unit for unit in engine.units if unit.kind is UnitKind.ROOT)
    events: list[tuple[str, int]] = []
    for number, unit in enumerate(layers):
        _record(events, number, unit)
    for step in range(STEPS):
        events.clear()
        engine.backward(engine((torch.arange(14).view(2, 7) * (step + 3) + engine.rank) % 67))
        engine.step()
    assert engine.params.live.numel == 0
    return Seen(layers[0].numel, root.numel, list(events), engine.params.live.peak_numel, engine.full_state_dict(True))


def _record(events: list[tuple[str, int]], number: int, unit: ShardUnit) -> None:
    start = unit.unshard

    def unshard(**options: bool) -> None:
        events.append(("gather", number))
        start(**options)

    def forward(module: nn.Module, args: Any) -> None:
        events.append(("forward", number))

    def backward(grad: torch.Tensor) -> None:
        events.append(("backward", number))

    unit.unshard = unshard  # type: ignore[method-assign]
    unit.module.register_forward_pre_hook(forward)
    unit.module.register_forward_hook(lambda module, args, output: output.register_hook(backward) and None)


def assert_same_weights(results: list[list[Seen]]) -> None:
    first = results[0][0].weights
    for by_setting in results:
        for seen in by_setting:
            assert all(torch.equal(value, first[name]) for name, value in seen.weights.items())


@pytest.mark.slow
def test_reuse_distance() -> None:
    """The d-th layer from the end is used again after d layers forward and d backward: kept if these are fewer."""
    one = _layer_numel()
    distances = [0, 1, 2 * one, 2 * one + 1, 6 * one, EVERYTHING]
    near = {"stage3_prefetch_bucket_size": 1}
    results = run_ranks(watch, 2, [{**near, "stage3_max_reuse_distance": distance} for distance in distances])
    for by_setting in results:
        counts = [seen.gathers() for seen in by_setting]
        kept = [sum(2 * d * one < distance for d in range(NUM_LAYERS)) for distance in distances]
        assert kept == [0, 1, 1, 2, 3, NUM_LAYERS]
        assert counts == [2 * NUM_LAYERS - k for k in kept]
        assert by_setting[0].peak < by_setting[-1].peak == by_setting[-1].root + NUM_LAYERS * one
    assert_same_weights(results)


def _layer_numel() -> int:
    (seen,) = run_ranks(watch, 2, [{}])[0]
    return seen.layer


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [EVERYTHING, 0])
def test_live_parameters(prefetch: int) -> None:
    """The parameters that are unsharded beyond those in use stay below the cap."""
    one, root = (seen := run_ranks(watch, 2, [{}])[0][0]).layer, seen.root
    caps = [0, one, 2 * one, 4 * one, EVERYTHING]
    keys = {"stage3_max_reuse_distance": EVERYTHING, "stage3_prefetch_bucket_size": prefetch}
    results = run_ranks(watch, 2, [{**keys, "stage3_max_live_parameters": cap} for cap in caps])
    for by_setting in results:
        for cap, seen in zip(caps, by_setting, strict=True):
            # The unit that backward enters is gathered before the one it leaves is released.
            assert seen.peak <= root + 2 * one + cap, cap
        counts = [seen.gathers() for seen in by_setting]
        assert counts[0] == 2 * NUM_LAYERS and counts[-1] == NUM_LAYERS
        assert counts == sorted(counts, reverse=True) and len(set(counts)) >= 3
    assert_same_weights(results)


def test_what_is_in_use_does_not_stop_gathers_ahead() -> None:
    """A root that is larger than the cap (a large vocabulary) is in use all the time, as is the layer that runs."""
    one = _layer_numel()
    caps = {one - 1: 0, one: 1, 2 * one: 2}
    results = run_ranks(watch, 2, [{"stage3_max_live_parameters": cap} for cap in caps])
    for by_setting in results:
        for (cap, units), seen in zip(caps.items(), by_setting, strict=True):
            want = [min(units, NUM_LAYERS - 1 - position) for position in range(NUM_LAYERS)]
            assert seen.ahead("forward") == want, cap
    assert_same_weights(results)


def test_prefetch_distance() -> None:
    one = _layer_numel()
    sizes = {0: 0, 1: 1, 2 * one - 1: 1, 2 * one: 2, 4 * one: 4, EVERYTHING: NUM_LAYERS}
    results = run_ranks(watch, 2, [{"stage3_prefetch_bucket_size": size} for size in sizes])
    for by_setting in results:
        for (size, units), seen in zip(sizes.items(), by_setting, strict=True):
            # At the use of a layer, as many later ones are under way as the bucket holds.
            want = [min(units, NUM_LAYERS - 1 - position) for position in range(NUM_LAYERS)]
            assert seen.ahead("forward") == want, size
            assert seen.gathers() == 2 * NUM_LAYERS
            numbers = [number for what, number in seen.events if what == "gather"]
            up = list(range(NUM_LAYERS))
            assert numbers == up + up[::-1], "gathers follow the order of use"
            if units == 0:
                where = {event: place for place, event in enumerate(seen.events)}
                assert all(where["forward", n] == seen.events.index(("gather", n)) + 1 for n in up)
        peaks = [seen.peak for seen in by_setting]
        assert peaks == sorted(peaks) and len(set(peaks)) >= 4
    assert_same_weights(results)


# ---------------------------------------------------------------- beside everything else that gathers
def count_gathers(case: Case, distances: list[int]) -> list[int]:
    """All-gathers of layers in a step, once the order of use is agreed."""
    counted = []
    for distance in distances:
        options = Options(3, zero=(("stage3_max_reuse_distance", distance),))
        engine = start(case, options)
        layers = {b.layout.name: u.kind for u in engine.units for b in u.flats if u.kind is UnitKind.LAYER}
        for step in range(STEPS):
            engine.comm.counts.clear()
            micro_step(engine, case, step, 0, options)
        others = sum(b.layout.num_buckets for u in engine.units for b in u.flats if b.layout.name not in layers)
        counted.append(engine.comm.counts["all_gather"].calls - others)
    return counted


@pytest.mark.parametrize(
    "model", ["non_reentrant", *(pytest.param(m, marks=pytest.mark.slow) for m in ("reentrant", "twice"))]
)
def test_reuse_with_checkpointing_and_shared_layers(model: str) -> None:
    """Toy has three layers. `twice` runs 0 1 0 2: in backward 0 is left when 1 has been entered, which 0 follows."""
    case = Case(model, 2, 1)
    uses, near = (4, 2) if model == "twice" else (3, 1)
    for never, last, always in run_ranks(count_gathers, 2, case, [0, 1, EVERYTHING]):
        assert (never, last, always) == (2 * uses, 2 * uses - near, 3)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.a(x) + y), self.b(y)


class Mixes(nn.Module):
    """Layers of two inputs each, whose gradients arrive one after the other; the first layer is used twice."""

    _no_split_modules = ("Mix",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mix() for _ in range(2))
        self.start = nn.Parameter(torch.ones(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = (x + self.start, x * self.start)
        for index in (0, 1, 0):
            pair = self.layers[index](*pair)
        return (pair[0] * pair[1]).sum()


def gathers_of_mixes(distance: int) -> int:
    model = Mixes()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": distance}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    for _ in range(STEPS):
        engine.comm.counts.clear()
        engine.backward(engine(torch.ones(2, 9)))
        engine.step()
    return engine.comm.counts["all_gather"].calls


def test_reuse_of_layers_with_several_inputs() -> None:
    """The layer has, beside the root's gather: one for each use or more (one output's backward may end before
    another's), or two.
    """
    never, always = (run_ranks(gathers_of_mixes, 2, distance) for distance in (0, EVERYTHING))
    assert never[0] >= 1 + 6 and never == [never[0]] * 2
    assert always == [1 + 2] * 2


VARIED = [
    (
        ("stage3_max_reuse_distance", distance),
        ("stage3_prefetch_bucket_size", ahead),
        ("stage3_max_live_parameters", live),
    )
    for distance, ahead, live in ((EVERYTHING, 5 * 10**7, EVERYTHING), (900, 0, EVERYTHING), (EVERYTHING, 10**6, 2500))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", "plain tied twice+reentrant twice+non_reentrant frozen+reentrant unused_somewhere convnet".split()
)
def test_models_follow_one_process(model: str) -> None:
    check(
        [
            (Case(model, 2, accumulation, steps=3), Options(3, zero=zero))
            for accumulation, zero in zip((1, 2, 1), VARIED, strict=True)
        ]
    )


def use_between_forward_and_backward(distance: int) -> list[torch.Tensor]:
    """A fused loss reads a layer's weight, an evaluation runs, weights are looked at: all while layers are kept."""
    case, options = Case("plain", 2, 1), Options(3, zero=(("stage3_max_reuse_distance", distance),))
    engine = start(case, options)
    model = engine.module
    for step in range(STEPS):
        loss = engine(**case.batch(step, 0, engine.rank))["loss"]
        kept = [unit.state.value for unit in engine.params.units].count("kept")
        assert kept == (3 if distance and step else 0), (kept, step)
        if step % 2:
            loss = loss + model.layers[1].up.weight.square().sum()
            engine.backward(loss)
            engine.step()
            continue
        with hf_zero.gathered_params(model), torch.no_grad():
            engine.comm.counts.clear()
            model(**case.batch(step, 1, engine.rank))
            assert not engine.comm.counts, "a gathered model moves nothing"
        with torch.no_grad():
            model(**case.batch(step, 2, engine.rank))
        engine.backward(loss)
        engine.step()
        assert engine.params.live.numel == 0
    return list(engine.full_state_dict(keep=True).values())


def test_kept_layers_are_nobodys() -> None:
    for released, kept in zip(
        *(run_ranks(use_between_forward_and_backward, 2, distance) for distance in (0, EVERYTHING)), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(released, kept, strict=True))
