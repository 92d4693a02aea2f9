"""Checkpoints of models that are trained in part: frozen weights are saved, or proved to be the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.slow  # many short ones

HIDDEN, RANK, STEPS = 64, 2, 4


class Adapted(nn.Module):
    """A frozen linear layer with trainable factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, HIDDEN) / 8)
        self.up = nn.Parameter(torch.randn(HIDDEN, RANK) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + x @ self.down.T @ self.up.T)


class Net(nn.Module):
    _no_split_modules = ("Adapted",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        self.register_buffer("scale", torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def start(stage: int, seed: int, more: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(more or {})}}
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def steps(engine: Any, first: int) -> list[float]:
    losses = []
    for step in range(first, first + STEPS // 2):
        rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(step))
        loss = engine(rows.chunk(engine.world_size)[engine.rank])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
    return losses


def save(stage: int, folder: str, exclude: bool) -> list[float]:
    engine = start(stage, 0)
    steps(engine, 0)
    engine.save_checkpoint(folder, exclude_frozen_parameters=exclude)
    return steps(engine, STEPS // 2)


def resume(stage: int, folder: str, seed: int, more: dict[str, Any] | None = None) -> Any:
    engine = start(stage, seed, more)
    before = engine.full_state_dict(keep=True)
    try:
        engine.load_checkpoint(folder)
    except hf_zero.CheckpointError as error:
        after = engine.full_state_dict(keep=True)
        assert all(torch.equal(before[name], value) for name, value in after.items()), "loaded in part"
        return str(error)
    return steps(engine, STEPS // 2)


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_digests_instead_of_frozen_weights(stage: int, tmp_path: Path, disk_path: Path) -> None:
    want = run_ranks(save, 2, stage, str(tmp_path), True)[0]
    trainable = 3 * 2 * RANK * HIDDEN
    frozen = 4 * (HIDDEN + 1) * HIDDEN
    assert weights_bytes(tmp_path) < 9 * 4 * trainable < 4 * frozen
    for world_size, other_stage in ((2, stage), (3, 3), (1, 2)):
        got = run_ranks(resume, world_size, other_stage, str(tmp_path), 0)[0]
        assert got == pytest.approx(want, rel=1e-6), (world_size, other_stage)
    offloaded = {"offload_param": {"device": "nvme", "nvme_path": str(disk_path), "max_in_cpu": 0}}
    assert run_ranks(resume, 2, 3, str(tmp_path), 0, offloaded)[0] == pytest.approx(want, rel=1e-6)
    for text in run_ranks(resume, 2, stage, str(tmp_path), 1):
        assert "other values" in text and "layers.0.base.weight" in text and "base model" in text


def test_frozen_weights_are_saved_unless_told_otherwise(tmp_path: Path) -> None:
    want = run_ranks(save, 2, 3, str(tmp_path), False)[0]
    got = run_ranks(resume, 2, 3, str(tmp_path), 1)[0]
    assert got == want, "another seed, the same weights"


def test_readers_name_what_is_absent(tmp_path: Path) -> None:
    run_ranks(save, 2, 3, str(tmp_path), True)
    state = hf_zero.load_fp32_state_dict(tmp_path)
    assert state["layers.0.down"].shape == (RANK, HIDDEN)
    with pytest.raises(hf_zero.CheckpointError, match=r"layers\.0\.base\.weight"):
        state["layers.0.base.weight"]
    trained = hf_zero.load_fp32_state_dict(tmp_path, exclude_frozen_parameters=True)
    assert set(trained) == {"scale", *(f"layers.{index}.{name}" for index in range(3) for name in ("down", "up"))}
