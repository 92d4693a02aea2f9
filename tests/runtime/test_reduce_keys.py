"""The keys that say in which type gradients travel and what they are divided by, before the sum and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError
from tests.distributed.test_communication_keys import CASE, SLOW, Keys, Sent, equal, record, train
from tests.harness.ranks import run_ranks
from tests.harness.sharded import Options


def exchange(stage: int, config: dict[str, Any], zero: dict[str, Any], grad: float) -> tuple[list[Sent], torch.Tensor]:
    """One backward in which rank r has the gradient (r + 1) x `grad` everywhere; the mean that reached the shards."""
    engine, sent = _engine_of_one(stage, config, zero)
    engine.backward(engine((engine.rank + 1) * grad * torch.ones(1)))
    engine.optimizer.clip_grad_norm(float("inf"))  # type: ignore[union-attr]
    return [one for one in sent if one.op in ("reduce_scatter", "all_reduce")], _whole_grad(engine)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * factor).sum()


def _engine_of_one(stage: int, config: dict[str, Any], zero: dict[str, Any]) -> tuple[ZeroEngine, list[Sent]]:
    model = Scaled()
    full = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        **config,
    }
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=full)[0]
    return engine, record(engine.comm)


def _whole_grad(engine: ZeroEngine) -> torch.Tensor:
    grad = hf_zero.full_grad(engine.module.weight)
    assert grad is not None
    return grad


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=SLOW) for stage in (0, 1, 3))])
@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_communication_data_type(stage: int, name: str, dtype: torch.dtype) -> None:
    """1 + 2^-9 is no bf16: only a sum of such values in another type than the one asked for would show it."""
    value = 1 + 2.0**-9
    as_sent = torch.tensor(value).to(dtype).float().item()
    for sent, grad in run_ranks(exchange, 2, stage, {"communication_data_type": name}, {}, value):
        assert {one.dtype for one in sent} == {dtype} and sent
        rank1 = torch.tensor(2 * value).to(dtype).float().item()
        total = torch.tensor(as_sent + rank1)
        assert torch.equal(grad, total.expand(32) / 2)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=SLOW) for stage in (1, 2, 3))])
def test_a_sum_that_fp16_does_not_hold(stage: int) -> None:
    """Addends travel in fp16 and fit; their sums, 60000 and 90000, are taken in fp32 at every stage."""
    for sent, grad in run_ranks(exchange, 2, stage, {"communication_data_type": "fp16"}, {}, 40000.0 / 2):
        assert {one.dtype for one in sent} == {torch.float16}
        assert torch.equal(grad, torch.full((32,), 30000.0))
    for _, grad in run_ranks(exchange, 2, stage, {"communication_data_type": "fp16"}, {}, 60000.0 / 2):
        assert torch.equal(grad, torch.full((32,), 45000.0))


def sum_of_bf16(stage: int, wire: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean that reached the shards, and the mean of both ranks' bf16 gradients taken in fp32."""
    model = nn.Linear(37, 29, bias=False)
    torch.manual_seed(3)
    with torch.no_grad():
        model.weight.copy_(torch.randn(29, 37))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "communication_data_type": wire,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    torch.manual_seed(10 + dist.get_rank())
    x = torch.randn(5, 37).bfloat16()
    plain = nn.Linear(37, 29, bias=False).bfloat16()
    with torch.no_grad():
        plain.weight.copy_(model.weight)
    plain(x).float().square().sum().backward()
    assert plain.weight.grad is not None and plain.weight.grad.dtype == torch.bfloat16
    own = plain.weight.grad.float()
    everyone = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(everyone, own)
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    engine.backward(engine(x).float().square().sum())
    return _whole_grad(engine), (everyone[0] + everyone[1]) / 2


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=SLOW) for stage in (0, 1, 2))])
def test_bf16_gradients_are_summed_exactly_in_fp32(stage: int) -> None:
    for wire in ("fp32", None):
        for got, want in run_ranks(sum_of_bf16, 2, stage, wire):
            assert torch.equal(got, want) and not torch.equal(want, want.bfloat16().float())


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=SLOW) for stage in (0, 1, 3))])
def test_gradients_may_be_divided_before_the_sum(stage: int) -> None:
    """The gradients that travel are divided; 80000 is more than fp16 holds, 40000 is not. The mean stays."""
    wire: dict[str, Any] = {"communication_data_type": "fp16"}
    all_reduce = {"reduce_scatter": False}
    for keys, factor in (({}, 1.0), ({"prescale_gradients": True}, 2.0), ({"gradient_predivide_factor": 4.0}, 4.0)):
        for rank, (sent, grad) in enumerate(run_ranks(exchange, 2, stage, {**wire, **keys}, all_reduce, 40000.0)):
            want = torch.tensor((rank + 1) * 40000.0 / factor).half()
            real = sent[0].values[:32]
            assert torch.equal(real, want.expand(32)) and sent[0].dtype == torch.float16
            if keys:
                assert torch.equal(grad, torch.full((32,), 60000.0))
            else:
                assert grad.isinf().all(), "the sum does not fit: that is what the factor is for"


@SLOW
def test_factors_do_not_change_a_bit_in_fp32() -> None:
    """The factors are powers of two, which are exact."""
    ways: list[Keys] = [(), (("prescale_gradients", True),), (("gradient_predivide_factor", 2.0),)]
    jobs = [Options(stage, config=way) for stage in range(4) for way in ways]
    for runs in run_ranks(train, 2, CASE, jobs):
        for stage in range(4):
            plain, *others = runs[stage * 3 : stage * 3 + 3]
            for other in others:
                assert equal(plain, other)
                halves = [s.values for s in other.sent if s.op in ("reduce_scatter", "all_reduce")]
                wholes = [s.values for s in plain.sent if s.op in ("reduce_scatter", "all_reduce")]
                assert all(torch.equal(2 * a, b) for a, b in zip(halves, wholes, strict=True)) and halves


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=SLOW) for stage in (0, 2))])
def test_sum_in_the_place_of_the_mean(stage: int) -> None:
    config = {"gradient_allreduce_op": "sum", "train_batch_size": 2, "gradient_accumulation_steps": 1}
    for _, grad in run_ranks(exchange, 2, stage, config, {}, 3.0):
        assert torch.equal(grad, torch.full((32,), 9.0))


def test_stage_3_has_no_sum() -> None:
    with pytest.raises(ConfigError, match=r"gradient_allreduce_op.*stage 3 has the mean only"):
        hf_zero.ZeroConfig.load({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}).resolve()
