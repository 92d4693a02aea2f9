"""Whatever an offloaded update runs beside, the result is that of the sequential order."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from hf_zero.optim.offload.host_adam import HostAdam
from tests.harness.at_night import all_at_night
from tests.harness.ranks import run_ranks

STEPS = 6


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))
        self.head = nn.Parameter(torch.randn(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return ((x * self.head).sum(1) - 1).square().mean()


def build() -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(3)
    model = Net().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def start(stage: int, offload: dict[str, Any], params: str = "none", **config: Any) -> ZeroEngine:
    model, optimizer = build()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": offload}
    if params != "none":
        zero["offload_param"] = {"device": params, "nvme_path": offload.get("nvme_path"), "max_in_cpu": 0}
    return hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": zero, **config})[0]


def backward(engine: ZeroEngine, step: int) -> float:
    loss = engine(rows(step).chunk(engine.world_size)[engine.rank])
    engine.backward(loss)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / engine.world_size


def assert_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


# -------------------------------------------------------------------- delayed update
def delayed_reference(first: int, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process: from step `first` on, the update of a step is applied after the backward of the next one."""
    model, optimizer = build()
    losses: list[float] = []
    waiting: list[torch.Tensor] | None = None
    for step in range(STEPS):
        loss = model(rows(step))
        loss.backward()
        losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        mine = [param.grad for param in model.parameters()]
        if waiting is not None:
            _apply(model, optimizer, waiting)
            waiting = None
        if step >= first:
            waiting = mine
        else:
            _apply(model, optimizer, mine)
        optimizer.zero_grad()
    if waiting is not None:
        _apply(model, optimizer, waiting)
    return losses, dict(model.state_dict())


def _apply(model: nn.Module, optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> None:
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    optimizer.step()


def train_delayed(
    stage: int, offload: dict[str, Any], clip: float, params: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = start(stage, offload, params, gradient_clipping=clip)
    losses = []
    for step in range(STEPS):
        losses.append(backward(engine, step))
        engine.step()
    return losses, engine.full_state_dict(keep=True)


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_delayed_update(stage: int, first: int, tmp_path: Path) -> None:
    for device, clip, params in (("cpu", 0.0, "none"), ("nvme", 0.05, "none"), ("nvme", 0.0, "nvme")):
        if params != "none" and stage < 3:
            continue
        offload = {
            "device": device,
            "nvme_path": str(tmp_path),
            "delayed_update": True,
            "delayed_update_start": first,
        }
        want_losses, want = delayed_reference(first, clip)
        losses, weights = run_ranks(train_delayed, 2, stage, offload, clip, params, timeout=60)[0]
        assert losses == pytest.approx(want_losses, rel=1e-9)
        assert_near(weights, want)
        coalesced = delayed_reference(STEPS, clip)[0]
        assert losses[first + 2] != pytest.approx(coalesced[first + 2], rel=1e-6), "nothing was delayed"


# -------------------------------------------------------------------- what undoes an update that began in backward
def plain(script: str) -> dict[str, torch.Tensor]:
    """The same script in one process."""
    model, optimizer = build()
    for step in range(STEPS):
        model(rows(step)).backward()
        if script == "skip" and step % 2:
            optimizer.zero_grad()
            continue
        if script == "lr":
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        if script == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if script == "twice":
            model(rows(step + 100)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


# A callback may read these before the step, while updates have their states.
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "full parameter": hf_zero.full_param,
    "full gradient": hf_zero.full_grad,
    "full master": lambda param: hf_zero.full_optimizer_state(param, "master"),
    "local parameter": lambda param: [hf_zero.local_param(param)],  # a rank may own nothing
    "local state": lambda param: [hf_zero.local_optimizer_state(param, "exp_avg")],
}


def scripted(script: str, stage: int, folder: str, params: str) -> tuple[dict[str, torch.Tensor], int]:
    """Return (weights, updates that had begun when `step` was called)."""
    engine = start(stage, {"device": "nvme", "nvme_path": folder}, params)
    assert engine.optimizer is not None and isinstance(engine.optimizer._native, HostAdam)
    early = 0
    for step in range(STEPS):
        backward(engine, step)
        early += len(engine.optimizer._native._early)
        if script == "skip" and step % 2:
            engine.zero_grad()
            continue
        if script == "look":  # whole parameters while updates run, or wait for their step
            with torch.no_grad(), hf_zero.gathered_params(engine.module):
                engine.module(rows(step))
        if script in READS:
            for param in engine.module.parameters():
                assert READS[script](param) is not None
        if script == "lr":
            engine.optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        if script == "clip":
            engine.clip_grad_norm_(0.05)
        if script == "twice":
            backward(engine, step + 100)
        engine.optimizer.step()
    return engine.full_state_dict(keep=True), early


@pytest.mark.slow
@pytest.mark.parametrize("stage", all_at_night((1, 2, 3), (2, 3)))
@pytest.mark.parametrize("script", ["plain", "skip", "lr", "clip", "twice", "look", *READS])
def test_early_updates_are_undone(script: str, stage: int, tmp_path: Path) -> None:
    for params in ("none", "nvme")[: 2 if stage == 3 else 1]:
        weights, early = run_ranks(scripted, 2, script, stage, str(tmp_path), params, timeout=60)[0]
        assert_near(weights, plain(script))
        assert early > 0, "no update began in backward"


def look_too_early(stage: int) -> str:
    engine = start(stage, {"device": "cpu", "delayed_update": True})
    backward(engine, 0)
    engine.step()
    with pytest.raises(hf_zero.StateError, match="delayed") as caught:
        engine.module.state_dict()
    engine.finish_updates()
    if stage < 3:
        state = engine.module.state_dict()
        assert_near(dict(state), engine.full_state_dict(keep=True))
    return str(caught.value)


def test_parameters_without_their_delayed_update_are_not_given_away() -> None:
    assert all("engine.finish_updates()" in text for text in run_ranks(look_too_early, 2, 2, timeout=60))


# -------------------------------------------------------------------- around the training
def edit(stage: int, device: str, folder: str) -> float:
    offload = {"device": device, "nvme_path": folder, "delayed_update": True}
    engine = start(stage, offload, "cpu" if stage == 3 else "none")
    for step in range(2):
        backward(engine, step)
        engine.step()
    with hf_zero.gathered_params(engine.module, write_rank=0):
        engine.module.head.data.fill_(7.0)
    return float((engine.full_state_dict(keep=True)["head"] - 7.0).abs().max())


@pytest.mark.parametrize(("stage", "device"), [(2, "cpu"), (3, "cpu"), (3, "nvme")])
def test_an_edit_is_not_overwritten_by_a_delayed_update(stage: int, device: str, tmp_path: Path) -> None:
    assert run_ranks(edit, 2, stage, device, str(tmp_path), timeout=60) == [0.0, 0.0]


def second_optimizer(stage: int, device: str, folder: str) -> dict[str, torch.Tensor]:
    engine = start(stage, {"device": device, "nvme_path": folder, "delayed_update": True})
    for step in range(2):
        backward(engine, step)
        engine.step()
    optimizer = torch.optim.AdamW(engine.module.parameters(), lr=1e-2, weight_decay=0.1)
    engine.attach_optimizer(optimizer)
    for step in range(2, 4):
        backward(engine, step)
        engine.step()
    return engine.full_state_dict(keep=True)


def second_optimizer_in_one_process() -> dict[str, torch.Tensor]:
    """Each optimizer makes two updates; the second one of each is delayed past nothing: it is waited for."""
    model, _ = build()
    for first in (0, 2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        grads = []
        for step in (first, first + 1):
            model(rows(step)).backward()
            grads.append([param.grad for param in model.parameters()])
            optimizer.zero_grad()
            if len(grads) == 2:
                _apply(model, optimizer, grads[0])
        _apply(model, optimizer, grads[1])
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_second_optimizer_starts_anew(device: str, tmp_path: Path) -> None:
    got = run_ranks(second_optimizer, 2, 2, device, str(tmp_path), timeout=60)[0]
    assert_near(got, second_optimizer_in_one_process())


def threads() -> int:
    """Count the threads of this process, but for the one that looks at other ranks for all engines, and stays."""
    return sum(thread.name != "hf_zero-watch" for thread in threading.enumerate())


def forget(folder: str) -> tuple[bool, list[str], int]:
    """Return (the engine is gone, its swap files, threads that still update)."""
    before = threads()
    engine = start(3, {"device": "nvme", "nvme_path": folder}, "nvme")
    backward(engine, 0)
    engine.step()
    engine.finish_updates()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    deadline = time.monotonic() + 10
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()  # a thread may have had it the first time
    dist.barrier()
    files = [path.name for path in Path(folder).glob("hf_zero_swap/*/*/*.swap")]
    return gone() is None, files, threads() - before


def test_a_forgotten_model_leaves_nothing(tmp_path: Path) -> None:
    assert run_ranks(forget, 2, str(tmp_path), timeout=60) == [(True, [], 0)] * 2


def moments(optimizer: str) -> tuple[int, int]:
    """Return (bytes of masters, of moments)."""
    from hf_zero.optim import CPUAdam

    torch.manual_seed(3)
    model = Net()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}
    config: dict[str, Any] = {"zero_optimization": zero}
    made = None
    if optimizer == "client":
        made = CPUAdam(model.parameters(), lr=1e-2, fp32_optimizer_states=False)
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "fp32_optimizer_states": False}}
    engine = hf_zero.initialize(model=model, optimizer=made, config=config)[0]
    for step in range(3):
        engine.backward(engine(rows(step).float().chunk(2)[engine.rank]))
        engine.step()
    report = engine.memory_report()
    return report["master"], report["optimizer"]


@pytest.mark.parametrize("optimizer", ["client", "configured"])
def test_moments_in_16_bits(optimizer: str) -> None:
    masters, both_moments = run_ranks(moments, 2, optimizer, timeout=60)[0]
    assert both_moments == masters
