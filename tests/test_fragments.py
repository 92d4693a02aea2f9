"""One parameter's whole gradient and optimizer state, whatever stage and medium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

MEDIA: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "disk": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "max_in_cpu": 0}},
}
CLIP = 0.05


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.single = nn.Parameter(torch.randn(1))  # one rank owns all of it
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.frozen * self.single).square().sum(1).mean()


def build() -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(3)
    model = Net().double()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


Seen = dict[str, dict[str, torch.Tensor | None]]


def reference() -> Seen:
    model, optimizer = build()
    model(rows(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(rows(1)).backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    clipped = {name: p.grad for name, p in model.named_parameters()}
    states: Seen = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        states[kind] = {name: optimizer.state.get(p, {}).get(kind) for name, p in model.named_parameters()}
    return {"grads": grads, "clipped": clipped, **states, "params": dict(model.named_parameters())}


def look(stage: int, medium: dict[str, Any]) -> Seen:
    model, optimizer = build()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **medium}
    config = {"zero_optimization": zero}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    chunk = [rows(step).chunk(engine.world_size)[engine.rank] for step in range(2)]
    engine.backward(engine(chunk[0]))
    engine.step()
    engine.backward(engine(chunk[1]))
    seen: Seen = {}
    seen["grads"] = {name: hf_zero.full_grad(model, name) for name, _ in model.named_parameters()}
    engine.clip_grad_norm_(CLIP)
    seen["clipped"] = {name: hf_zero.full_grad(param) for name, param in model.named_parameters()}
    for kind in ("exp_avg", "exp_avg_sq"):
        seen[kind] = {name: hf_zero.full_optimizer_state(param, kind) for name, param in model.named_parameters()}
    seen["params"] = {name: hf_zero.full_param(param) for name, param in model.named_parameters()}
    with pytest.raises(hf_zero.StateError, match="no optimizer state 'momentum', only exp_avg"):
        hf_zero.full_optimizer_state(model, "momentum", "layers.0.weight")
    engine.step()  # what was looked at is still what the step uses
    seen["after"] = engine.full_state_dict(keep=True)
    return seen


@pytest.mark.parametrize(
    ("stage", "medium"),
    [
        (0, "device"),
        *(pytest.param(1, medium, marks=pytest.mark.slow) for medium in MEDIA),
        *((stage, medium) for stage in (2, 3) for medium in MEDIA),
    ],
)
def test_whole_gradients_and_states(stage: int, medium: str, tmp_path: Path) -> None:
    blocks = {name: {**block, "nvme_path": str(tmp_path)} for name, block in MEDIA[medium].items()}
    if stage < 3:
        blocks.pop("offload_param", None)
    want = reference()
    for seen in run_ranks(look, 2, stage, blocks, timeout=60):
        for what, values in want.items():
            for name, value in values.items():
                got = seen[what][name]
                if value is None:
                    assert got is None, f"{what} of {name}"
                    continue
                assert got is not None and got.shape == value.shape, f"{what} of {name}"
                assert torch.allclose(got, value.detach(), rtol=1e-9, atol=1e-15), f"{what} of {name}"


def alone(stage: int) -> None:
    model, optimizer = build()
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": {"stage": stage}})[0]
    engine.backward(engine(rows(0)))
    if engine.rank == 0:
        with pytest.raises(hf_zero.StateError, match=r"rank\(s\) \[1\] did not"):
            hf_zero.full_grad(model, "layers.0.weight")


def test_on_one_rank_alone_it_raises() -> None:
    run_ranks(alone, 2, 3, timeout=60, env={"HF_ZERO_PRESENCE_TIMEOUT": "2"})
