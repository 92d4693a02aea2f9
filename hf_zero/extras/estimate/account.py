"""Planned beside measured, at the end of a run: lines in rank 0's log."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.extras.estimate.plan import Plan, plan_units
from hf_zero.native.machine import peak_resident_bytes

logger = logging.getLogger(__name__)

_KINDS = {
    "parameters": "parameters",
    "master": "master weights",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "gathered_peak": "gathered at most",
    "gradients_peak": "unsharded gradients at most",
    "disk": "of all that on disk",
}


class AccountPart(EnginePart):
    """Logs the memory that was planned for the engine and what it took, on rank 0 at level INFO.

    No communication. The plan takes a fraction of a second, and comes from sizes alone (see estimate.plan). A
    pipeline's stages have no account: the plan is for one model on all ranks.
    """

    engine: ZeroEngine

    def summarize(self) -> None:
        engine = self.engine
        if engine.comm.rank != 0 or engine.run_comm is not engine.comm or not logger.isEnabledFor(logging.INFO):
            return
        try:
            lines = account(engine)
        # The user's optimizer runs here on shards without values; the run itself has succeeded.
        except Exception as error:
            logger.info("hf_zero: memory was not planned: %s: %s", type(error).__name__, error)
            return
        for line in lines:
            logger.info("hf_zero: %s", line)


def account(engine: ZeroEngine) -> list[str]:
    """Return the lines that `AccountPart` logs, for the rank that calls."""
    plan, report = plan_engine(engine), engine.memory_report()
    pairs = [
        f"{name} {_mb(plan.report[kind])} | {_mb(report[kind])}"
        for kind, name in _KINDS.items()
        if plan.report[kind] or report[kind]
    ]
    peak, what = _measured_peak(engine.comm)
    planned = plan.memory_peak if engine.comm.computes_on_host else plan.device_peak
    return [
        f"memory of rank {engine.comm.rank}, planned | measured, MB: {', '.join(pairs)}",
        f"peak {_mb(peak)} MB ({what}); planned without activations {_mb(planned)} MB",
    ]


def plan_engine(engine: ZeroEngine) -> Plan:
    """The plan of a live engine, from the layouts of its units; activations and start-up are not in it."""
    optimizer = engine.optimizer
    return plan_units(
        engine.units,
        dataclasses.replace(engine.config, gradient_accumulation_steps=engine.accumulation_steps),
        engine.comm,
        buffers=engine.module.buffers(),
        optimizer=None if optimizer is None else functools.partial(_alike, optimizer.optimizer),
    )


def _alike(optimizer: torch.optim.Optimizer, params: Iterable[Any]) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other parameters."""
    known = inspect.signature(type(optimizer)).parameters
    # The fused kernels do not take meta tensors, and keep the same state.
    settings = {name: value for name, value in optimizer.defaults.items() if name in known and name != "fused"}
    return type(optimizer)(params, **settings)


def _measured_peak(comm: Comm) -> tuple[int, str]:
    if not comm.computes_on_host:
        return torch.accelerator.max_memory_allocated(comm.device), "torch.accelerator.max_memory_allocated"
    return peak_resident_bytes(), "resident memory of the process, libraries included"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}"
