"""The keys that say what a step updates and in which pieces."""

from __future__ import annotations

import pytest

from hf_zero.errors import StateError
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case
from tests.harness.sharded import Options, micro_step, start

# ---------------------------------------------------------------- ignore_unused_parameters
STRICT = (("ignore_unused_parameters", False),)


def step_strictly(model: str, stage: int) -> str:
    case, options = Case(model, 2, 2), Options(stage, zero=STRICT)
    engine = start(case, options)
    try:
        for step in range(2):
            for micro in range(case.accumulation):
                micro_step(engine, case, step, micro, options)
    except StateError as error:
        return str(error)
    return f"{engine.global_steps} steps"


@pytest.mark.parametrize("stage", [0, 2, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_unused_parameters_are_refused_where_asked(stage: int) -> None:
    """`unused` has a layer of 16 parameters without gradient and a gain in each of three; `unused_somewhere` has them on rank 1 only."""
    for text in run_ranks(step_strictly, 2, "unused", stage):
        assert text.startswith("19 parameter(s) had no gradient on any rank") and "extra.attention.key.bias" in text
        assert "ignore_unused_parameters" in text
    for model in ("plain", "unused_somewhere"):
        assert run_ranks(step_strictly, 2, model, stage) == ["2 steps"] * 2
