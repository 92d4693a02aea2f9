"""A pipeline trains as one process does: every schedule, 1 to 4 stages, 1 and 2 pipelines, ZeRO 0 and 1, in fp64.

One job of ranks for each number of them runs all its settings, one engine after another.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.extras.pipeline.stage_schedules import order_of, peak_live
from tests.harness.ranks import run_ranks
from tests.pipeline import models

SEED = 7

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")


@dataclass(frozen=True)
class Setting:
    stages: int
    schedule: str
    micros: int
    pipelines: int
    zero: int
    variant: str

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "interleaved" else 1


@dataclass(frozen=True)
class Outcome:
    """The outcome is what one rank found."""

    stage: int
    peak_live: int
    trained: models.Trained


def settings_for(world_size: int) -> list[Setting]:
    """All combinations. Those that lie next to each other in the list differ in most values."""
    found = []
    for stages in (stages for stages in range(1, 5) if world_size in (stages, 2 * stages)):
        pipelines = world_size // stages
        micros = sorted({1, stages, 2 * stages + 1})
        combined = itertools.product(SCHEDULES, micros, (0, 1), models.VARIANTS)
        for schedule, count, zero, variant in combined:
            if schedule != "interleaved" or 2 * stages <= models.LAYERS + 2:
                found.append(Setting(stages, schedule, count, pipelines, zero, variant))
    random.Random(world_size).shuffle(found)
    return found


def sample(settings: list[Setting]) -> list[Setting]:
    """Every schedule at every number of stages, every variant, ZeRO 0 and 1, few and many micro-batches.

    tests/nightly/test_pipeline_matrix.py runs all combinations.
    """
    seen: set[tuple[Any, Any]] = set()
    kept = []
    for one in settings:
        has = {(one.stages, one.schedule), ("variant", one.variant), ("zero", one.zero)}
        has.add(("more micros than stages", one.micros > one.stages))
        if not has <= seen:
            kept.append(one)
            seen |= has
    return kept


def run_all(settings: list[Setting]) -> list[Outcome]:
    torch.set_default_dtype(torch.float64)
    return [run_one(setting) for setting in settings]


def run_one(setting: Setting) -> Outcome:
    torch.manual_seed(SEED)
    options = models.options_of(setting.variant)
    module = PipelineModule(
        models.layers_of(setting.variant), num_stages=setting.stages, virtual_stages=setting.chunks, **options
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": setting.micros,
        "gradient_clipping": models.CLIP,
        "zero_optimization": {"stage": setting.zero},
        "pipeline": {"schedule": setting.schedule},
    }
    engine, *_ = hf_zero.initialize(
        model=module, optimizer=lambda params: torch.optim.AdamW(params, lr=models.RATE), config=config
    )
    losses, norms = [], []
    for batch in models.batches(models.STEPS, setting.pipelines, setting.micros):
        losses.append(engine.train_batch(iter(batch[module.grid.data_parallel_id])).item())
        norms.append(engine.get_global_grad_norm())
    peak = engine.times.peak_live
    engine.teardown()
    weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    return Outcome(engine.stage_id, peak, models.Trained(losses, norms, weights))


def alone(setting: Setting) -> models.Trained:
    torch.manual_seed(SEED)
    module = PipelineModule(
        models.layers_of(setting.variant), num_stages=1, stage=0, **models.options_of(setting.variant)
    )
    return models.train_alone(module, setting.pipelines, setting.micros)


@pytest.fixture(scope="module", params=[1, 2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])
def runs(request: pytest.FixtureRequest) -> list[tuple[Setting, list[Outcome]]]:
    settings = sample(settings_for(request.param))
    by_rank = run_ranks(run_all, request.param, settings, timeout=180)
    return list(zip(settings, zip(*by_rank, strict=True), strict=True))


@pytest.fixture()
def in_doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("in_doubles")
def test_it_trains_as_one_process_does(runs: list[tuple[Setting, list[Outcome]]]) -> None:
    for setting, outcomes in runs:
        check_equal(setting, outcomes)


def check_equal(setting: Setting, outcomes: Sequence[Outcome]) -> None:
    """Losses, norms and all parameters are those of one process, which has moved."""
    expected = alone(setting)
    for outcome in outcomes:
        assert outcome.trained.losses == pytest.approx(expected.losses, abs=1e-9, rel=0), setting
        assert outcome.trained.norms == pytest.approx(expected.norms, abs=1e-9, rel=0), setting
        for name, value in outcome.trained.weights.items():
            torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=1e-9)
    assert expected.weights.keys() == {name for outcome in outcomes for name in outcome.trained.weights}, setting
    assert expected.losses[0] != expected.losses[-1], setting


def test_the_activations_that_live_are_those_of_the_schedule(runs: list[tuple[Setting, list[Outcome]]]) -> None:
    for setting, outcomes in runs:
        if setting.variant == "frozen":  # a stage without gradients frees what it has at once
            continue
        for outcome in outcomes:
            order = order_of(setting.schedule, outcome.stage, setting.stages, setting.micros, setting.chunks)
            assert outcome.peak_live <= peak_live(order), setting
            if setting.schedule == "gpipe":
                assert outcome.peak_live == setting.micros, setting
            if setting.schedule == "1f1b":
                assert outcome.peak_live == min(setting.micros, setting.stages - outcome.stage), setting


# ---------------------------------------------------------------- a stage that has nothing to train
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def front(*, frozen: bool) -> list[torch.nn.Module]:
    """Build layers that stand beside `twice` on the other stage; or that is frozen."""
    torch.manual_seed(SEED)
    embedding, block, head = models.Embedding(), models.Block(), torch.nn.Linear(models.WIDTH, models.WORDS)
    return [embedding.requires_grad_(not frozen), block.requires_grad_(not frozen), head]


def train_over(params: Any, layers: list[Any]) -> list[float]:
    module = PipelineModule(layers, num_stages=2, loss_fn=models.loss_of, partition_method="uniform")
    optimizer = torch.optim.AdamW(params(module), lr=models.RATE)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    engine, *_ = hf_zero.initialize(model=module, optimizer=optimizer, config=config)
    losses = [engine.train_batch(iter(batch[0])).item() for batch in models.batches(3, 1, 2)]
    engine.teardown()
    return losses


def train_each() -> list[list[float]]:
    torch.set_default_dtype(torch.float64)
    return [
        train_over(lambda module: module.parameters(), [*front(frozen=False), twice, twice, twice]),
        train_over(lambda module: [p for p in module.parameters() if p.requires_grad], [*front(frozen=True), twice]),
    ]


@pytest.mark.usefixtures("in_doubles")
def test_an_optimizer_can_be_made_over_a_stage_without_parameters() -> None:
    expected = []
    for frozen, doublings in ((False, 3), (True, 1)):
        layers = torch.nn.Sequential(*front(frozen=frozen))
        steps = torch.optim.AdamW([p for p in layers.parameters() if p.requires_grad], lr=models.RATE)
        losses = []
        for batch in models.batches(3, 1, 2):
            parts = [models.loss_of(2**doublings * layers(words), labels) / 2 for words, labels in batch[0]]
            sum(parts).backward()  # type: ignore[union-attr]
            losses.append(sum(part.item() for part in parts))
            steps.step()
            steps.zero_grad()
        expected.append(losses)
    for found in run_ranks(train_each, 2):
        for mine, its in zip(found, expected, strict=True):
            assert mine == pytest.approx(its, abs=1e-9, rel=0)
