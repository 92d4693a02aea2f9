"""The ways in which DeepSpeed-Chat builds and saves models at stage 3, which other programs have taken over."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import StateError
from tests.harness.ranks import run_ranks

WIDTH = 16
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Adapted(nn.Module):
    """A layer's weight, which stays frozen, and an adapter beside it, as `LinearLayer_LoRA`."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        rows, columns = getattr(weight, "ds_shape", weight.shape)
        self.right = nn.Parameter(torch.linspace(-1, 1, columns * 2).view(columns, 2))
        self.left = nn.Parameter(torch.zeros(2, rows))
        self.weight.requires_grad = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight) + inputs @ self.right @ self.left


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def adapted(model: nn.Sequential) -> nn.Sequential:
    weight = model[2].weight
    assert isinstance(weight, nn.Parameter)
    model[2] = Adapted(weight).to(weight.device).to(weight.dtype)
    return model


def batch(rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))


def train_alone(steps: int) -> list[float]:
    model = adapted(make())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = model(torch.cat([batch(0), batch(1)])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def build_and_save(folder: str, steps: int) -> tuple[list[float], list[str]]:
    import deepspeed

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = make()
    with torch.no_grad():
        weight = next(model.parameters())
        assert weight.to("cpu") is weight and weight.float() is weight and weight.type() == "torch.FloatTensor"
        with pytest.raises(StateError, match="to needs its values"):
            weight.to(torch.bfloat16)
        with pytest.raises(StateError, match="to needs its values"):
            weight.to("cpu", copy=True)
    engine = deepspeed.initialize(model=adapted(model), config_params=CONFIG)[0]
    losses = []
    for _ in range(steps):
        loss = engine(batch(engine.rank)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if engine.rank == 0:
        torch.save(engine.module.state_dict(), f"{folder}/weights.bin")
        assert {value.numel() for value in torch.load(f"{folder}/weights.bin").values()} == {0}
    whole = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=True):
            if engine.rank == 0:
                whole[name] = param.data.cpu().clone()
    if engine.rank == 0:
        torch.save(whole, f"{folder}/weights.bin")
    return losses, said


def test_adapters_are_put_over_shards_and_full_weights_over_empty_ones(tmp_path: Path) -> None:
    steps = 3
    results = run_ranks(build_and_save, 2, str(tmp_path), steps, as_deepspeed=True)
    wanted = train_alone(steps)
    assert wanted[-1] < wanted[0]
    mean = [sum(pair) / 2 for pair in zip(*(losses for losses, _ in results), strict=True)]
    assert mean == pytest.approx(wanted, rel=1e-5)
    saved = torch.load(tmp_path / "weights.bin")
    assert torch.equal(saved["2.weight"], make()[2].weight) and saved["2.left"].abs().max() > 0
    assert [sum("has no values of theirs" in text for text in said) for _, said in results] == [1, 0]
