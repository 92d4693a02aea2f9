"""Some parameters lie beside the flat parameters: integer parameters, and modules that move their weights by
themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.distributed.comm import Comm
from hf_zero.runtime.build import share_the_rest
from tests.harness.ranks import run_ranks


class Coded(nn.Module):
    """Rows of a table, chosen by a parameter of integers."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(6).roll(shift), requires_grad=False)
        self.same_codes = self.codes
        self.packed = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        self.table = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)[:, self.codes]


def test_they_go_to_the_compute_device() -> None:
    model = Coded()
    share_the_rest(model, [], Comm(torch.device("meta")))
    assert {param.device.type for param in model.parameters()} == {"meta"}
    assert model.codes is model.same_codes and model.codes.dtype == torch.int64 and model.packed.dtype == torch.int8


def codes_after(stage: int) -> tuple[list[int], bool]:
    model = Coded(shift=dist.get_rank())
    before = model.codes
    optimizer = torch.optim.SGD(model.table.parameters(), lr=0.1)
    config = {"zero_optimization": {"stage": stage}}
    engine: Any = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(1, 6)).sum())
    engine.step()
    return model.codes.tolist(), model.codes is before and model.same_codes is before


def test_they_are_rank_0s() -> None:
    for stage in (0, 2):
        assert run_ranks(codes_after, 2, stage) == [([0, 1, 2, 3, 4, 5], True)] * 2


def rnn_calls(stage: int) -> list[bool]:
    model = nn.Sequential(nn.LSTM(5, 4))
    calls: list[str] = []
    torch.nn.RNNBase.flatten_parameters = lambda self: calls.append("moved")  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine: Any = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    model[0].flatten_parameters()
    engine(torch.ones(2, 1, 5))[0].sum().backward()
    engine.step()
    with_engine = list(calls)
    engine.teardown()
    model[0].flatten_parameters()
    return [not with_engine, bool(calls)]


def test_an_rnn_does_not_move_its_weights_while_the_engine_is_on() -> None:
    for stage in (1, 3):
        assert run_ranks(rnn_calls, 2, stage) == [[True, True]] * 2
