"""`config check` finds what needs no model: bounds of every number, texts, and what does not go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.config.keys import root
from hf_zero.config.schema import Count, Key, Real, Text, put, walk
from hf_zero.errors import ConfigError
from hf_zero.extras.cli.main import main
from tests.harness.ranks import run_ranks

ZERO = "zero_optimization"
STAGES = {"stages": 2}


def found(config: dict[str, Any]) -> list[str]:
    return [f"{problem.key}: {problem.text}" for problem in ZeroConfig.load(config, defer=True).check()]


# The pipeline block. A mistake, the key that is named, and the mended configuration.
PIPELINES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "stage 2": (
        {ZERO: {"stage": 2}, "pipeline": STAGES},
        f"{ZERO}.stage",
        "a pipeline takes 0 or 1",
        {ZERO: {"stage": 1}},
    ),
    "stage 3": (
        {ZERO: {"stage": 3}, "pipeline": STAGES},
        f"{ZERO}.stage",
        "a pipeline takes 0 or 1",
        {ZERO: {"stage": 0}},
    ),
    "profiler": (
        {"pipeline": STAGES, "flops_profiler": {"enabled": True}},
        "flops_profiler.enabled",
        "one model in one process",
        {"flops_profiler": {"enabled": False}},
    ),
    "interleaved": (
        {"pipeline": {**STAGES, "schedule": "interleaved"}},
        "pipeline.schedule",
        "virtual_stages of 2 or more",
        {"pipeline": {**STAGES, "schedule": "interleaved", "virtual_stages": 2}},
    ),
    "zero bubble": (
        {"pipeline": {**STAGES, "schedule": "zero_bubble", "virtual_stages": 2}},
        "pipeline.schedule",
        "virtual_stages 1, not 2",
        {"pipeline": {**STAGES, "schedule": "zero_bubble"}},
    ),
    "method": (
        {"pipeline": {**STAGES, "partition": "nosuch"}},
        "pipeline.partition",
        'no method has this name: expected "parameters"',
        {"pipeline": {**STAGES, "partition": "Parameters"}},
    ),
    "method with a pattern": (
        {"pipeline": {**STAGES, "partition": "uniform:x"}},
        "pipeline.partition",
        "no method",
        {"pipeline": {**STAGES, "partition": "best"}},
    ),
    "pattern": (
        {"pipeline": {**STAGES, "partition": "type:["}},
        "pipeline.partition",
        "'[' is no regular expression: unterminated character set",
        {"pipeline": {**STAGES, "partition": "type:[A-Z]inear"}},
    ),
    "long pattern": (
        {"pipeline": {"partition": "type:" + "(" * 5000 + ")" * 5000}},
        "pipeline.partition",
        "no regular",
        {},
    ),
    "stages": ({"pipeline": {"stages": 1e30}}, "pipeline.stages", "at most 65536", {"pipeline": {"stages": "auto"}}),
    "chunks": (
        {"pipeline": {**STAGES, "virtual_stages": 1e12}},
        "pipeline.virtual_stages",
        "at most 65536",
        {"pipeline": {**STAGES, "virtual_stages": 3}},
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_mistake_of_a_pipeline_is_found_by_check(name: str, tmp_path: Path, capsys: Any) -> None:
    config, key, text, mended = PIPELINES[name]
    (problem,) = found(config)
    assert problem.startswith(f"{key}: ") and text in problem
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config))
    assert main(["config", "check", str(path)]) == 1
    assert text in capsys.readouterr().out
    assert not mended or found({**config, **mended}) == []


def at_initialize(config: dict[str, Any], chunks: int) -> str:
    """Return what a module that was split when it was made has to say of the same file."""
    module = hf_zero.PipelineModule([nn.Linear(2, 2) for _ in range(4)], num_stages=2, virtual_stages=chunks)
    try:
        engine = hf_zero.initialize(model=module, config={"train_micro_batch_size_per_gpu": 1, **config})[0]
    except ConfigError as error:
        return str(error)
    engine.teardown()
    return "made"


def start_all() -> dict[str, str]:
    names = ("stage 2", "profiler", "interleaved", "method", "pattern", "long pattern", "stages")
    told = {name: at_initialize(PIPELINES[name][0], 1) for name in names}
    alone = {ZERO: {"stage": 3}, "pipeline": {}}  # the stages are the module's
    return {
        **told,
        "module's stages": at_initialize(alone, 1),
        "its chunks": at_initialize(PIPELINES["interleaved"][0], 2),
    }


def test_initialize_has_the_same_rules() -> None:
    first, second = run_ranks(start_all, 2)
    assert first == second
    assert first.pop("its chunks") == "made", "the module's own virtual stages count"
    assert "a pipeline takes 0 or 1" in first.pop("module's stages")
    for name, told in first.items():
        assert PIPELINES[name][2] in told or "was split with" in told, (name, told)
    assert PIPELINES["interleaved"][2] in first["interleaved"] and PIPELINES["stage 2"][2] in first["stage 2"]


# Bounds

ABSURD: tuple[Any, ...] = (
    *(1e30, 1e300, -1, -1e-9, float("nan"), float("inf"), float("-inf"), True, "", "x", "a\0b", 10**399, 2**63),
    *([], {}, [float("nan")], [float("inf")], ["["], [True], "1e400"),
)
# Values of keys for which infinity means never, a negative number means all or is the range, or any number may stand.
TAKEN: dict[str, tuple[Any, ...]] = {
    "steps_per_print": (float("inf"),),
    "flops_profiler.module_depth": (-1,),
    "optimizer.params.beta2_decay": (-1, -1e-9),
}

ROWS = [(path, row) for path, row in walk(root()) if isinstance(row, Key) and not row.refused and not row.no_effect]


@pytest.mark.parametrize(("path", "row"), ROWS, ids=[path for path, _ in ROWS])
def test_no_value_is_too_odd_to_be_told_or_used(path: str, row: Key) -> None:
    """A value that is no number, or that no machine can count, is a problem of its key; nothing else is
    ever raised.
    """
    for value in ABSURD:
        config: dict[str, Any] = {}
        put(config, path, value)
        told = [line for line in found(config) if line.startswith(f"{path}: ")]
        if isinstance(row, Real) and value not in TAKEN.get(path, ()):
            large = isinstance(value, int | float) and 0 < value < 2**127 and type(value) is not bool
            in_range = large and not isinstance(row, Count) and row.below is None and value <= (row.high or 2**127)
            assert told or in_range, value
        elif isinstance(row, Text) and "\0" in str(value):
            assert told, value


def join(seconds: float) -> float:
    config = {"desync_timeout": seconds, ZERO: {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    model = nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.5), config=config)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with hf_zero.gathered_params(model):
        value = float(model.weight.detach()[0, 0])
    engine.teardown()
    return value


def test_a_timeout_is_one_that_the_backend_can_wait_for() -> None:
    for seconds in (1e30, 1e10, 1e-9, 0.5, 31536001):
        (problem,) = found({"desync_timeout": seconds})
        assert "expected a number of at least 1 and at most 31536000" in problem
    for seconds in (1.0, 31536000.0):
        assert found({"desync_timeout": seconds}) == []
        assert run_ranks(join, 2, seconds) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"type": "SGD", "params": {"nesterov": True}}, "nesterov"),
        ({"type": "SGD", "params": {"nesterov": True, "momentum": 0.9, "dampening": 0.1}}, "nesterov"),
        ({"type": "AdamW", "params": {"fused": True, "foreach": True}}, "foreach"),
        ({"type": "Rprop", "params": {"etas": [1.2, 0.5]}}, "etas"),
        ({"type": "Adadelta", "params": {"rho": 1.5}}, "rho"),
        ({"type": "AdamW", "params": {"differentiable": True}}, "differentiable"),
    ],
)
def test_what_torch_would_refuse_is_found_by_check(params: dict[str, Any], key: str) -> None:
    (problem,) = found({"optimizer": params})
    assert problem.startswith(f"optimizer.params.{key}: ")
    kind = getattr(torch.optim, params["type"])
    with pytest.raises((ValueError, RuntimeError)):
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1, **params["params"])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("scale", [1e-300, 1e39, 2.0**-25, 2.0**128])
def test_scales_that_lose_every_gradient_are_refused(scale: float) -> None:
    assert found({"fp16": {"enabled": True, "loss_scale": scale}})
    assert found({"amp": {"enabled": True, "loss_scale": scale}})
    assert found({"gradient_predivide_factor": scale * 0.5})
    assert found({"fp16": {"enabled": True, "initial_scale_power": 128}})
    assert found({"fp16": {"enabled": True, "initial_scale_power": 127, "loss_scale": 2.0**-24}}) == []
