"""Engines of pipelines, one after another: what each has of the process (threads, sockets, tensors) goes with it."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.errors import StateError
from hf_zero.extras.pipeline.module import PipelineModule
from tests.harness.ranks import run_ranks
from tests.pipeline import models
from tests.pipeline.test_pipeline_failures import CONFIG, MICROS, data

ROUNDS = 5


def start(**options: Any) -> Any:
    torch.manual_seed(0)
    module = PipelineModule(models.layers_of("tied"), num_stages=2, **{"loss_fn": models.loss_of, **options})
    return hf_zero.initialize(model=module, config=CONFIG)[0]


def torn_down() -> None:
    engine = start()
    engine.train_batch(data())
    engine.teardown()


def forgotten() -> None:
    start().train_batch(data())


def held() -> tuple[int, list[str]]:
    """Open files, and Python's threads that send."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), [one.name for one in threading.enumerate() if "sends" in one.name]


def tensors() -> int:
    gc.collect()
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


def end_in_all_ways() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in (torn_down, forgotten):
        found[way.__name__] = [(way(), held())[1] for _ in range(ROUNDS)]
    engine = start()
    kept = []
    for _ in range(3):
        for _ in range(15):
            engine.train_batch(data())
        kept.append(tensors())
    found["kept"] = kept
    found["steps"] = engine.global_steps
    weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    with pytest.raises(StopIteration):
        engine.train_batch(iter([]))
    found["unchanged"] = engine.global_steps == 45 and engine.micro_steps == 45 * MICROS
    found["unchanged"] &= all(torch.equal(weights[name], one) for name, one in engine.module.named_parameters())
    with pytest.raises(StateError) as raised:
        engine.half()
    found["half"] = str(raised.value)
    engine.teardown()
    with pytest.raises(StateError) as raised:
        engine.train_batch(data())
    found["after"] = str(raised.value)
    return found


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    return run_ranks(end_in_all_ways, 2, timeout=60)


@pytest.mark.parametrize("way", ["torn_down", "forgotten"])
def test_files_and_threads_are_given_back(ends: list[dict[str, Any]], way: str) -> None:
    for found in ends:
        files, senders = zip(*found[way], strict=True)
        assert files[-1] <= files[0] + 5  # one engine's, which is collected when the next one is made
        assert max(len(names) for names in senders) <= 2


def test_batches_leave_no_tensors(ends: list[dict[str, Any]]) -> None:
    for found in ends:
        assert len(set(found["kept"])) == 1 and found["steps"] == 45


def test_the_end_of_the_data_changes_nothing(ends: list[dict[str, Any]]) -> None:
    assert all(found["unchanged"] for found in ends)


def test_messages_name_the_rank_of_the_run(ends: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ends):
        assert found["half"].startswith(f"rank {rank}: ")
        assert found["after"].startswith(f"rank {rank}: micro-batches: this engine was torn down")
