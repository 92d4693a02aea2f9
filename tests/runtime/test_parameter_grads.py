"""`parameter.grad` between backward and step: whole at stage 0, an error with the right call in it at stages 1 to 3.

What a user drops there is dropped at every stage. Compared with plain PyTorch in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from tests.harness.ranks import RankFailure, run_ranks

WIDTH, STEPS, CLIP = 7, 3, 0.05
STAGES = (0, 1, 2, 3)

Params = dict[str, torch.Tensor]


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)) * self.gain)


def build(dtype: torch.dtype = torch.float64, adam: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    if adam:
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


# -------------------------------------------------------------------- what users do between backward and step
def clip_norm(model: nn.Module) -> float:
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    assert norm > CLIP, "vacuous"
    return float(norm)


def clip_value(model: nn.Module) -> None:
    assert max(p.grad.abs().max() for p in model.parameters() if p.grad is not None) > 0.01, "vacuous"
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def scale_in_place(model: nn.Module) -> None:
    model.a.weight.grad.mul_(3)


def replace(model: nn.Module) -> None:
    model.a.weight.grad = torch.full_like(model.a.weight, 0.25)


def replace_all_by_zeros(model: nn.Module) -> None:
    for param in (*model.a.parameters(), *model.b.parameters()):
        param.grad = torch.zeros_like(param)


EDITS: dict[str, Callable[[Any], Any]] = {
    one.__name__: one for one in (clip_norm, clip_value, scale_in_place, replace, replace_all_by_zeros)
}


def drop_one(model: nn.Module) -> None:
    model.a.weight.grad = None


def drop_module(model: nn.Module) -> None:
    model.b.zero_grad()


DROPS: dict[str, Callable[[Any], Any]] = {one.__name__: one for one in (drop_one, drop_module)}
ALL = EDITS | DROPS


def train_plain(what: str, world: int) -> tuple[Params, list[Any]]:
    model, optimizer = build()
    said = []
    for step in range(STEPS):
        for rank in range(world):
            (square(model(rows(step, rank))) / world).backward()
        said.append(ALL[what](model))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, said


def start(stage: int, dtype: torch.dtype = torch.float64, adam: bool = False, **config: Any) -> Any:
    model, optimizer = build(dtype, adam)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **config.pop("zero", {})}
    config = {"train_micro_batch_size_per_gpu": 4, "desync_timeout": 20, "zero_optimization": zero, **config}
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(what: str, stage: int) -> tuple[Params, list[Any]]:
    engine, said = start(stage), []
    for step in range(STEPS):
        square(engine(rows(step, engine.rank))).backward()
        said.append(ALL[what](engine.module))
        engine.step()
        assert all(param.grad is None for param in engine.module.parameters())
    return engine.full_state_dict(keep=True), said


def check(what: str, stage: int, world: int) -> None:
    want, said = train_plain(what, world)
    start_values = dict(build()[0].named_parameters())
    assert not torch.equal(want["gain"], start_values["gain"])
    for got, mine in run_ranks(train, world, what, stage):
        torch.testing.assert_close(mine, said, rtol=0, atol=1e-12)
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-12, msg=f"{what}, stage {stage}: {name}")


@pytest.mark.parametrize("what", EDITS)
def test_stage_0_takes_edits(what: str) -> None:
    check(what, 0, 2)
    check(what, 2, 1)  # one rank has all of every gradient


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", DROPS)
def test_dropped_gradients_are_dropped(what: str, stage: int) -> None:
    check(what, stage, 2)


# -------------------------------------------------------------------- stages 1 to 3
def edit_all_kinds(stage: int) -> dict[str, str]:
    said = {}
    for what, edit in EDITS.items():
        engine = start(stage)
        square(engine(rows(0, engine.rank))).backward()
        for param in engine.module.a.parameters():
            assert param.grad.shape == param.shape and param.grad.dtype == param.dtype
        assert engine.module.unused.grad is None
        try:
            edit(engine.module)
            engine.step()
        except hf_zero.StateError as error:
            said[what] = str(error)
    return said


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_gradients_name_the_right_call(stage: int) -> None:
    for said in run_ranks(edit_all_kinds, 2, stage):
        assert list(said) == list(EDITS)
        for text in said.values():
            assert ".weight" in text or "gain" in text
            assert "engine.clip_grad_norm_" in text and "hf_zero.full_grad" in text


def by_hand_without_backward(stage: int) -> float:
    engine = start(stage)
    for param in engine.module.parameters():
        param.grad = torch.ones_like(param)
    engine.step()
    return float(engine.full_state_dict(keep=True)["unused"][0])


def test_gradients_set_without_a_backward() -> None:
    assert run_ranks(by_hand_without_backward, 2, 0) == [pytest.approx(1 - 0.1 * 1.1)] * 2
    for failure in run_ranks(by_hand_without_backward, 2, 2, expect_error=True):
        assert isinstance(failure, RankFailure) and ".grad" in failure.message


def accumulated(stage: int) -> str:
    engine = start(stage, gradient_accumulation_steps=2)
    square(engine(rows(0, engine.rank))).backward()
    with pytest.raises(hf_zero.StateError) as raised:
        clip_norm(engine.module)
    engine.step()
    square(engine(rows(1, engine.rank))).backward()
    clip_norm(engine.module)
    return str(raised.value)


def test_before_the_boundary_stage_0_has_no_whole_gradients() -> None:
    assert all("last backward" in text for text in run_ranks(accumulated, 2, 0))


def test_16_bit_parameters_show_the_accumulated_gradient() -> None:
    for dtype, kind, norm in run_ranks(in_bf16, 2):
        assert dtype == torch.float32 and kind == torch.bfloat16 and norm == pytest.approx(CLIP, rel=1e-2)


def in_bf16() -> tuple[torch.dtype, torch.dtype, float]:
    engine = start(0, torch.float32, bf16={"enabled": True})
    for step in range(2):
        square(engine(rows(step, engine.rank).float())).backward()
        dtype = engine.module.a.weight.grad.dtype
        clip_norm(engine.module)
        engine.step()
    return dtype, engine.module.a.weight.dtype, engine.get_global_grad_norm()


# -------------------------------------------------------------------- zero_grad
THROW_AWAY: dict[str, Callable[[Any], None]] = {
    "module": lambda engine: engine.module.zero_grad(),
    "by hand": lambda engine: _none_each(engine.module),
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
}


def _none_each(module: nn.Module) -> None:
    for param in module.parameters():
        param.grad = None


def with_bad_batches(stage: int, how: str, zero: dict[str, Any]) -> Params:
    engine = start(stage, torch.float32, adam=True, zero=zero)
    for step in range(STEPS):
        square(engine(rows(step + 20, engine.rank).float() * float("nan"))).backward()
        THROW_AWAY[how](engine)
        square(engine(rows(step, engine.rank).float())).backward()
        engine.step()
    params: Params = engine.full_state_dict(keep=True)
    return params


def without_bad_batches(world: int) -> Params:
    model, optimizer = build(torch.float32, adam=True)
    for step in range(STEPS):
        for rank in range(world):
            (square(model(rows(step, rank).float())) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("how", THROW_AWAY)
def test_a_bad_batch_is_thrown_away(how: str) -> None:
    want = without_bad_batches(2)
    for stage in STAGES:
        offloads: list[dict[str, Any]] = [{}, {"offload_optimizer": {"device": "cpu"}}] if stage else [{}]
        for zero in offloads:
            got = run_ranks(with_bad_batches, 2, stage, how, zero)[0]
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6, msg=f"stage {stage} {zero}: {name}")


def one_rank_alone(stage: int, how: str, accumulation: int) -> None:
    engine = start(stage)
    engine.schedule.accumulate_over(accumulation)
    for _ in range(accumulation - 1):
        square(engine(rows(0, engine.rank))).backward()
        if dist.get_rank() == 1:
            engine.module.zero_grad()
        engine.step()
    square(engine(rows(0, engine.rank))).backward()
    if dist.get_rank() == 1 and accumulation == 1:
        ALL[how](engine.module) if how in ALL else engine.module.zero_grad()
    engine.step()


@pytest.mark.parametrize(
    ("stage", "how", "accumulation"),
    [
        (0, "scale_in_place", 1),
        (0, "drop_one", 1),
        (2, "drop_one", 1),
        *((stage, "zero_grad", accumulation) for stage in STAGES for accumulation in (1, 2)),
    ],
)
def test_ranks_that_change_gradients_differently_all_raise(stage: int, how: str, accumulation: int) -> None:
    failures = run_ranks(one_rank_alone, 2, stage, how, accumulation, expect_error=True)
    # Below stage 2 a window without gradients is reduced once more, on the rank that dropped them.
    reduces_again = how == "zero_grad" and stage < 2 and accumulation == 1
    for failure in failures:
        assert failure.kind == ("DivergenceError" if reduces_again else "StateError"), failure.traceback
        assert ("rank 0: vote" if reduces_again else "rank 0: nothing") in failure.message
        assert "rank 1: " in failure.message


# -------------------------------------------------------------------- hooks
def double(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def with_hooks(stage: int, when: str) -> Params:
    """`double` runs before each gradient of a.weight is counted; steps are seen by a hook of the optimizer."""
    model, optimizer = build()
    if when == "before":
        model.a.weight.register_post_accumulate_grad_hook(double)
    engine: Any = model
    if stage >= 0:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine, optimizer, *_ = hf_zero.initialize(
            model=model, optimizer=optimizer, config={"zero_optimization": zero}
        )
    if when == "after":
        model.a.weight.register_post_accumulate_grad_hook(double)
    steps: list[bool] = []
    optimizer.register_step_pre_hook(lambda opt, *_: steps.append(any(p.grad is not None for p in _held(opt))))
    optimizer.register_step_post_hook(lambda opt, *_: steps.append(True))
    for step in range(STEPS):
        square(engine(rows(step, 0))).backward()
        engine.step() if stage >= 0 else (optimizer.step(), optimizer.zero_grad())
    assert steps == [True] * (2 * STEPS)
    return engine.full_state_dict(keep=True) if stage >= 0 else dict(model.named_parameters())


def _held(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_post_accumulate_hooks_edit_the_gradient(when: str) -> None:
    want, other = with_hooks(-1, when), with_hooks(-1, "never")
    assert not torch.equal(want["a.weight"], other["a.weight"])
    for stage in STAGES:
        for got in run_ranks(with_hooks, 2, stage, when):
            for name, value in want.items():
                torch.testing.assert_close(got[name], value.detach(), rtol=0, atol=1e-12, msg=f"{stage}: {name}")


def raw_step(stage: int) -> tuple[str, bool]:
    """The optimizer that was given away; after a teardown it may be called again."""
    model, optimizer = build()
    config = {"zero_optimization": {"stage": stage}}
    engine: Any = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    square(engine(rows(0, engine.rank))).backward()
    with pytest.raises(hf_zero.StateError) as raised:
        optimizer.step()
    before = engine.full_state_dict(keep=True)["a.weight"]
    engine.step()
    moved = not torch.equal(before, engine.full_state_dict(keep=True)["a.weight"])
    engine.teardown()
    optimizer.step()
    return str(raised.value), moved


def test_a_step_of_the_optimizer_that_was_given_away_raises() -> None:
    for stage in (0, 3):
        for text, moved in run_ranks(raw_step, 2, stage):
            assert "engine.step()" in text and "SGD" in text and moved
