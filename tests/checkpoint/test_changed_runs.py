"""A resume into a run that is not the one that was saved: other parameters are trained, in another precision, or only
the weights are asked for. The next updates are those of one process with torch.optim that does the same, and what
could not be carried over is said once."""

from __future__ import annotations

import copy
import functools
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import CheckpointError
from tests.harness.ranks import run_ranks

BODY = ("0.weight", "0.bias")
STEPS = 3
RATE = 1e-2


def net(seed: int, head: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))
    return model.append(nn.Linear(3, 3)) if head else model


def freeze(model: nn.Module, frozen: tuple[str, ...]) -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(step))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE)


def start(seed: int, medium: tuple[int, str], frozen: tuple[str, ...] = (), **more: Any) -> Any:
    """`medium`: stage and offload device. `more`: head, optimizer, and blocks of the configuration."""
    model = freeze(net(seed, more.pop("head", False)), frozen)
    optimizer = more.pop("optimizer", adamw)(trained(model))
    zero: dict[str, Any] = {"stage": medium[0], "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 40}
    if medium[1]:
        zero["offload_optimizer"] = {"device": medium[1], "nvme_path": tempfile.gettempdir()}
    return hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": zero, **more})[0]


def train(engine: Any, first: int) -> None:
    for step in range(first, first + STEPS):
        rows = inputs(step).chunk(engine.world_size)[engine.rank]
        engine.backward(engine(rows.to(engine.module[0].weight.dtype)).float().pow(2).mean())
        engine.step()


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        model(inputs(step)).pow(2).mean().backward()
        optimizer.step()


def saved_alone(frozen: tuple[str, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = freeze(net(0), frozen)
    train_alone(model, optimizer := adamw(trained(model)), 0)
    return model, optimizer


def resumed_alone(then: tuple[str, ...], now: tuple[str, ...], head: bool = False) -> nn.Module:
    """Return what torch.optim does where other parameters are trained: state is taken over for those that have one."""
    old, old_optimizer = saved_alone(then)
    model = freeze(net(1, head), now)
    model.load_state_dict(old.state_dict(), strict=not head)
    optimizer = adamw(trained(model))
    mine = dict(model.named_parameters())
    for name, param in old.named_parameters():
        if param in old_optimizer.state and mine[name].requires_grad:
            optimizer.state[mine[name]] = copy.deepcopy(old_optimizer.state[param])
    train_alone(model, optimizer, STEPS)
    return model


def assert_weights(engine: Any, want: nn.Module, label: Any) -> None:
    got = engine.full_state_dict(keep=True)
    assert got.keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.allclose(got[name], tensor, rtol=1e-5, atol=1e-7), (label, name, got[name] - tensor)


class Said(logging.Handler):
    """A handler that keeps what the load of a checkpoint warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def during(self, work: Callable[[], Any], rank: int) -> list[str]:
        """The lines of `work`; on other ranks than 0 there are none."""
        self.lines.clear()
        logger = logging.getLogger("hf_zero.checkpoint.load")
        logger.addHandler(self)
        try:
            work()
        finally:
            logger.removeHandler(self)
        assert rank == 0 or not self.lines, self.lines
        return list(self.lines)


def expect(engine: Any, load: Callable[[], Any], *texts: str) -> None:
    lines = Said().during(load, engine.rank)
    if engine.rank == 0:
        assert len(lines) == len(texts), lines
        for line, text in zip(lines, texts, strict=True):
            assert text in line, line


# -------------------------------------------------------------------- other parameters are trained
def other_parameters(medium: tuple[int, str], folder: str) -> None:
    for tag, frozen in (("all", ()), ("head", BODY)):
        train(engine := start(0, medium, frozen), 0)
        engine.save_checkpoint(folder, tag)
    engine.save_checkpoint(folder, "without the body", exclude_frozen_parameters=True)

    engine = start(1, medium)
    train(engine, 20)  # states that must not stay
    thawed = "2 parameters (0.weight, 0.bias) were not trained when it was saved: their optimizer state starts anew"
    expect(engine, lambda: engine.load_checkpoint(folder, "head"), thawed)
    train(engine, STEPS)
    assert_weights(engine, resumed_alone(BODY, ()), "thawed")

    engine = start(1, medium, BODY)
    expect(engine, lambda: engine.load_checkpoint(folder, "all"), "were trained when it was saved and are not now")
    train(engine, STEPS)
    assert_weights(engine, resumed_alone((), BODY), "frozen")

    engine = start(0, medium)
    with pytest.raises(CheckpointError, match=r"2 of them are not frozen: 0\.weight, 0\.bias"):
        engine.load_checkpoint(folder, "without the body")

    engine = start(1, medium, head=True)
    before = engine.full_state_dict(keep=True)
    with pytest.raises(CheckpointError, match=r"5\.bias: not in the checkpoint\n.*strict=False"):
        engine.load_checkpoint(folder, "all")
    assert all(torch.equal(now, before[name]) for name, now in engine.full_state_dict(keep=True).items())
    new = "it does not hold 2 parameters (5.weight, 5.bias) of the model: they stay as they are"
    expect(engine, lambda: engine.load_checkpoint(folder, "all", load_module_strict=False), new)
    train(engine, STEPS)
    assert_weights(engine, resumed_alone((), (), head=True), "a new head")
    engine.save_checkpoint(folder, "with a head")

    engine = start(1, medium)
    with pytest.raises(CheckpointError, match=r"5\.bias: not in the model"):
        engine.load_checkpoint(folder, "with a head")
    gone = "the model does not have 2 parameters (5.weight, 5.bias) of the checkpoint: they are left out"
    expect(engine, lambda: engine.load_checkpoint(folder, "with a head", strict=False), gone)


@pytest.mark.parametrize("medium", [(2, ""), (3, "nvme")])
def test_other_parameters_are_trained(medium: tuple[int, str], tmp_path: Path) -> None:
    run_ranks(other_parameters, 2, medium, str(tmp_path))


# -------------------------------------------------------------------- weights alone, precision, hyperparameters
def weights_alone(folder: str) -> None:
    """Optimizer, schedule and counters stay, whatever wrote the checkpoint; the next update is that of torch."""
    train(saved := start(0, (3, "nvme")), 0)
    saved.save_checkpoint(folder, "adamw")
    plain = hf_zero.initialize(model=saved_alone(())[0], config={"zero_optimization": {"stage": 1}})[0]
    plain.save_checkpoint(folder, "no optimizer")
    for make in (adamw, lambda params: torch.optim.SGD(params, lr=RATE, momentum=0.9)):
        for tag, medium in (("adamw", (1, "")), ("no optimizer", (3, ""))):
            model = net(1)
            optimizer = make(model.parameters())
            train_alone(model, optimizer, 10)
            model.load_state_dict(saved_alone(())[0].state_dict())
            train_alone(model, optimizer, STEPS)
            train(engine := start(1, medium, optimizer=make), 10)
            load = functools.partial(engine.load_checkpoint, folder, tag, load_module_only=True)
            expect(engine, load)
            assert engine.global_steps == STEPS
            train(engine, STEPS)
            assert_weights(engine, model, (tag, medium))
    engine = start(1, (2, ""))
    anew = "it was saved without an optimizer: optimizer state and hyperparameters start anew"
    expect(engine, lambda: engine.load_checkpoint(folder, "no optimizer"), anew)


def other_precision(folder: str) -> None:
    blocks: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
    }
    for was, before in blocks.items():
        train(saved := start(0, (2, ""), **before), 0)
        saved.save_checkpoint(folder, was)
        want = hf_zero.load_fp32_state_dict(folder, was)
        for now in {"fp32": ("bf16", "fp16"), "bf16": ("fp32",), "fp16": ("bf16",)}[was]:
            fresh = ["without dynamic loss scaling: the loss scale starts at 64"] if now == "fp16" else []
            for only in (True, False):
                engine = start(1, (3, ""), **blocks[now])
                load = functools.partial(engine.load_checkpoint, folder, was, load_module_only=only)
                expect(engine, load, *([] if only else fresh))
                engine.save_checkpoint(folder, "now")
                got = hf_zero.load_fp32_state_dict(folder, "now")
                assert all(torch.equal(got[name], want[name]) for name in want), (was, now, only)
            moment = [hf_zero.full_optimizer_state(one.module[0].weight, "exp_avg") for one in (saved, engine)]
            assert torch.equal(*moment), (was, now)


def other_hyperparameters(folder: str) -> None:
    engine = start(0, (2, ""))
    engine.save_checkpoint(folder, "a")
    other = start(0, (2, ""), optimizer=lambda params: torch.optim.AdamW(params, lr=0.5, weight_decay=0.1))
    said = "those of the checkpoint: lr is 0.01, not 0.5; weight_decay is 0.01, not 0.1. Set others after"
    expect(other, lambda: other.load_checkpoint(folder), said)
    assert other.optimizer.param_groups[0]["lr"] == RATE
    expect(other, lambda: other.load_checkpoint(folder))

    def scheduled(rate: float, tag: str | None, *texts: str) -> None:
        """A load compares no rates that a schedule has changed with those that another run begins with."""
        model = net(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=20)
        one = hf_zero.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config={})[0]
        if tag is None:
            train(one, 0)
            one.save_checkpoint(folder, "scheduled")
        else:
            expect(one, lambda: one.load_checkpoint(folder, tag), *texts)

    scheduled(RATE, None)
    scheduled(RATE, "scheduled")
    scheduled(0.5, "scheduled", "initial_lr is 0.0004, not 0.02; max_lr is 0.01, not 0.5; min_lr is")


def other_buffers(folder: str) -> None:
    def make(shape: tuple[int, ...], name: str = "mean") -> Any:
        model = net(0)
        model.register_buffer(name, torch.zeros(shape))
        return hf_zero.initialize(model=model, optimizer=adamw(model.parameters()), config={})[0]

    make((2,)).save_checkpoint(folder, "a")
    for other, text in (
        (make((3,)), r"mean: shape \(3,\) in the model, \(2,\) in the"),
        (make((2,), "x"), "x: not in"),
    ):
        with pytest.raises(CheckpointError, match=text):
            other.load_checkpoint(folder)
    make((2,), "x").load_checkpoint(folder, strict=False)


def each(folder: str) -> None:
    for function in (weights_alone, other_precision, other_hyperparameters, other_buffers):
        function(f"{folder}/{function.__name__}")


def test_weights_alone_and_other_runs(tmp_path: Path) -> None:
    run_ranks(each, 2, str(tmp_path))
