"""An optimizer block builds torch's fused Adam, AdamW, SGD and Adagrad: no temporaries at the step.

What the bits are, on the CPU: the kernel treats what fills its vectors and the rest at the end of a tensor by other
instructions, which may round the last bit differently. So the same cuts give the same bits, run after run; other cuts
(another stage, another number of ranks) agree within the last bits, as before within the rounding of the reduction.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.optim.registry import can_be_fused, optimizer_of
from tests.harness.ranks import run_ranks

WIDTH = 37
BLOCKS: dict[str, dict[str, Any]] = {
    "Adam": {"type": "Adam", "params": {"lr": 0.02, "weight_decay": 0.1}},
    "AdamW": {"type": "AdamW", "params": {"lr": 0.02, "amsgrad": True}},
    "SGD": {"type": "SGD", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 0.05}},
}


def resolved(block: dict[str, Any]) -> dict[str, Any]:
    config = hf_zero.ZeroConfig.load({"train_batch_size": 1, "optimizer": block}).resolve()
    assert config.optimizer is not None
    return config.optimizer


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_fused_unless_it_says_how(name: str) -> None:
    model = nn.Linear(2, 2)
    block = resolved(BLOCKS[name])
    kind, arguments = optimizer_of(block, model)
    on_cpu = not torch.accelerator.is_available()
    assert arguments.get("fused", False) == (on_cpu or name != "Adagrad")
    kind(model.parameters(), **arguments)
    for choice in ("foreach", "fused", "differentiable", "capturable"):
        if choice == "capturable" and name in ("SGD", "Adagrad"):
            continue
        params = {**BLOCKS[name]["params"], choice: False}
        _, own = optimizer_of({**block, "params": {**block["params"], choice: False}}, model)
        assert own.get("fused", False) is False and own[choice] is False, params


def test_momentum_may_begin_later_for_some_parameters() -> None:
    """torch's fused SGD fails where one parameter has a momentum buffer and another has none yet."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    both = nn.Sequential(first, second)
    kind, arguments = optimizer_of(resolved({"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}), both)
    optimizer = kind(both.parameters(), **arguments)
    first(torch.ones(2)).sum().backward()
    optimizer.step()
    before = second.weight.detach().clone()
    both(torch.ones(2)).sum().backward()
    optimizer.step()
    assert "fused" not in arguments and not torch.equal(before, second.weight)


def test_what_the_kernels_do_not_take() -> None:
    real, mixed = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    assert can_be_fused([real, counts]) and can_be_fused([{"params": [real]}, {"params": real}])
    assert not can_be_fused([real, mixed]) and not can_be_fused([{"params": [mixed]}])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def trained(name: str, stage: int) -> tuple[dict[str, torch.Tensor], bool]:
    torch.manual_seed(0)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": BLOCKS[name], "zero_optimization": zero}
    engine: Any = hf_zero.initialize(model=Net(), config=config)[0]
    for number in range(6):
        engine.backward(engine(batch(number, engine.rank)))
        engine.step()
    return engine.full_state_dict(keep=True), bool(engine.optimizer.param_groups[0]["fused"])


def reference(name: str) -> dict[str, torch.Tensor]:
    """torch.optim's plain loop over whole parameters."""
    torch.manual_seed(0)
    model = Net()
    block = resolved(BLOCKS[name])
    make = getattr(torch.optim, block["type"])
    optimizer = make(model.parameters(), **block["params"], foreach=False)
    for number in range(6):
        optimizer.zero_grad()
        (sum(model(batch(number, rank)) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_fused_update_is_torchs_and_repeats_to_the_bit(name: str, stage: int) -> None:
    want = reference(name)
    torch.manual_seed(0)
    assert not torch.allclose(want["layers.0.weight"], Net().layers[0].weight, atol=1e-3), "vacuous: nothing moved"
    first, second = run_ranks(trained, 2, name, stage), run_ranks(trained, 2, name, stage)
    for (weights, fused), (again, _) in zip(first, second, strict=True):
        assert fused
        for key, value in want.items():
            torch.testing.assert_close(weights[key], value, rtol=2e-5, atol=2e-6)
            assert torch.equal(weights[key], again[key]) and torch.equal(weights[key], first[0][0][key])
