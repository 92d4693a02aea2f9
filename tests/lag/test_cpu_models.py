"""A model of the CPU that is handed over where the lag device computes: its parameters move, as the same objects.

torch exchanges no data between the CPU and a device that it does not know (`param.data = ...` is refused).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from tests.harness.ranks import run_ranks
from tests.lag import device, group

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

VOCABULARY, HIDDEN = 11, 8


class Tied(nn.Module):
    """An embedding that is the head as well, and a parameter that no unit holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.mlp = nn.Linear(HIDDEN, HIDDEN)
        self.count = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.mlp(self.embed(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1).flatten()) * self.count.sum()


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def _config(stage: int) -> dict[str, object]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}


def _on_lag(case: Callable[[int], None], stage: int) -> None:
    device.enable()
    group.register()
    torch.manual_seed(0)
    case(stage)
    torch.accelerator.synchronize()
    assert device.take_reports() == []


def parameters_stay_the_same_objects(stage: int) -> None:
    model, fired = Tied(), list[str]()
    model.embed.weight.note = "kept"  # type: ignore[attr-defined]
    model.mlp.weight.register_hook(lambda grad: fired.append(str(grad.device)))
    before = dict(model.named_parameters())
    groups = [{"params": list(model.mlp.parameters()), "lr": 0.0}, {"params": [model.embed.weight]}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    engine, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=_config(stage))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert model.head.weight is model.embed.weight and model.embed.weight.note == "kept"  # type: ignore[attr-defined]
    assert {param.device for param in after.values()} == {engine.device}
    start = {name: value.cpu() for name, value in engine.full_state_dict(keep=True).items()}
    engine.backward(engine(torch.arange(6, device=engine.device).view(2, 3)))
    engine.step()
    end = {name: value.cpu() for name, value in engine.full_state_dict(keep=True).items()}
    assert fired == [str(engine.device)], "a hook of the script's own"
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {"embed.weight", "head.weight"}, "each parameter keeps its param group's learning rate"


def model_is_built_in_shards(stage: int) -> None:
    with hf_zero.sharded_init(_config(stage)):
        model = Tied()
    assert model.head.weight is model.embed.weight
    torch.manual_seed(0)
    engine = hf_zero.engine_of(model)
    assert engine is not None
    full = engine.full_state_dict(keep=True)
    for name, value in Tied().state_dict().items():
        assert torch.equal(full[name].cpu(), value), name


def what_torch_refuses_is_a_sentence(stage: int) -> None:
    model = Tied()
    kept = weakref.ref(model.mlp.weight)
    with pytest.raises(StateError, match=r"cannot move from cpu to lag:\d.*weakref(.|\n)*move it there first"):
        hf_zero.initialize(model=model, config=_config(stage))
    assert kept() is model.mlp.weight


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_stay_the_same_objects(stage: int) -> None:
    run_ranks(_on_lag, 2, parameters_stay_the_same_objects, stage)


def test_model_is_built_in_shards() -> None:
    run_ranks(_on_lag, 2, model_is_built_in_shards, 3)


def test_what_torch_refuses_is_a_sentence() -> None:
    run_ranks(_on_lag, 2, what_torch_refuses_is_a_sentence, 3)
