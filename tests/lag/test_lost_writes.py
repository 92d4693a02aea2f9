"""Writes to sharded parameters, on a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from tests.harness.ranks import run_ranks
from tests.lag import device, group

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

Write = Callable[[nn.Parameter], object]
_NAMES = ("layers.1.scale", "layers.1.shift")  # of one flat parameter


class Block(nn.Module):
    """The parameters have one element, so all operations can write to them while they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale + self.shift)


class Layers(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def fill(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.fill_(1.0)


def fill_in_inference(param: nn.Parameter) -> None:
    with torch.inference_mode():
        param.fill_(1.0)


def zero_many(param: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_zero_([param])


def initialize(param: nn.Parameter) -> None:
    nn.init.normal_(param)


def multiply(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(2.0)


def update(param: nn.Parameter) -> None:
    """Update by an optimizer that hf_zero does not know."""
    param.grad = torch.ones(1, device=param.device)
    torch.optim.SGD([param], lr=0.1).step()
    param.grad = None


def fill_detached(param: nn.Parameter) -> None:
    param.detach().fill_(1.0)


def fill_data(param: nn.Parameter) -> None:
    param.data.fill_(1.0)


def _start() -> tuple[ZeroEngine, torch.Tensor]:
    device.enable()
    group.register()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = hf_zero.initialize(model=Layers().to(device.NAME), config=config)
    return engine, torch.ones(2, 5, device=engine.device)


def _write_all(writes: list[Write]) -> list[str]:
    """Return what each of the writes says; check that the engine goes on with the weights that it had."""
    engine, x = _start()
    params = dict(engine.module.named_parameters())
    before = engine.full_state_dict(keep=True)
    said = []
    for write in writes:
        for name in _NAMES:
            with pytest.raises(hf_zero.StateError) as caught:
                write(params[name])
            params[name].grad = None
            said.append(str(caught.value))
    after = engine.full_state_dict(keep=True)
    assert all(torch.equal(before[name], value) for name, value in after.items())
    engine.backward(engine(x))
    engine.step()
    assert engine.global_steps == 1
    return said


def test_each_raises_at_once() -> None:
    writes = [fill, fill_in_inference, zero_many, initialize, multiply, update, fill_detached, fill_data]
    for said in run_ranks(_write_all, 2, writes):
        for text, name in zip(said, _NAMES * len(writes), strict=True):
            assert name in text and "gathered_params" in text and "is sharded" in text
