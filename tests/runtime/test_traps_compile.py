"""torch.compile of the layers of a sharded model: it breaks at the borders of units and compiles inside of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

import hf_zero
from tests.harness.compare import assert_same_exact
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case, Trace, train_reference
from tests.harness.sharded import Options, record, zero_config

CASE = Case("plain", 2, 1, "sgd", steps=3)
STAGES = (0, 2, 3)
WHEN = ("before", "after", "wrapped", "whole")


def train_compiled(stages: tuple[int, ...]) -> dict[str, list[tuple[Trace, int]]]:
    """Every way in one job: the first compilation of a process imports for seconds."""
    return {when: [_train_one(stage, when) for stage in stages] for when in WHEN}


def _train_one(stage: int, when: str) -> tuple[Trace, int]:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    model = CASE.build()
    if when == "before":
        for layer in model.layers:
            layer.compile(backend=backend)
    config = zero_config(CASE, Options(stage))
    engine = hf_zero.initialize(model=model, optimizer=CASE.make_optimizer(model), config=config)[0]
    if when == "after":
        for layer in model.layers:
            layer.compile(backend=backend)
    if when == "wrapped":
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend=backend)
    call: Any = torch.compile(model, backend=backend) if when == "whole" else engine
    trace = Trace(params=[{}])
    for step in range(CASE.steps):
        loss = call(**CASE.batch(step, 0, dist.get_rank()))["loss"]
        engine.backward(loss)
        engine.step()
        record(trace, engine, [loss.item()])
    return trace, len(graphs)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[tuple[Trace, int]]]:
    return run_ranks(train_compiled, 2, STAGES, timeout=400)[0]


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
def test_compiled_layers_follow_one_process(when: str, compiled: dict[str, list[tuple[Trace, int]]]) -> None:
    want = train_reference(CASE)
    for stage, (trace, num_graphs) in zip(STAGES, compiled[when], strict=True):
        trace.params = [
            {name.replace("_orig_mod.", ""): value for name, value in params.items()} for params in trace.params
        ]
        assert_same_exact(CASE, want, trace, f"stage {stage}, compiled {when}")
        assert num_graphs > 0, f"stage {stage}: nothing was compiled"
        if when != "whole":
            assert num_graphs == 1, f"stage {stage}: {num_graphs} graphs for three layers of one class"
