"""Memory of a run with states on disk: bounded by the staging pool, and flat over steps and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from tests.harness.memory import anonymous_bytes
from tests.harness.ranks import run_ranks

WIDTH, LAYERS = 1024, 12
MIB = 1 << 20


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def start(device: str, folder: str, width: int, layers: int, **zero: Any) -> ZeroEngine:
    model = Net(width, layers)
    block = {"device": device, "nvme_path": folder}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": block, **zero}, "gradient_clipping": 1.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: ZeroEngine, width: int) -> None:
    engine.backward(engine(torch.randn(2, width)))
    engine.step()


def grown(device: str, folder: str) -> tuple[int, int, int]:
    """Return (anonymous memory that training brought, bytes of states, bytes of the staging pool)."""
    before = anonymous_bytes()  # of what the fork server has imported: more in a later job
    engine = start(device, folder, WIDTH, LAYERS, sub_group_size=1 << 17)
    for _ in range(2):  # gradients and activations have their memory before the states are touched a second time
        step(engine, WIDTH)
    engine.finish_updates()
    report = engine.memory_report()
    return anonymous_bytes() - before, report["master"] + report["optimizer"], 4 * 3 * 4 * (1 << 17)


@pytest.mark.slow
def test_states_on_disk_take_the_memory_of_the_pool(tmp_path: Path) -> None:
    on_host, states, _ = run_ranks(grown, 1, "cpu", str(tmp_path), timeout=90)[0]
    on_disk, _, pool = run_ranks(grown, 1, "nvme", str(tmp_path), timeout=90)[0]
    assert states > 100 * MIB and pool < 10 * MIB
    assert on_disk <= on_host - states + pool + 16 * MIB


def slope(folder: str) -> list[int]:
    """Anonymous bytes after every tenth of 120 steps, a checkpoint with each."""
    engine = start("nvme", folder, 128, 6, sub_group_size=3000)
    sizes = []
    for number in range(1, 121):
        step(engine, 128)
        if number % 10 == 0:
            engine.save_checkpoint(f"{folder}/checkpoint")
            sizes.append(anonymous_bytes())
    return sizes


@pytest.mark.slow
def test_memory_does_not_grow_with_steps_and_checkpoints(tmp_path: Path) -> None:
    for sizes in run_ranks(slope, 2, str(tmp_path), timeout=90):
        assert sizes[-1] - sizes[3] < 2 * MIB, f"MiB: {[size / MIB for size in sizes]}"
