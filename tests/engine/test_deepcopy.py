"""copy.deepcopy of a sharded model is a sharded model of its own; of a part of it, a plain module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks
from tests.runtime.test_second_model import Net


class Tied(Net):
    """The model has a parameter that two modules share, one that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)
        self.register_buffer("scale", torch.arange(7.0).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.again(x)
        return super().forward(h + self.scale.to(h.dtype))


def copied(stage: int, more: dict[str, Any], cast: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Tied().float() if cast else Tied().double()
    x = torch.randn(3, 7, dtype=torch.float64 if not cast else torch.float32)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10, **more}
    config: dict[str, Any] = {"zero_optimization": zero, **({"bf16": {"enabled": True}} if cast else {})}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    model(x).sum().backward()
    engine.step()
    before = model(x).detach()
    twin = copy.deepcopy(model)
    part = copy.deepcopy(model.layers[0])
    assert type(part.weight) is nn.Parameter and not part.weight.isnan().any()
    assert torch.equal(part.weight, hf_zero.full_param(model, "layers.0.weight"))
    other = hf_zero.engine_of(twin)
    assert (other is not None) == (stage == 3) and other is not engine
    assert {id(p) for p in twin.parameters()}.isdisjoint({id(p) for p in model.parameters()})
    assert twin.again.weight is twin.layers[0].weight and not twin.layers[1].bias.requires_grad
    same = torch.equal(twin(x), before)
    # The original trains on, the copy stays.
    for _ in range(2):
        model(x).sum().backward()
        engine.step()
    with torch.no_grad():
        stays = torch.equal(twin(x), before)
        moved = not torch.equal(model(x), before)
    if other is not None:
        assert other.memory_report()["optimizer"] == 0 == other.memory_report()["master"]
        # A copy trains once it meets an optimizer.
        again, *_ = hf_zero.initialize(model=twin, optimizer=torch.optim.SGD(twin.parameters(), lr=0.1), config=config)
        twin(x).sum().backward()
        again.step()
        with torch.no_grad():
            stays &= not torch.equal(twin(x), before)
    return {"same": same, "stays": stays, "moved": moved}


CASES = {
    "whole": (1, {}, False),
    "device": (3, {}, False),
    "bf16": (3, {}, True),
    "host": (3, {"offload_param": {"device": "cpu"}}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_copies_of_a_model(case: str) -> None:
    for outcome in run_ranks(copied, 2, *CASES[case]):
        assert outcome == {"same": True, "stays": True, "moved": True}


def on_disk(folder: str) -> dict[str, Any]:
    return copied(3, {"offload_param": {"device": "nvme", "nvme_path": folder}}, False)


def test_copies_of_a_model_on_disk(tmp_path: Any) -> None:
    assert all(all(outcome.values()) for outcome in run_ranks(on_disk, 2, str(tmp_path)))


def copied_alone() -> str:
    model = hf_zero.shard(Net(), {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
    engine = hf_zero.engine_of(model)
    assert engine is not None
    if engine.rank == 0:
        with pytest.raises(hf_zero.StateError, match="deepcopy"):
            copy.deepcopy(model)
    engine.comm.barrier("end")
    return "raised"


@pytest.mark.slow
def test_a_copy_on_one_rank_only_raises() -> None:
    assert run_ranks(copied_alone, 2, timeouts={"presence": 1}) == ["raised"] * 2
