"""Weights that are NaN before the first step are an error that names them; a loss that is NaN is the script's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.errors import StateError
from hf_zero.optim.offload import host_state
from tests.harness.ranks import run_ranks

CASES = [(stage, device) for stage in range(4) for device in ("none", "cpu")]


def start(stage: int, device: str, nan_in: str = "", frozen: str = "", folder: str = "") -> hf_zero.ZeroEngine:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    for name, param in model.named_parameters():
        if name == nan_in:
            param.data[-1] = float("nan")  # the last elements, so that one rank has them all
        param.requires_grad_(name != frozen)
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if stage > 0:
        zero["offload_optimizer"] = {"device": device, **({"nvme_path": folder} if folder else {})}
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 2}
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: hf_zero.ZeroEngine, x: torch.Tensor) -> None:
    engine.backward(engine(x).square().mean())
    engine.step()


def refused(name: str, frozen: str) -> None:
    for stage, device in CASES:
        engine = start(stage, device, name, frozen)
        if frozen and stage < 3:  # a rank has it as its script made it, and nothing has been sharded
            continue
        with pytest.raises(StateError, match=rf"first step is NaN, because 1 parameter\(s\) hold NaN: {name}"):
            step(engine, torch.ones(2, 6))


@pytest.mark.parametrize("frozen", ["", "2.weight"])
def test_weights_that_are_nan_are_named(frozen: str) -> None:
    run_ranks(refused, 2, "2.weight", frozen)


def nan_on_one_rank() -> list[float | None]:
    norms = []
    for stage, device in CASES:
        engine = start(stage, device)
        x = torch.ones(2, 6)
        step(engine, x * float("nan") if engine.rank else x)  # as torch, which makes the weights NaN
        norms.append(engine.get_global_grad_norm())
        assert all(weight.isnan().any() for weight in engine.full_state_dict(keep=True).values())
    return norms


def test_a_loss_that_is_nan_is_not() -> None:
    norms = run_ranks(nan_on_one_rank, 2)
    assert all(norm != norm for rank in norms for norm in rank)


def nan_while_states_are_on_disk(folder: str) -> None:
    """The update of a layer begins in backward, and holds its states when they are looked at."""

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        adam_step(*args, **kwargs)

    adam_step = host_state.adam_step
    host_state.adam_step = slowly
    for stage in (1, 2, 3):
        engine = start(stage, "nvme", folder=folder)
        step(engine, torch.ones(2, 6) * float("nan"))
        engine.teardown()


def test_weights_on_disk_are_looked_at_while_they_are_updated(tmp_path: Path) -> None:
    run_ranks(nan_while_states_are_on_disk, 2, str(tmp_path))
