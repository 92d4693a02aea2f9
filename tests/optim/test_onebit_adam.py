"""OneBitAdam: the algorithm simulated with all its workers in one process, the bytes that travel, and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero import optim
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError, StateError
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case
from tests.harness.sharded import Options, micro_step, zero_config

FREEZE = 6
PARAMS = {"lr": 0.01, "betas": [0.9, 0.97], "eps": 1e-4, "weight_decay": 0.05, "freeze_step": FREEZE}
BLOCK = {"type": "OneBitAdam", "params": {**PARAMS, "cuda_aware": False, "comm_backend_name": "nccl"}}


def build(case: Case) -> nn.Module:
    """Build the model without the parameters whose true gradient is zero: the sign of a rounding error
    would be sent.
    """
    model = case.build()
    for name, param in model.named_parameters():
        if name.endswith("attention.key.bias"):
            param.requires_grad_(False)
    return model


def begin(case: Case, block: dict[str, Any] = BLOCK) -> ZeroEngine:
    return hf_zero.initialize(model=build(case), config={**zero_config(case, Options(0)), "optimizer": block})[0]


def train(engine: ZeroEngine, case: Case, steps: range) -> list[dict[str, torch.Tensor]]:
    """Parameters after every step."""
    after = []
    for step in steps:
        for micro in range(case.accumulation):
            micro_step(engine, case, step, micro, Options(0))
        after.append({name: value.clone() for name, value in engine.full_state_dict(keep=True).items()})
    return after


def train_anew(case: Case) -> tuple[list[dict[str, torch.Tensor]], list[bool]]:
    engine = begin(case)
    after = train(engine, case, range(case.steps))
    everyone: list[Any] = [None] * case.world
    dist.all_gather_object(everyone, [value.double().sum().item() for value in after[-1].values()])
    return after, [theirs == everyone[0] for theirs in everyone]


# ---------------------------------------------------------------- the simulation
class Worker:
    """A worker holds what one process of the algorithm keeps: its errors as a worker, and as the server of
    its part.
    """

    def __init__(self) -> None:
        self.momentum: dict[str, torch.Tensor] = {}
        self.error: dict[str, torch.Tensor] = {}
        self.server_error: dict[str, torch.Tensor] = {}


def one_bit(values: torch.Tensor) -> torch.Tensor:
    """Signs times |x| / sqrt(n), the scale in fp32 as it travels."""
    if not values.numel():
        return values
    scale = (values.norm() / math.sqrt(values.numel())).float().to(values.dtype)
    return torch.where(values >= 0, scale, -scale)


def compressed_mean(workers: list[Worker], name: str) -> torch.Tensor:
    """One parameter, flat: every worker sends signs, every worker is the server of one part."""
    sent = []
    for worker in workers:
        wanted = worker.momentum[name].reshape(-1) + worker.error.get(name, 0)
        sent.append(one_bit(wanted))
        worker.error[name] = wanted - sent[-1]
    width = -(-sent[0].numel() // (8 * len(workers))) * 8
    parts = []
    for rank, worker in enumerate(workers):
        mean = sum(one[rank * width : (rank + 1) * width] for one in sent) / len(workers)
        mean = mean + worker.server_error.get(name, 0)
        parts.append(one_bit(mean))
        worker.server_error[name] = mean - parts[-1]
    return torch.cat(parts)


def simulate(case: Case) -> list[dict[str, torch.Tensor]]:
    model = build(case)
    workers = [Worker() for _ in range(case.world)]
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    variance = {name: torch.zeros_like(param) for name, param in params.items()}
    beta1, beta2 = PARAMS["betas"]
    after = []
    for step in range(case.steps):
        grads = [gradients(model, params, case, step, rank) for rank in range(case.world)]
        frozen = step >= FREEZE
        if not frozen:
            mean = {name: sum(mine[name] for mine in grads) / case.world for name in params}
            grads = [mean] * case.world
        squares = [sum(float(grad.square().sum()) for grad in mine.values()) for mine in grads]
        factor = min(1.0, case.clip / (math.sqrt(sum(squares) / case.world) + 1e-6))
        for name, param in params.items():
            for worker, mine in zip(workers, grads, strict=True):
                before = worker.momentum.get(name, torch.zeros_like(param))
                worker.momentum[name] = beta1 * before + (1 - beta1) * factor * mine[name]
            if frozen:
                shared = compressed_mean(workers, name).view(param.shape)
                shared = torch.where(variance[name] == 0, 0.0, shared)
                for worker in workers:
                    worker.momentum[name] = shared
            else:
                variance[name] = beta2 * variance[name] + (1 - beta2) * (factor * grads[0][name]) ** 2
            update = workers[0].momentum[name] / (variance[name].sqrt() + PARAMS["eps"])
            param.data -= PARAMS["lr"] * (update + PARAMS["weight_decay"] * param.data)
        after.append({name: param.detach().clone() for name, param in params.items()})
    return after


def gradients(
    model: nn.Module, params: dict[str, nn.Parameter], case: Case, step: int, rank: int
) -> dict[str, torch.Tensor]:
    for micro in range(case.accumulation):
        (model(**case.batch(step, micro, rank))["loss"] / case.accumulation).backward()
    found = {name: param.grad.clone() for name, param in params.items() if param.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("world", "accumulation"),
    [(2, 1), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow)],
)
def test_it_follows_a_simulation_of_all_workers(world: int, accumulation: int) -> None:
    case = Case("plain", world, accumulation, steps=20)
    want = simulate(case)
    (got, alike), *_ = run_ranks(train_anew, world, case)
    assert all(alike), "all ranks hold the same parameters"
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-9, msg=f"step {step}, {name}")
    for name, value in want[-1].items():
        assert float((value - want[FREEZE][name]).abs().max()) > 0.01, f"{name} moved after the freeze"


# ---------------------------------------------------------------- bytes
class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(200, 301), nn.Tanh(), nn.Linear(301, 20))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(x), y)


def count_bytes() -> tuple[dict[str, int], dict[str, int], int, list[float]]:
    """Return (bytes of a step before the freeze, of one after it, elements, losses)."""
    model = Wide()
    numel = sum(param.numel() for param in model.parameters())
    block = {"type": "OneBitAdam", "params": {"lr": 2e-3, "freeze_step": 10, "eps": 1e-6, "betas": [0.9, 0.9]}}
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": block}
    engine = hf_zero.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = torch.randn(8, 200, generator=generator), torch.randn(8, 20, generator=generator)
    counts, losses = [], []
    for _ in range(40):
        engine.comm.counts.clear()
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        counts.append({op: count.nbytes for op, count in engine.comm.counts.items() if op != "vote"})
    assert counts[9] == counts[0] and counts[10] == counts[-1]
    return counts[9], counts[10], numel, losses


def test_after_the_freeze_one_bit_travels_per_element() -> None:
    before, after, numel, losses = run_ranks(count_bytes, 2)[0]
    assert set(before) == {"all_reduce"} and before["all_reduce"] >= 4 * numel
    # An all-reduce is a reduce-scatter and an all-gather: here both carry bits, and four bytes per tensor and rank.
    assert set(after) == {"all_to_all", "all_gather"}
    for nbytes in after.values():
        assert numel / 8 <= nbytes <= 1.02 * numel / 8, (nbytes / (4 * numel), 1 / 32)
    assert losses[-1] < 0.5 * losses[9] < losses[0], "it goes on learning"


# ---------------------------------------------------------------- resuming, and what is refused
def save_after(case: Case, steps: int, folder: str) -> None:
    engine = begin(case)
    train(engine, case, range(steps))
    engine.save_checkpoint(folder)


def resume(case: Case, steps: range, folder: str) -> tuple[list[dict[str, torch.Tensor]], list[set[str]]]:
    engine = begin(case)
    engine.load_checkpoint(folder)
    kinds = []
    after = []
    for step in steps:
        engine.comm.counts.clear()
        after += train(engine, case, range(step, step + 1))
        kinds.append(set(engine.comm.counts) - {"vote"})
    return after, kinds


@pytest.mark.slow
def test_resume_before_and_after_the_freeze(tmp_path: Path) -> None:
    case = Case("plain", 2, steps=FREEZE + 2)
    want = simulate(case)
    run_ranks(save_after, 2, case, FREEZE - 1, str(tmp_path / "early"))
    (after, kinds), *_ = run_ranks(resume, 2, case, range(FREEZE - 1, FREEZE + 2), str(tmp_path / "early"))
    for name, value in want[-1].items():
        torch.testing.assert_close(after[-1][name], value, rtol=0, atol=1e-9, msg=name)
    assert kinds == [{"all_reduce"}, {"all_to_all", "all_gather"}, {"all_to_all", "all_gather"}]
    # At the moment of the freeze there are no errors yet, so going on from there is exact too; later they start anew.
    run_ranks(save_after, 2, case, FREEZE, str(tmp_path / "late"))
    (after, kinds), *_ = run_ranks(resume, 2, case, range(FREEZE, FREEZE + 2), str(tmp_path / "late"))
    for name, value in want[-1].items():
        torch.testing.assert_close(after[-1][name], value, rtol=0, atol=1e-9, msg=name)
    assert kinds == [{"all_to_all", "all_gather"}] * 2


def attach(stage: int) -> None:
    model = nn.Linear(3, 3)
    optimizer = optim.OneBitAdam(model.parameters())
    hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": {"stage": stage}})


def test_it_needs_stage_0() -> None:
    with pytest.raises(ConfigError, match="does not go with ZeRO"):
        hf_zero.ZeroConfig.load({"zero_optimization": {"stage": 1}, "optimizer": BLOCK}).resolve()
    for failure in run_ranks(attach, 2, 2, expect_error=True):
        assert failure.kind == "ConfigError" and "needs stage 0" in failure.message


def test_a_parameter_that_comes_after_the_freeze_is_said() -> None:
    first, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = optim.OneBitAdam([first, late], freeze_step=1)
    first.grad = torch.tensor([1.0, -1.0, 0.0])
    optimizer.step()
    late.grad = torch.ones(3)
    with pytest.raises(StateError, match="first gradient after 1 steps"):
        optimizer.step()
    assert optimizer.is_frozen and first[2] == 1.0
