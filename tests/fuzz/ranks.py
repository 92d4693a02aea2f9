"""The case under hf_zero, on the ranks of a job: one job for each phase."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from tests.fuzz.cases import Case, config_of
from tests.fuzz.optimizers import NAMES, make_schedule, make_torch
from tests.fuzz.registry import build
from tests.fuzz.train import (
    Driver,
    Trace,
    copy_of,
    events_before,
    floating,
    may_freeze,
    touched,
    train_micro,
    value_to_set,
)


class EngineDriver(Driver):
    def __init__(self, case: Case, engine: ZeroEngine, folder: str) -> None:
        self.run, self.net, self.case, self.engine = engine, engine.module, case, engine
        self.folder = folder
        self.frozen: list[nn.Parameter] = []

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def drop(self, how: str) -> None:
        dropping: dict[str, Any] = {
            "engine": self.engine,
            "optimizer": self.engine.optimizer,
            "module": self.engine.module,
        }
        dropping[how].zero_grad()

    def event(self, event: str, step: int) -> None:
        param = touched(self.net, step)
        if event == "write":
            self._write()
        elif event == "set":
            hf_zero.set_full_param(param, value_to_set(param))
        elif event == "read":
            self.engine.full_state_dict(keep=dist.get_rank() == 0)
        elif event == "look":
            with hf_zero.gathered_params(self.net):
                assert all(bool(each.isfinite().all()) for _, each in floating(self.net))
        elif event == "evaluate":
            self._evaluate(step)
        elif event == "reload":
            self.engine.save_checkpoint(Path(self.folder, "meanwhile"), f"step{step}")
            self.engine.load_checkpoint(Path(self.folder, "meanwhile"), f"step{step}")
        elif event == "load weights":
            self.engine.load_full_state_dict(self.engine.full_state_dict(keep=True))
        elif event == "copy":
            copied = copy.deepcopy(self.net)
            del copied
        elif event == "states":
            self._read_states(param)
        elif event == "rate":
            assert self.engine.optimizer is not None
            for group in self.engine.optimizer.param_groups:
                group["lr"] *= 0.7
        elif event == "freeze" and may_freeze(self.net, param):
            param.requires_grad_(False)
            self.frozen.append(param)
        elif event == "thaw":
            for param in self.frozen:
                param.requires_grad_(True)
            self.frozen.clear()

    def _read_states(self, param: nn.Parameter) -> None:
        """Master and moment of a parameter have its shape, wherever they are; there is no moment before a step."""
        kind = NAMES[self.case.optimizer].moment
        if not param.requires_grad:
            return
        master = hf_zero.full_optimizer_state(param, "master")
        assert master is not None and master.shape == param.shape
        if self.case.dtype != "bf16":
            assert torch.equal(master, hf_zero.full_param(param))
        if kind:
            moment = hf_zero.full_optimizer_state(param, kind)
            assert moment is None or moment.shape == param.shape

    def _write(self) -> None:
        chosen = [floating(self.net)[0][1], floating(self.net)[-1][1]]
        with torch.no_grad(), hf_zero.gathered_params(chosen, write_rank=0):
            if dist.get_rank() == 0:
                for param in chosen:
                    param.mul_(0.9).add_(0.01)

    def _evaluate(self, step: int) -> None:
        self.engine.eval()
        with torch.no_grad():
            train_batch = functools.partial(make_eval_batch, self.case, step)
            self.loss(train_batch())
        self.engine.train()


def make_eval_batch(case: Case, step: int) -> Any:
    from tests.fuzz.registry import make_batch

    return make_batch(case.torch_dtype, 90 + step, 0, dist.get_rank())


def train_phase(case: Case, index: int, folder: str) -> Trace:
    """All ranks call. Trains phase `index` of the case; what it leaves for the next one is in `folder`."""
    phase = case.phases[index]
    first = sum(before.steps for before in case.phases[:index])
    driver = EngineDriver(case, _start(case, index, folder), folder)
    trace = Trace()
    for step in range(first, first + phase.steps):
        _train_step(driver, step, trace)
        if case.every_step:
            trace.weights[step + 1] = driver.engine.full_state_dict(keep=True)
    if index + 1 < len(case.phases):
        driver.engine.save_checkpoint(Path(folder, "checkpoint"), f"phase{index}")
    trace.weights[first + phase.steps] = _last_weights(driver, trace)
    return trace


def _start(case: Case, index: int, folder: str) -> ZeroEngine:
    # 16 bits: the engine makes them of an fp32 model, and keeps that one's values as masters.
    net = build(case.model, torch.float32 if case.dtype == "bf16" else case.torch_dtype)
    if index:  # what is not loaded is wrong
        with torch.no_grad():
            for param in net.parameters():
                param.copy_(param + 0.5 if param.is_floating_point() else param.flip(0))
    config = config_of(case, case.phases[index], folder)
    arguments: dict[str, Any] = {}
    if case.block:
        name, params = NAMES[case.optimizer].block or ("", {})
        config["optimizer"] = {"type": name, "params": params}
    else:
        named = [(name, param) for name, param in net.named_parameters() if case.all_params or param.requires_grad]
        arguments["optimizer"] = make_torch(case.optimizer, named, case.groups, case.implementation)
    if case.schedule:
        arguments["lr_scheduler"] = lambda optimizer: make_schedule(case.schedule, optimizer, case.steps)
    engine = hf_zero.initialize(model=net, config=config, **arguments)[0]
    if index:
        engine.load_checkpoint(Path(folder, "checkpoint"), f"phase{index - 1}")
    return engine


def _train_step(driver: EngineDriver, step: int, trace: Trace) -> None:
    case, engine = driver.case, driver.engine
    events = events_before(case, step)
    for event in events:
        driver.event(event, step)
    for micro in range(case.accumulation):
        last = micro == case.accumulation - 1
        with engine.no_sync() if case.no_sync and not last else contextlib.nullcontext():
            trace.losses[step, micro, dist.get_rank()] = train_micro(driver, step, micro, dist.get_rank())
        if last and "scale gradients" in events:
            hf_zero.update_full_grads(driver.net, lambda grad, _param: 0.5 * grad)
        if last and case.clip_by_call and case.clip:
            engine.clip_grad_norm_(case.clip)
        engine.step()
    trace.norms[step] = engine.get_global_grad_norm()


def _last_weights(driver: EngineDriver, trace: Trace) -> dict[str, torch.Tensor]:
    if driver.case.teardown:
        driver.engine.teardown()
        weights = copy_of(driver.net.state_dict())
    else:
        weights = driver.engine.full_state_dict(keep=True)
    trace.buffers[dist.get_rank()] = copy_of(dict(driver.net.named_buffers()))
    return weights
