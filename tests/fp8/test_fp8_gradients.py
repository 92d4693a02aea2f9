"""Gradients of 8 bits over ranks: the reduce, accumulation, overflow and what travels, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from hf_zero.sharding.scaled_shard import ScaledShard
from tests.harness.ranks import run_ranks
from tests.harness.torchao_path import use_torchao

SIZES = (24, 40, 16)
E4M3 = torch.float8_e4m3fn


def make_engine(
    level: str, stage: int, *, accumulation: int = 1, buckets: int | None = None, **more: Any
) -> tuple[nn.Sequential, ZeroEngine]:
    use_torchao()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.LayerNorm(SIZES[1]), nn.Linear(SIZES[1], SIZES[2]))
    zero: dict[str, Any] = {"stage": stage} | ({"reduce_bucket_size": buckets} if buckets else {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "gradient_clipping": 0,
        **({"msamp": {"enabled": True, "opt_level": level}} if level else {}),
        **more,
    }
    return model, hf_zero.initialize(model=model, config=config)[0]


def gradients(rank: int, micro: int) -> list[torch.Tensor]:
    """The gradients of the two weights on a rank, whose elements are of many sizes."""
    generator = torch.Generator().manual_seed(100 * rank + micro)
    shapes = [(SIZES[1], SIZES[0]), (SIZES[2], SIZES[1])]
    return [
        torch.randn(shape, generator=generator) * 10.0 ** (torch.rand(shape, generator=generator) * 4 - 4 - rank)
        for shape in shapes
    ]


def weights(model: nn.Sequential) -> list[nn.Parameter]:
    return [model[0].weight, model[2].weight]


def run_backward(model: nn.Sequential, engine: ZeroEngine, grads: list[torch.Tensor]) -> None:
    engine.backward(sum((weight * grad).sum() for weight, grad in zip(weights(model), grads, strict=True)))


# -------------------------------------------------------------------- the same by torch's own casts
def scale_of(amax: torch.Tensor) -> torch.Tensor:
    return 2.0 ** torch.floor(torch.log2(448.0 / amax.double())).float()


def rounded(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    scale = scale_of(amax)
    return (values * scale).clamp(-448, 448).to(E4M3).float() / scale


def expected(world_size: int, accumulation: int, *, eager: bool) -> list[torch.Tensor]:
    """The mean gradient: rounded on each rank, averaged in fp32 in rank order, rounded once.

    `eager`: ranks reduce after each micro-batch; else they add up their own before.
    """
    results = []
    for number in range(2):
        grads = [[gradients(rank, micro)[number] for micro in range(accumulation)] for rank in range(world_size)]
        windows = [[[micro] for micro in mine] if eager else [mine] for mine in grads]
        result = limit = torch.zeros(())
        for turn in range(len(windows[0])):
            sent = [_added(mine[turn]) for mine in windows]
            mean = sum((values for values, _ in sent), torch.zeros(())) * (1 / world_size)
            bound = torch.stack([amax for _, amax in sent]).sum() / world_size
            if turn == 0:
                result, limit = rounded(mean, bound) * (1 / accumulation), bound * (1 / accumulation)
            else:
                limit = bound * (1 / accumulation) + limit
                result = rounded(mean * (1 / accumulation) + result, limit)
        results.append(result)
    return results


def _added(grads: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8-bit sum of one rank's micro-batches, and the largest value before its last rounding."""
    total = amax = torch.zeros(())
    for grad in grads:
        total = grad + total
        amax = total.abs().max()
        total = rounded(total, amax)
    return total, amax


# -------------------------------------------------------------------- the reduce
def reduced(stage: int, accumulation: int, level: str, buckets: int | None) -> tuple[list[torch.Tensor], int]:
    model, engine = make_engine(level, stage, accumulation=accumulation, buckets=buckets)
    for micro in range(accumulation):
        run_backward(model, engine, gradients(engine.rank, micro))
        if micro + 1 < accumulation:
            engine.step()
    grads = [hf_zero.full_grad(weight) for weight in weights(model)]
    return [grad for grad in grads if grad is not None], engine.reducer.accumulators[0].flat.layout.num_buckets


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_reduce_is_that_of_plain_torch(world_size: int, stage: int) -> None:
    for accumulation, level, buckets in ((1, "O1", None), (2, "O2", 300)):
        eager = stage == 2 and world_size > 1
        want = expected(world_size, accumulation, eager=eager)
        assert all(grad.abs().max() > 0 for grad in want)
        for got, num_buckets in run_ranks(reduced, world_size, stage, accumulation, level, buckets):
            assert num_buckets > 1 or buckets is None or stage == 0 or world_size == 1
            for mine, other in zip(got, want, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)


# -------------------------------------------------------------------- what a training gives
def trained(stage: int, level: str, steps: int, *, same: bool) -> list[torch.Tensor]:
    model, engine = make_engine(level, stage)
    generator = torch.Generator().manual_seed(7 if same else engine.rank)
    for _ in range(steps):
        data = torch.randn(8, SIZES[0], generator=generator)
        engine.backward((engine(data) - data[:, : SIZES[2]]).square().mean())
        engine.step()
    return [param.detach().clone() for param in model.parameters()]


def test_stages_and_world_sizes_give_the_same_bits() -> None:
    """Equal data on all ranks: the sums of one, two and four of them are then the same, but for a power of two."""
    one = run_ranks(trained, 1, 0, "O2", 6, same=True)[0]
    start = run_ranks(trained, 1, 0, "O2", 0, same=True)[0]
    assert all(not torch.equal(mine, old) for mine, old in zip(one, start, strict=True))
    for world_size, stage, level in ((2, 0, "O2"), (2, 1, "O3"), (2, 2, "O3"), (4, 1, "O3")):
        for mine in run_ranks(trained, world_size, stage, level, 6, same=True):
            for got, want in zip(mine, one, strict=True):
                assert torch.equal(got, want), (world_size, stage)


def test_stages_give_the_same_bits_where_ranks_have_other_data() -> None:
    want = run_ranks(trained, 2, 0, "O2", 6, same=False)
    for stage, level in ((1, "O3"), (2, "O3")):
        got = run_ranks(trained, 2, stage, level, 6, same=False)
        for mine, other in zip(got[0] + got[1], want[0] + want[1], strict=True):
            assert torch.equal(mine, other), stage


# -------------------------------------------------------------------- overflow
def overflowed(level: str, stage: int, fp16: bool) -> dict[str, Any]:
    model, engine = make_engine(
        level, stage, **({"fp16": {"enabled": True, "initial_scale_power": 4}} if fp16 else {})
    )
    seen = []
    for step in range(3):
        grads = [grad.to(model[0].weight.dtype) for grad in gradients(engine.rank, step)]
        if step == 1 and engine.rank == 1:
            grads[0][3, 5] = torch.inf
        before = [weight.detach().clone() for weight in weights(model)]
        run_backward(model, engine, grads)
        engine.step()
        seen.append(any(not torch.equal(old, new) for old, new in zip(before, weights(model), strict=True)))
    return {"moved": seen, "skipped": engine.skipped_steps, "scale": engine.optimizer.cur_scale}


@pytest.mark.parametrize(("level", "stage"), [("O1", 0), ("O2", 1), ("O3", 2)])
def test_an_infinite_gradient_of_one_rank_skips_the_step_on_all(level: str, stage: int) -> None:
    for seen in run_ranks(overflowed, 2, level, stage, True):
        assert seen["moved"] == [True, False, True] and seen["skipped"] == 1
        assert seen["scale"] in (8.0, 16.0)  # hysteresis leaves it at stages 1 and 2


# -------------------------------------------------------------------- bytes
def bytes_of(level: str, stage: int) -> dict[str, float]:
    """The bytes per element of what belongs to the two weights, and those that their reduces send in a step."""
    model, engine = make_engine(level, stage)
    for step in range(2):
        engine.comm.counts.clear()
        run_backward(model, engine, gradients(engine.rank, step))
        engine.step()
    counts = engine.comm.counts
    if not level:
        ours = [
            acc for acc in engine.reducer.accumulators if 24 * 40 in [slot.numel for slot in acc.flat.layout.slots]
        ]
        numel = sum(acc.flat.layout.padded_numel for acc in ours)
        return {"wire": 4 * numel, "sent": counts["reduce_scatter"].nbytes + counts["all_reduce"].nbytes}
    (acc,) = [acc for acc in engine.reducer.accumulators if acc.flat.scaled]
    assert isinstance(acc.flat.master, ScaledShard) and engine.optimizer is not None
    (one, *_) = [owned for owned in engine.optimizer.owned if owned.acc is acc]
    state = engine.optimizer.native_state(one)
    assert state is not None
    held = {"master": acc.flat.master, "gradient": acc.shard, "first": state["exp_avg"], "second": state["exp_avg_sq"]}
    numel = sum(weight.numel() for weight in weights(model))
    sent = counts["all_to_all"].nbytes + (0 if stage else counts["all_gather"].nbytes)
    return {kind: shard.memory.nbytes / numel for kind, shard in held.items()} | {"wire": sent}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bytes_at_rest_and_on_the_wire(stage: int) -> None:
    level, ranks = ("O3", 2) if stage else ("O2", 1)
    small, plain = run_ranks(bytes_of, 2, level, stage)[0], run_ranks(bytes_of, 2, "", stage)[0]
    want = {"master": 2, "gradient": 1, "first": 1, "second": 2}
    assert {kind: small[kind] * ranks for kind in want} == want
    # An all-reduce counts once, and its two halves do at stage 0: 8 bits go there and back.
    assert plain["sent"] >= plain["wire"] > 0
    assert small["wire"] <= 0.3 * plain["wire"] * (2 if stage == 0 else 1), (small, plain)
