"""Steps that overflow: left out on all ranks, counted, and named where there is no smaller scale."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import StateError
from tests.harness.ranks import RankFailure, run_ranks

STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def start(config: dict[str, Any], schedule: bool = False) -> ZeroEngine:
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)) if schedule else None
    whole = {"train_micro_batch_size_per_gpu": 2, "desync_timeout": 20, **config}
    return hf_zero.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=whole)[0]


def step(engine: ZeroEngine, number: int, factor: float = 1.0, *, direct: bool = False) -> None:
    """One step; the gradients of this rank are multiplied by `factor`."""
    x = torch.randn(2, 7, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    loss = engine(x).float().square().mean() * factor
    if direct:
        loss.backward()
    else:
        engine.backward(loss)
    engine.step()


def both(function: Callable[..., Any], *runs: tuple[Any, ...]) -> list[Any]:
    """`function` called with the arguments of each run, in one job; the output of a failed job names its last run."""
    results = []
    for run in runs:
        print(f"{function.__name__}{run}", flush=True)
        results.append(function(*run))
    return results


def everything(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    """Masters, parameters and moments of this rank."""
    engine.finish_updates()
    found = {}
    for unit in engine.units:
        for buffer in unit.flats:
            found[f"{unit.name}/shard"] = torch.cat([part.clone().float() for part in buffer.shard.parts])  # type: ignore[attr-defined]
    for name, param in engine.module.named_parameters():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            found[f"{name}/{kind}"] = hf_zero.full_optimizer_state(param, kind)
    return found


def overflow_on_rank_1(stage: int, block: dict[str, Any], offload: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = offload
    engine = start({**block, "zero_optimization": zero}, schedule=True)
    for number in range(2):
        step(engine, number)
    before, lr = everything(engine), engine.optimizer.param_groups[0]["lr"]
    norm = engine.get_global_grad_norm()
    step(engine, 2, float("inf") if dist.get_rank() == 1 else 1.0)
    after = everything(engine)
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    facts = {
        "skipped": engine.skipped_steps,
        "overflow": engine.optimizer.overflow,
        "same lr": engine.optimizer.param_groups[0]["lr"] == lr,
        "scale": engine.optimizer.cur_scale,
        "norms": (norm, engine.get_global_grad_norm()),
    }
    step(engine, 3)
    moved = everything(engine)
    facts["moved"] = sum(not torch.equal(value, moved[name]) for name, value in before.items()) / len(before)
    facts["finite"] = all(bool(value.isfinite().all()) for value in moved.values())
    facts["lr moved"] = engine.optimizer.param_groups[0]["lr"] < lr
    facts["steps"] = (engine.global_steps, engine.skipped_steps)
    return changed, facts


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}


def check_skip(stage: int, block: dict[str, Any], offload: dict[str, Any], scale: float) -> None:
    for changed, facts in run_ranks(overflow_on_rank_1, 2, stage, block, offload):
        assert changed == [] and facts["skipped"] == 1 and facts["overflow"] and facts["same lr"]
        before, after = facts["norms"]  # of a step that was left out nothing is told, as in DeepSpeed
        assert facts["scale"] == scale and before == after and math.isfinite(after) and after > 0
        assert facts["moved"] == 1.0 and facts["finite"] and facts["lr moved"] and facts["steps"] == (4, 1)


@pytest.mark.parametrize("stage", STAGES)
def test_inf_on_one_rank_leaves_all_ranks_as_they_were(stage: int) -> None:
    check_skip(stage, FP16, {}, 128.0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_so_it_does_with_offload(stage: int, clip: float, device: str, tmp_path: Path) -> None:
    """The updates on disk start within backward, for nothing is clipped: they are undone."""
    offload = {"device": device, "nvme_path": str(tmp_path)}
    check_skip(stage, {**FP16, "gradient_clipping": clip}, offload, 128.0)


def delayed(factors: list[float], delay: bool) -> dict[str, torch.Tensor]:
    offload = {"device": "cpu", "delayed_update": delay}
    engine = start({**FP16, "zero_optimization": {"stage": 2, "offload_optimizer": offload}})
    for number, factor in enumerate(factors):
        step(engine, number, factor)
    engine.finish_updates()
    return engine.full_state_dict(keep=True)


@pytest.mark.slow
def test_a_delayed_update_does_not_wait_for_a_step_that_is_left_out() -> None:
    """The last gradient is that of the parameters after the first update, as without the step between."""
    one = run_ranks(delayed, 2, [1.0, float("inf"), 1.0], True)[0]
    other = run_ranks(delayed, 2, [1.0, float("inf"), 1.0], False)[0]
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("block", [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 64}}])
def test_bf16_and_static_scales_leave_steps_out_too(block: dict[str, Any]) -> None:
    check_skip(2, block, {}, 64.0 if "fp16" in block else 1.0)


def run_to_the_minimum(stage: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    engine = start({"fp16": {"enabled": True, "initial_scale_power": 2}, "zero_optimization": {"stage": stage}})
    bad = engine.module.layers[1].weight
    if dist.get_rank() == 1:
        bad.register_hook(lambda grad: grad * float("nan"))
    try:
        for number in range(5):
            step(engine, number)
    except StateError as error:
        return [*lines, str(error), f"skipped {engine.skipped_steps}"]
    return [*lines, "no error"]


@pytest.mark.parametrize("stage", [1, 3])
def test_at_the_minimum_all_ranks_stop_and_name_what_is_not_finite(stage: int) -> None:
    first, second = run_ranks(run_to_the_minimum, 2, stage)
    for said in (first, second):
        text, skipped = said[-2:]
        assert text.startswith("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
        assert "on rank 1: layers.1.weight." in text and "bf16" in text and "rank 0" not in text
        assert skipped == "skipped 3"
    overflows = [line for line in first if "OVERFLOW" in line]
    assert len(overflows) == 3 and not any("OVERFLOW" in line for line in second[:-2])


def backward_past_the_model() -> str:
    engine = start({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    loss = engine.module.layers[0](torch.ones(1, 7, dtype=torch.float16)).float().sum()
    with pytest.raises(StateError) as raised:
        loss.backward()
    with engine.loss_scale.scaled(engine.module.layers[0](torch.ones(1, 7, dtype=torch.float16)).sum()) as scaled:
        scaled.backward()
    engine.zero_grad()
    return str(raised.value)


def test_a_loss_that_nobody_scaled_is_refused() -> None:
    assert "was not scaled for fp16" in run_ranks(backward_past_the_model, 2)[0]


# ---------------------------------------------------------------- several outputs, and checkpoints
class TwoOutputs(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": logits.float().square().mean(), "logits": logits}


def direct_backward_through_two_outputs() -> tuple[dict[str, Any], dict[str, Any]]:
    results = []
    for direct in (False, True):
        torch.manual_seed(3)
        model = TwoOutputs()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "fp16": {"enabled": True, "loss_scale": 256},
            "zero_optimization": {"stage": 2},
        }
        engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)[
            0
        ]
        out = engine(torch.randn(2, 7, generator=torch.Generator().manual_seed(dist.get_rank())))
        loss = out["loss"] + out["logits"].float().abs().mean()
        if direct:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        results.append(engine.full_state_dict(keep=True))
    return results[0], results[1]


def test_an_output_inside_another_is_scaled_once() -> None:
    scaled, direct = run_ranks(direct_backward_through_two_outputs, 2)[0]
    for name, value in scaled.items():
        assert torch.allclose(value.float(), direct[name].float(), rtol=1e-2, atol=1e-3), name


class Generator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(super().forward(x))


def two_engines(block: dict[str, Any], how: str) -> list[dict[str, torch.Tensor]]:
    """One step of a chain of two engines, and of a loss of both, with direct backwards."""
    engines = []
    for kind in (Generator, Net):
        torch.manual_seed(3)
        model = kind()
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, **block}
        if block and kind is Net:
            config["fp16"] = {"enabled": True, "loss_scale": 64}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engines.append(hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0])
    first, second = engines
    x = torch.randn(2, 7, generator=torch.Generator().manual_seed(dist.get_rank()))
    if how == "chain":
        loss = second(first(x)).float().square().mean()
    elif how == "twice":
        loss = first(first(x)).float().square().mean() + second(x).float().square().mean()
    else:
        loss = first(x).float().square().mean() + second(x).float().square().mean()
    loss.backward()
    for engine in engines:
        engine.step()
    return [engine.full_state_dict(keep=True) for engine in engines]


@pytest.mark.parametrize("how", ["chain", *(pytest.param(how, marks=pytest.mark.slow) for how in ("twice", "beside"))])
def test_engines_in_one_graph_have_a_scale_each(how: str) -> None:
    fp16 = {"fp16": {"enabled": True, "loss_scale": 16}}
    half, single = run_ranks(both, 2, two_engines, (fp16, how), ({}, how))[0]
    torch.manual_seed(3)
    start = [dict(Generator().named_parameters()), None]
    moved = [float((single[0][name] - value).abs().max()) for name, value in start[0].items()]
    assert max(moved) > 0.02
    for mine, want in zip(half, single, strict=True):
        for name, value in want.items():
            assert torch.allclose(mine[name].float(), value, rtol=2e-2, atol=2e-3), name


def scaled_for_another() -> str:
    fp16, other = start(FP16), start({})
    loss = fp16(torch.ones(1, 7)).float().sum() + other(torch.ones(1, 7)).sum()
    with pytest.raises(StateError) as raised:
        fp16.backward(loss)
    return str(raised.value)


def test_a_loss_that_is_scaled_for_one_engine_is_refused_by_another() -> None:
    assert "scaled for the fp16 of another engine" in run_ranks(scaled_for_another, 2)[0]


def train_and_save(folder: str, steps: list[float], load: bool) -> tuple[float, int, int, dict[str, torch.Tensor]]:
    block = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    engine = start({"fp16": block, "zero_optimization": {"stage": 3 if load else 2}})
    first = 0
    if load:
        engine.load_checkpoint(folder)
        first = engine.global_steps
    for number, factor in enumerate(steps, first):
        step(engine, number, factor)
    if not load:
        engine.save_checkpoint(folder)
    weights = engine.full_state_dict(keep=True)
    return engine.optimizer.cur_scale, engine.skipped_steps, engine.global_steps, weights


@pytest.mark.slow
def test_the_scale_goes_on_from_a_checkpoint_at_another_stage(tmp_path: Path) -> None:
    inf, pattern = float("inf"), [1.0, float("inf"), 1.0, 1.0, float("inf"), float("inf"), 1.0, 1.0, 1.0, 1.0]
    assert pattern.count(inf) == 3
    whole = run_ranks(train_and_save, 2, str(tmp_path / "whole"), pattern, False)[0]
    run_ranks(train_and_save, 2, str(tmp_path / "half"), pattern[:5], False)
    resumed = run_ranks(train_and_save, 2, str(tmp_path / "half"), pattern[5:], True)[0]
    assert resumed[:3] == whole[:3] and whole[1] == 3 and whole[0] != 256
    for name, value in whole[3].items():
        assert torch.allclose(value.float(), resumed[3][name].float(), atol=1e-3), name


def counts(engine: ZeroEngine) -> tuple[int, int, int]:
    return engine.global_steps, engine.skipped_steps, engine.micro_steps


def load_parts(folder: str, stage: int) -> dict[str, Any]:
    """Return what engines of another stage know after a load, of two steps that were left out and one that
    was made.
    """
    block = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine = start({**block, "zero_optimization": {"stage": stage}})
    for number, factor in enumerate([float("inf"), float("inf"), 1.0]):
        step(engine, number, factor)
    engine.save_checkpoint(folder)
    found: dict[str, Any] = {"saved": (counts(engine), engine.optimizer.cur_scale)}
    engine.attach_optimizer(torch.optim.SGD(engine.module.parameters(), lr=0.1))
    found["another optimizer"] = counts(engine)
    block = {**block, "zero_optimization": {"stage": 3 - stage}}
    for name, options in {
        "all": {},
        "without states": {"load_optimizer_states": False},
        "without states and rates": {"load_optimizer_states": False, "load_lr_scheduler_states": False},
        "module only": {"load_module_only": True},
    }.items():
        engine = start(block)
        engine.load_checkpoint(folder, **options)
        found[name] = counts(engine), engine.optimizer.cur_scale
    engine = hf_zero.initialize(model=Net(), config=block)[0]
    engine.load_checkpoint(folder)
    found["inference"] = counts(engine)
    return found


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_load_takes_both_counts_or_none(stage: int, tmp_path: Path) -> None:
    """The scale belongs to the optimizer's state, as in DeepSpeed; the number of skipped steps to that of steps."""
    for found in run_ranks(load_parts, 2, str(tmp_path), stage):
        assert found["saved"] == found["all"] == ((3, 2, 3), 64.0)
        assert found["without states"] == found["without states and rates"] == ((3, 2, 3), 256.0)
        assert found["module only"] == ((0, 0, 0), 256.0)
        assert found["inference"] == found["another optimizer"] == (3, 2, 3)


def into_fp16(folder: str) -> tuple[float, int]:
    engine = start({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    step(engine, 0)
    engine.save_checkpoint(folder)
    engine = start({"fp16": {"enabled": True, "initial_scale_power": 9}, "zero_optimization": {"stage": 1}})
    engine.load_checkpoint(folder)
    return engine.optimizer.cur_scale, engine.global_steps


@pytest.mark.slow
def test_a_run_without_a_scale_goes_on_in_fp16_with_the_first_one(tmp_path: Path) -> None:
    assert run_ranks(into_fp16, 2, str(tmp_path)) == [(512.0, 1)] * 2


def test_failures_are_told(tmp_path: Path) -> None:
    """A rank that cannot scale down ends the job: its neighbours do not wait for it."""
    results = run_ranks(exhaust_without_catching, 2, expect_error=True)
    assert all(isinstance(result, RankFailure) for result in results)


def exhaust_without_catching() -> None:
    engine = start(
        {"fp16": {"enabled": True, "initial_scale_power": 1, "hysteresis": 1}, "zero_optimization": {"stage": 2}}
    )
    for number in range(4):
        step(engine, number, float("nan") if dist.get_rank() == 0 else 1.0)


# ---------------------------------------------------------------- autocast by configuration
def train_under(config: dict[str, Any], wrap: bool, stage: int) -> tuple[list[float], list[str]]:
    """Return the losses of a run with autocast by configuration, or by the caller (`wrap`), and the types inside."""
    engine = start({**config, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
    types: list[str] = []
    engine.module.head.register_forward_hook(lambda module, args, out: types.append(str(out.dtype)))
    losses = []
    for number in range(4):
        x = torch.randn(2, 7, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        with torch.autocast("cpu", torch.bfloat16, enabled=wrap):
            out = engine(x)
        loss = out.float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, types


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_torch_autocast_is_autocast_around_the_forward(stage: int) -> None:
    block = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
    (got, types), (want, _) = run_ranks(both, 2, train_under, (block, False, stage), ({}, True, stage))[0]
    assert got == want and set(types) == {"torch.bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "torch.float16"),
        ({"amp": {"enabled": True, "opt_level": "O0"}}, "torch.float32"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "torch.float16"),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, "torch.float16"),
        ({"amp": {"enabled": True, "opt_level": "O3"}}, "torch.float16"),
    ],
)
def test_other_precisions_compute_in_their_type_and_train(block: dict[str, Any], dtype: str) -> None:
    (got, types), (plain, _) = run_ranks(both, 2, train_under, (block, False, 0), ({}, False, 0))[0]
    assert set(types) == {dtype} and got == pytest.approx(plain, rel=2e-2)
    assert (got == plain) == (dtype == "torch.float32")


# ---------------------------------------------------------------- what a loop says about its own scaling
def scaled_by_the_caller() -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    results, told = [], []
    for by_caller in (False, True):
        torch.manual_seed(3)
        model = Net()
        engine = hf_zero.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            lr_scheduler=_Told(told),
            config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        )[0]
        for number in range(2):
            x = torch.randn(2, 7, generator=torch.Generator().manual_seed(number))
            loss = engine(x).square().mean()
            if by_caller:
                engine.backward(loss / 2, scale_wrt_gas=False)
            else:
                engine.backward(loss)
            engine.step(lr_kwargs={"epoch": 5})
        results.append(engine.full_state_dict(keep=True))
    return results[0], results[1], told


class _Told:
    def __init__(self, told: list[int]) -> None:
        self._told = told

    def step(self, epoch: int) -> None:
        self._told.append(epoch)


def test_a_loss_that_is_divided_already_and_arguments_of_the_scheduler() -> None:
    first, second, told = run_ranks(scaled_by_the_caller, 2)[0]
    assert all(torch.equal(first[name], second[name]) for name in first) and told == [5, 5]


# ---------------------------------------------------------------- other optimizers
def with_optimizer(kind: str, stage: int, block: dict[str, Any], factors: list[float]) -> tuple[list[float], int]:
    """Return (the loss of this rank's one batch before each step and at the end, skipped steps)."""
    torch.manual_seed(3)
    model = Net()
    params = {"lr": 1e-2, **({"freeze_step": 2} if kind == "OneBitAdam" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **block,
    }
    engine = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.randn(2, 7, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for factor in factors:
        loss = engine(x).float().square().mean()
        engine.backward(loss * (factor if dist.get_rank() == 1 else 1.0))
        engine.step()
        losses.append(loss.item())
    return [*losses, engine(x).float().square().mean().item()], engine.skipped_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage"),
    [("Lamb", 2), ("Lion", 3), ("Muon", 1), ("Muon", 3), ("Adafactor", 3), ("OneBitAdam", 0), ("SGD", 2)],
)
def test_every_kind_of_update_leaves_the_step_out(kind: str, stage: int) -> None:
    """The losses are those of fp32 without the step: also where a rank keeps its gradients to itself."""
    factors = [1.0, float("inf"), 1.0, 1.0, float("inf"), 1.0]
    runs = (kind, stage, FP16, factors), (kind, stage, {}, [1.0] * 4)
    (half, skipped), (single, _) = run_ranks(both, 2, with_optimizer, *runs)[0]
    assert skipped == 2 and half[2] == half[1] and half[5] == half[4]
    # A rounding that turns a sign over moves an element by the whole scale.
    near = 0.2 if kind == "OneBitAdam" else 2e-2
    assert [half[place] for place in (0, 1, 3, 4, 6)] == pytest.approx(single, rel=near) and single[-1] < single[0]


class ConvNet(nn.Module):
    """The model is written as in a tutorial, without a cast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 4 * 4, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(torch.relu(self.conv(images)).flatten(1))
        return nn.functional.cross_entropy(logits.float(), labels), logits


def train_on_images(stage: int, auto_cast: bool) -> tuple[list[float], bool]:
    """Losses over three steps on fp32 images, and whether the first logits are those of plain torch in fp16."""
    torch.manual_seed(0)
    model = ConvNet()
    plain = copy.deepcopy(model).half()
    block = {"enabled": True, "auto_cast": auto_cast, "initial_scale_power": 8}
    config = {"fp16": block, "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    images, labels = torch.randn(2, 3, 6, 6), torch.tensor([1, 3])
    expected = plain(images.half(), labels)[1]
    losses, first = [], None
    for _ in range(3):
        loss, logits = engine(images, labels)
        first = logits.detach().clone() if first is None else first
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert first is not None and images.dtype == torch.float32 and labels.dtype == torch.int64
    return losses, first.dtype == torch.float16 and torch.equal(first, expected)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_convnet_takes_fp32_images_whatever_auto_cast_says(stage: int) -> None:
    runs = run_ranks(train_on_images, 2, stage, True)
    assert runs == run_ranks(train_on_images, 2, stage, False)
    for losses, is_plain in runs:
        assert is_plain and losses[0] > losses[1] > losses[2] > 0
