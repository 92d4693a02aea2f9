"""Every stage gives the training run that one process gives on the concatenated batch.

The matrix: stage x accumulation x optimizer x world size x what models do to their parameters, in fp64 to 1e-9 and in
fp32 to the bound derived in tests.harness.compare.
"""

from __future__ import annotations

import itertools

import pytest

from tests.harness import models
from tests.harness.compare import assert_not_vacuous, assert_same_exact, assert_same_single, assert_stays
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case, train_reference
from tests.harness.sharded import Options, digest, train_all

STAGES = (0, 1, 2, 3)
# The order of use is recorded in the first, prefetched from in the second; layers are kept for backward in the third.
STEPS = 3
ACCUMULATED = 3  # a micro-batch that is the first, one that is the last, and one that is neither
# transformers' Llama computes norms and loss in fp32 whatever the type of the model: it is no case for fp64.
IN_DOUBLE = (*models.VARIANTS, "convnet")


# Every model on 2 ranks; on 3, where shards are uneven, and on 1 those that are different there.
WORLDS = [
    *((model, 2) for model in IN_DOUBLE),
    *((model, 3) for model in ("plain", "tied", "unused_somewhere", "frozen", "unequal")),
    *((model, 1) for model in ("plain", "tied", "reentrant")),
]


def check(runs: list[tuple[Case, Options]]) -> None:
    """Train every run on its ranks, in one job, and compare each with its reference."""
    world = runs[0][0].world
    for case in {case for case, _ in runs}:
        assert_not_vacuous(case, train_reference(case))
    by_rank = run_ranks(train_all, world, runs, timeout=120)
    for (case, options), trace, *others in zip(runs, *by_rank, strict=True):
        label = f"{case}, {options}"
        compare = assert_same_single if case.single else assert_same_exact
        compare(case, train_reference(case), trace, label)
        assert_stays(case, trace, label)
        assert all(other == digest(trace) for other in others), f"{label}: ranks differ"


# The fast part: some models at every stage, 2 ranks.
# "plain" is crossed.
SLOW_MODELS = ("plain", "twice", "tied", "unused", "unused_somewhere", "unequal", "reentrant", "non_reentrant")


def _marks(model: str, world: int) -> list[pytest.MarkDecorator]:
    if world == 1 or (world == 3 and model not in ("plain", "unused_somewhere")):
        return [pytest.mark.nightly]
    return [pytest.mark.slow] if world != 2 or model in SLOW_MODELS else []


@pytest.mark.parametrize(
    ("model", "world"),
    [pytest.param(model, world, marks=_marks(model, world)) for model, world in WORLDS],
)
def test_matrix_in_double(model: str, world: int) -> None:
    check(_matrix(model, world, single=False, crossed=model == "plain"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "world"),
    [
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in WORLDS[: len(IN_DOUBLE)]),
        *(pytest.param("plain", world, marks=pytest.mark.nightly) for world in (1, 3)),
        *(pytest.param("llama", world, marks=pytest.mark.nightly) for world in (1, 2)),
        ("llama", 3),
        pytest.param("llama_reentrant", 2, marks=pytest.mark.nightly),
        ("llama_non_reentrant", 2),
    ],
)
def test_matrix_in_single(model: str, world: int) -> None:
    check(_matrix(model, world, single=True, crossed=False))


def _matrix(model: str, world: int, *, single: bool, crossed: bool) -> list[tuple[Case, Options]]:
    """`crossed`: both optimizers with and without accumulation; else each with one of them."""
    ways = itertools.product((1, ACCUMULATED), ("adamw", "sgd")) if crossed else ((1, "sgd"), (ACCUMULATED, "adamw"))
    return [
        (Case(model, world, accumulation, optimizer, STEPS, single=single), Options(stage))
        for (accumulation, optimizer), stage in itertools.product(ways, STAGES)
    ]
