"""Processes that were started together must know of each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_zero


def test_several_processes_without_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(hf_zero.ConfigError, match=r"SLURM_STEP_NUM_TASKS=4(.|\n)*torchrun"):
        hf_zero.initialize(model=nn.Linear(3, 3), config={"zero_optimization": {"stage": 3}})


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": {"stage": 3}})[0]
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert engine.world_size == 1 and not torch.equal(model.weight, before)
