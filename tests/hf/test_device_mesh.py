"""A device mesh says in which groups ranks shard: in a plain loop, under accelerate, and in Trainer."""

from __future__ import annotations

import os
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import hf_zero
from hf_zero.errors import ConfigError
from tests.harness.ranks import run_ranks
from tests.harness.versions import is_older
from tests.hf.runs import arguments, build, examples, zero_config

Ran = tuple[int | None, dict[str, torch.Tensor]]  # ranks of a group, and the weights


def config(stage: int, **zero: Any) -> dict[str, Any]:
    made = zero_config(stage)
    return {**made, "zero_optimization": {**made["zero_optimization"], **zero}}


def ran(model: Any) -> Ran:
    engine = hf_zero.engine_of(model)
    assert engine is not None
    groups = engine.comm.groups
    return None if groups is None else groups.size, engine.full_state_dict(keep=True)


NEEDS_NEWER = pytest.mark.skipif(is_older("accelerate", "1.12"), reason="Trainer refuses a ParallelismConfig there")
# accelerate takes a ParallelismConfig on accelerators only; nothing else of it is left out.
on_cpu = unittest.mock.patch.object(ParallelismConfig, "_validate_accelerator", lambda self, accelerator: None)


def batches() -> list[dict[str, torch.Tensor]]:
    return [{key: torch.tensor(value) for key, value in row.items()} for row in examples(16, 1)]


def plain_loop(stage: int, size: int, by_mesh: bool) -> Ran:
    mesh = init_device_mesh("cpu", (4 // size, size)) if by_mesh else None
    settings = {**config(stage, **({} if by_mesh else {"sharding_group": size})), "train_micro_batch_size_per_gpu": 2}
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, loader, _ = hf_zero.initialize(
        model=model, optimizer=optimizer, config=settings, training_data=batches(), mesh=mesh
    )
    assert loader is not None
    for batch in loader:
        engine.backward(engine(**batch).loss)
        engine.step()
    return ran(engine)


@on_cpu
def accelerate_loop(stage: int, size: int, by_mesh: bool) -> Ran:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    parallelism = ParallelismConfig(dp_replicate_size=4 // size, dp_shard_size=size) if by_mesh else None
    accelerator = Accelerator(parallelism_config=parallelism)
    hf_zero.ZeroPlugin(config(stage, **({} if by_mesh else {"sharding_group": size}))).attach(accelerator)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(batches(), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return ran(model)


@on_cpu
def trainer(stage: int, size: int, by_mesh: bool, source: Path) -> Ran:
    more: dict[str, Any] = {"zero": config(stage, **({} if by_mesh else {"sharding_group": size}))}
    if by_mesh:
        more["parallelism_config"] = ParallelismConfig(dp_replicate_size=4 // size, dp_shard_size=size)
    args = hf_zero.TrainingArguments(**arguments(str(source / "out"), max_steps=2), **more)
    model = AutoModelForCausalLM.from_pretrained(source)
    hf_zero.Trainer(model=model, args=args, train_dataset=examples(40, 1)).train()
    return ran(model)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("loop", [plain_loop, accelerate_loop, pytest.param(trainer, marks=NEEDS_NEWER)])
def test_a_mesh_is_the_key(tmp_path: Path, loop: Any, stage: int) -> None:
    more = ()
    if loop is trainer:
        build().save_pretrained(tmp_path)
        more = (tmp_path,)
    by_mesh, by_key = (run_ranks(loop, 4, stage, 2, way, *more) for way in (True, False))
    start = build().state_dict()
    for (size, weights), (expected, others) in zip(by_mesh, by_key, strict=True):
        assert size == expected == 2
        assert all(torch.equal(weights[name], other) for name, other in others.items())
        assert not torch.equal(weights["model.norm.weight"], start["model.norm.weight"])


def all_ranks_in_one_dimension() -> list[int | None]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sizes = [plain_loop(3, 4, True)[0]]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    model = build()
    made = hf_zero.initialize(model=model, config={**config(3), "train_micro_batch_size_per_gpu": 2}, mesh=mesh)
    return [*sizes, ran(made[0])[0]]


def test_a_mesh_whose_ranks_all_shard_makes_no_groups() -> None:
    assert run_ranks(all_ranks_in_one_dimension, 4) == [[None, None]] * 4


# ---------------------------------------------------------------- bad input
def refusals() -> list[str]:
    meshes: list[tuple[DeviceMesh, dict[str, Any]]] = [
        (init_device_mesh("cpu", (2, 2)), {"sharding_group": 4}),
        (init_device_mesh("cpu", (2, 2)), {"sharding_group": "host"}),
        (init_device_mesh("cpu", (2, 2)), {"mics_shard_size": 4}),
        (init_device_mesh("cpu", (2, 1, 2)), {}),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], {}),
        (DeviceMesh("cpu", [[0, 2], [1, 3]]), {}),
        (init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",)), {}),
    ]
    said = []
    for mesh, zero in meshes:
        settings = {**config(3, **zero), "train_micro_batch_size_per_gpu": 2}
        with pytest.raises(ConfigError) as error:
            hf_zero.initialize(model=build(), config=settings, mesh=mesh)
        said.append(str(error.value))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for dimension in ("tp_size", "cp_size"):
        AcceleratorState._reset_state(reset_partial_state=True)
        args = {"dp_shard_size": 2, dimension: 2}
        with pytest.raises(ConfigError) as error:
            hf_zero.TrainingArguments(
                **arguments("unused"), zero=config(3), parallelism_config=ParallelismConfig(**args)
            )
        said.append(str(error.value))
    return said


def test_meshes_that_are_refused() -> None:
    for said in run_ranks(refusals, 4):
        for text, expected in zip(said, EXPECTED, strict=True):
            assert expected in text, said


EXPECTED = (
    "zero_optimization.sharding_group = 4: the mesh has 2: expected the same",
    'zero_optimization.sharding_group = "host": the mesh has 2',
    "zero_optimization.sharding_group = 4: the mesh has 2",
    "the mesh holds the ranks [[[0, 1]], [[2, 3]]]",
    "expected all 4 of them in order",
    "the mesh holds the ranks [[0, 2], [1, 3]]",
    "Set dp_shard_size",
    "parallelism_config enables tp",
    "parallelism_config enables cp",
)


def test_the_stages_of_a_pipeline_place_their_ranks_themselves() -> None:
    module = hf_zero.pipeline.PipelineModule([torch.nn.Linear(2, 2)], num_stages=1, loss_fn=torch.nn.MSELoss())
    mesh = DeviceMesh.__new__(DeviceMesh)
    with pytest.raises(ConfigError, match="pipeline"):
        hf_zero.initialize(model=module, config={"train_batch_size": 1}, mesh=mesh)
