"""A frozen model beside the one in training: a reference, spread over the ranks by itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

STEPS = 4


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.head


def build() -> tuple[Net, Net]:
    """(policy, reference), equal at the start, as in preference training."""
    torch.manual_seed(3)
    policy = Net().double()
    return policy, copy.deepcopy(policy)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (chosen, rejected)."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(2, 6, 7, dtype=torch.float64, generator=generator)
    return rows[0], rows[1]


def preference_loss(policy: nn.Module, reference: nn.Module, chosen: torch.Tensor, rejected: torch.Tensor) -> Any:
    """The loss of direct preference optimization (Rafailov et al., 2023) over scores."""
    with torch.no_grad():
        base = reference(chosen) - reference(rejected)
    return -nn.functional.logsigmoid(policy(chosen) - policy(rejected) - base).mean()


def in_one_process() -> tuple[list[float], dict[str, torch.Tensor]]:
    policy, reference = build()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = preference_loss(policy, reference, *batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(policy.state_dict())


def train(stage: int, second: dict[str, Any] | None) -> dict[str, Any]:
    policy, reference = build()
    want_reference = {name: value.clone() for name, value in reference.state_dict().items()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = hf_zero.initialize(model=policy, optimizer=optimizer, config={"zero_optimization": zero})[0]
    config = None if second is None else {"zero_optimization": second}
    assert hf_zero.shard(reference, config) is reference
    other = hf_zero.engine_of(reference)
    assert other is not None and other is not engine
    losses = []
    for step in range(STEPS):
        mine = [rows.chunk(engine.world_size)[engine.rank] for rows in batch(step)]
        loss = preference_loss(policy, reference, *mine)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
    kept = other.full_state_dict(keep=True)
    for name, value in want_reference.items():
        assert torch.equal(kept[name], value), name
    report = other.memory_report()
    with pytest.raises(hf_zero.StateError, match="already has"):
        hf_zero.shard(policy)
    other.teardown()
    assert hf_zero.engine_of(reference) is None
    return {"losses": losses, "weights": engine.full_state_dict(keep=True), "report": report}


SECOND: dict[str, dict[str, Any] | None] = {
    "default": None,
    "stage 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "on the host": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}},
    "on disk": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "nvme", "max_in_cpu": 0},
    },
    "whole": {"stage": 0},
}


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("second", SECOND)
def test_preference_training_with_a_sharded_reference(second: str, stage: int, tmp_path: Path) -> None:
    config = SECOND[second]
    if second == "on disk":
        assert config is not None
        config = {**config, "offload_param": {**config["offload_param"], "nvme_path": str(tmp_path)}}
    want_losses, want = in_one_process()
    assert len(set(want_losses)) == STEPS
    for got in run_ranks(train, 2, stage, config, timeout=60):
        assert got["losses"] == pytest.approx(want_losses, rel=1e-9)
        for name, value in want.items():
            assert (got["weights"][name] - value).abs().max() <= 1e-9 * value.abs().max(), name
        report = got["report"]
        assert report["gradients"] == report["master"] == report["optimizer"] == 0, "a frozen model has none"
        if second in ("stage 3", "on the host", "on disk"):
            whole = sum(value.numel() * value.element_size() for value in want.values())
            assert report["parameters"] <= whole / 2 * 1.2
        assert (report["disk"] > 0) == (second == "on disk")
        assert (report["host"] > 0) == (second == "on the host")
    assert not list(tmp_path.glob("hf_zero_swap/*/*/*"))


def test_alone() -> None:
    """One process, no launcher: the model works as before."""
    _, model = build()
    want = model(batch(0)[0])
    got = hf_zero.shard(model)(batch(0)[0])
    assert torch.equal(got, want.detach()) and not got.requires_grad


class Difference(torch.autograd.Function):
    """Squares of the differences of two heads' outputs, without gradients inside, as fused losses of TRL compute."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, theirs: torch.Tensor, head: torch.Tensor, other: Any) -> torch.Tensor:
        difference = hidden @ head - theirs @ other[:].to(head.dtype)
        ctx.save_for_backward(difference, hidden, head)
        return difference.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        difference, hidden, head = ctx.saved_tensors
        scaled = grad * difference * 2 / difference.numel()
        return scaled.unsqueeze(-1) * head, None, torch.einsum("...,...d->d", scaled, hidden), None


class Student(Net):
    """A net that returns its loss beside a teacher."""

    def forward(self, x: torch.Tensor, teacher: Any = None) -> torch.Tensor:
        hidden = self.layers[1](self.layers[0](x))
        with torch.no_grad():
            theirs = teacher.layers[0](x)
        loss: torch.Tensor = Difference.apply(hidden, theirs, self.head, teacher.head)
        return loss


def pair() -> tuple[Student, Net]:
    torch.manual_seed(3)
    return Student().double(), Net().double()


def distill() -> list[float]:
    student, teacher = pair()
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    engine = hf_zero.initialize(model=student, optimizer=optimizer, config=config)[0]
    hf_zero.shard(teacher, config)
    losses = []
    for step in range(STEPS):
        loss = engine(batch(step)[0].chunk(engine.world_size)[engine.rank], teacher)
        engine.backward(loss)
        engine.step()
        losses.append(float(engine.comm.vote(loss.detach()[None].double(), "loss")[0]) / engine.world_size)
    with torch.no_grad(), pytest.raises(hf_zero.StateError, match="head is sharded"):
        teacher.head.sum()
    return losses


def test_a_loss_without_gradients_inside_reads_a_teacher() -> None:
    student, teacher = pair()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    wanted = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = student(batch(step)[0], teacher)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert wanted[-1] < wanted[0]
    for losses in run_ranks(distill, 2):
        assert losses == pytest.approx(wanted, rel=1e-9)
