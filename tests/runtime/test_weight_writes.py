"""Writes to weights beside the optimizer's: kept, where they are the same on all ranks, or an error; never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_zero
from tests.harness.ranks import run_ranks

WIDTH, STEPS = 6, 4
STAGES = (0, 1, 2, 3)

Params = dict[str, torch.Tensor]


class Clamped(nn.Linear):
    """A weight that its own forward limits (as in WGAN)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Net(nn.Module):
    _no_split_modules = ("Clamped", "Embedding")

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.second = Clamped(WIDTH, WIDTH), Clamped(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.gain.clamp_(max=0.95)
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = torch.tanh(x) * self.gain
        return x


def rows(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=dtype)


def build(recompute: bool, dtype: torch.dtype) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(recompute).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def clamped_plain(recompute: bool, dtype: torch.dtype) -> tuple[list[float], Params]:
    model, optimizer = build(recompute, dtype)
    losses = []
    for step in range(STEPS):
        losses.append(0.0)
        for rank in range(2):
            loss = model(rows(step, rank, dtype)).sum() / 2
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    model(rows(STEPS, 0, dtype))
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def clamped(runs: list[tuple[int, bool, torch.dtype, dict[str, Any]]]) -> list[tuple[list[float], Params]]:
    results = []
    for stage, recompute, dtype, zero in runs:
        model, optimizer = build(recompute, dtype)
        config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}}
        engine: Any = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        losses = []
        for step in range(STEPS):
            loss = engine(rows(step, engine.rank, dtype)).sum()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with torch.no_grad():
            engine(rows(STEPS, 0, dtype))
        if stage < 3:
            engine.schedule.param_grads.collect_all()  # a step does
        results.append((losses, engine.full_state_dict(keep=True)))
    return results


@pytest.mark.slow
def test_a_forward_may_write_to_its_own_weight() -> None:
    wide, narrow = torch.float64, torch.float32
    runs: list[tuple[int, bool, torch.dtype, dict[str, Any]]] = [(stage, False, wide, {}) for stage in STAGES]
    runs += [(3, True, wide, {}), (2, True, wide, {})]
    runs += [(stage, False, narrow, {"offload_optimizer": {"device": "cpu"}}) for stage in (1, 2, 3)]
    runs += [(3, False, narrow, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})]
    unclamped = build(False, wide)[0].first.weight
    assert unclamped.abs().max() > 0.1, "vacuous"
    both = run_ranks(clamped, 2, runs)
    for run, *results in zip(runs, *both, strict=True):
        losses, params = clamped_plain(run[1], run[2])
        tolerance = 1e-12 if run[2] == wide else 1e-5
        mean = [sum(pair) / 2 for pair in zip(*(result[0] for result in results), strict=True)]
        assert mean == pytest.approx(losses, rel=tolerance * 10), run
        for _, got in results:
            assert got["first.weight"].abs().max() <= 0.1
            for name, value in params.items():
                torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=f"{run}: {name}")


# -------------------------------------------------------------------- between steps, with 16-bit parameters
def written_between_steps(stage: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine: Any = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    with torch.no_grad():
        model[0].bias.fill_(3.0)
    engine.backward(engine(torch.ones(1, WIDTH)).float().sum())
    engine.step()
    return float(model[0].bias[0]), float(hf_zero.full_optimizer_state(model[0].bias, "master")[0])


def test_a_write_to_a_16_bit_copy_reaches_the_master() -> None:
    for stage in (0, 1, 2):
        for value, master in run_ranks(written_between_steps, 2, stage):
            assert value == pytest.approx(3.0, abs=0.02) and master == pytest.approx(3.0, abs=0.02) and master != 3.0


# -------------------------------------------------------------------- nn.Embedding(max_norm)
def renormed(stage: int, own_rows: bool) -> Params:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 1))
    engine: Any = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = dist.get_world_size() if stage >= 0 else 1
    if stage >= 0:
        config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    ids = torch.arange(6)
    for _ in range(2):
        mine = ids.chunk(world)[engine.rank] if own_rows and stage >= 0 else ids
        engine(mine).mean().backward()
        engine.step() if stage >= 0 else (optimizer.step(), optimizer.zero_grad())
    return engine.full_state_dict(keep=True) if stage >= 0 else model.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_max_norm(stage: int) -> None:
    want = renormed(-1, False)
    for got in run_ranks(renormed, 2, stage, False):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
    for failure in run_ranks(renormed, 2, stage, True, expect_error=True):
        assert failure.kind == "StateError" and "max_norm" in failure.message and "0.weight" in failure.message


# -------------------------------------------------------------------- writes that cannot be kept
class Plain(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.body(x)))


def assign_data(model: Any) -> None:
    model.out.bias.data = torch.full((1,), 5.0)


def assign_vector(model: Any) -> None:
    numel = sum(param.numel() for param in model.parameters())
    nn.utils.vector_to_parameters(torch.ones(numel), model.parameters())


def assign_parameter(model: Any) -> None:
    model.out.bias = nn.Parameter(torch.full((1,), 5.0))


def assign_module(model: Any) -> None:
    model.out = nn.Linear(WIDTH, 1)


def add_module(model: Any) -> None:
    model.body.extra = nn.Linear(WIDTH, 1)


LOST: dict[str, Callable[[Any], None]] = {
    one.__name__: one for one in (assign_data, assign_vector, assign_parameter, assign_module, add_module)
}


def start(stage: int) -> Any:
    torch.manual_seed(0)
    model = Plain()
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "desync_timeout": 20}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_once(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, WIDTH)).sum())
    engine.step()


def lost(stage: int, what: str, then: str) -> str:
    engine = start(stage)
    train_once(engine)
    with pytest.raises(hf_zero.StateError) as raised:
        LOST[what](engine.module)  # a parameter that is sharded refuses by itself
        train_once(engine) if then == "train" else engine.full_state_dict(keep=True)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("what", LOST)
def test_a_write_that_would_be_lost_raises(what: str) -> None:
    name = "body.extra.weight" if what == "add_module" else ".weight" if what == "assign_vector" else "out.bias"
    for stage in STAGES:
        for then in ("train", "save"):
            for text in run_ranks(lost, 2, stage, what, then):
                assert name in text and "hf_zero.set_full_param" in text and "gathered_params" in text, (stage, then)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def with_changed_modules(stage: int) -> tuple[float, float]:
    engine = start(stage)
    before = engine.full_state_dict(keep=True)["body.weight"]
    engine.module.body = Wrapped(engine.module.body)
    engine.module.note = nn.Parameter(torch.ones(3), requires_grad=False)
    train_once(engine)
    after = hf_zero.full_param(engine.module.body.inner.weight)
    return float((after - before).abs().max()), float(after.sum())


def test_modules_may_change_around_the_parameters() -> None:
    moved = {stage: run_ranks(with_changed_modules, 2, stage)[0] for stage in STAGES}
    assert moved[0][0] > 0 and all(one == pytest.approx(moved[0], rel=1e-5) for one in moved.values())
