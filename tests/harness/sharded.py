"""Trains a `Case` under hf_zero on the ranks of a job, and records the same things as the reference."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from tests.harness.reference import Case, Trace


@dataclasses.dataclass(frozen=True)
class Options:
    """The options say how a case is trained under hf_zero; none of it may change the result."""

    stage: int
    direct_backward: bool = False  # loss.backward() instead of engine.backward(loss)
    clip_by_call: bool = False  # engine.clip_grad_norm_ instead of gradient_clipping
    zero: tuple[tuple[str, Any], ...] = ()  # further keys of zero_optimization
    config: tuple[tuple[str, Any], ...] = ()  # further keys of the configuration

    def __str__(self) -> str:
        shown = [f"stage {self.stage}"]
        shown += [field.name for field in dataclasses.fields(self)[1:3] if getattr(self, field.name)]
        shown += [f"{key}={value}" for key, value in (*self.zero, *self.config)]
        return ", ".join(shown)


def zero_config(case: Case, options: Options) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "desync_timeout": 20,
        "gradient_clipping": 0.0 if options.clip_by_call else case.clip,
        "zero_optimization": {
            "stage": options.stage,
            "stage3_param_persistence_threshold": 0,
            **dict(options.zero),
        },
        **dict(options.config),
    }


def start(case: Case, options: Options, prepare: Callable[[nn.Module], Any] | None = None) -> ZeroEngine:
    """The engine of a fresh model, with its optimizer."""
    model = case.build()
    if prepare is not None:
        prepare(model)
    engine = hf_zero.initialize(model=model, optimizer=case.make_optimizer(model), config=zero_config(case, options))[
        0
    ]
    return engine


def micro_step(engine: ZeroEngine, case: Case, step: int, micro: int, options: Options) -> float:
    """Forward, backward and `engine.step()` of one micro-batch; returns its loss."""
    output = engine(**case.batch(step, micro, dist.get_rank()))
    loss: torch.Tensor = output["loss"]
    if options.direct_backward:
        loss.backward()
    else:
        engine.backward(loss)
    if options.clip_by_call and engine.is_gradient_accumulation_boundary():
        engine.clip_grad_norm_(case.clip)
    engine.step()
    return loss.item()


def train(case: Case, options: Options) -> Trace:
    """All ranks call. Losses are means over ranks and micro-batches; parameters are whole, after each step."""
    engine = start(case, options)
    trace = Trace(params=[engine.full_state_dict(keep=True)])
    for step in range(case.steps):
        losses = [micro_step(engine, case, step, micro, options) for micro in range(case.accumulation)]
        record(trace, engine, losses)
    return trace


def record(trace: Trace, engine: ZeroEngine, losses: list[float]) -> None:
    """Append a step to the trace: the mean loss over ranks, the norm, and the gathered parameters."""
    trace.losses.append(mean_over_ranks(sum(losses) / len(losses)))
    norm = engine.get_global_grad_norm()
    assert norm is not None
    trace.norms.append(norm)
    trace.params.append(engine.full_state_dict(keep=True))


def mean_over_ranks(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_all(runs: list[tuple[Case, Options]]) -> list[Trace | str]:
    """Rank 0 returns the traces; other ranks a digest of each, to be equal on all ranks (`rank_digests`)."""
    results: list[Trace | str] = []
    for case, options in runs:
        try:
            trace = train(case, options)
        except Exception as error:
            error.add_note(f"in {case}, {options}")
            raise
        results.append(trace if dist.get_rank() == 0 else digest(trace))
    return results


def digest(trace: Trace) -> str:
    """Equal exactly if norms and parameters are equal to the bit."""
    hasher = hashlib.sha256(repr(trace.norms).encode())
    for params in trace.params:
        for name, value in params.items():
            hasher.update(name.encode())
            hasher.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
