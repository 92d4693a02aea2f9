"""Runs one case and says how it ended: equal to one process, refused as expected, or failed."""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from typing import Any

import torch

from tests.fuzz.cases import Case, expected_errors
from tests.fuzz.ranks import train_phase
from tests.fuzz.reference import train_reference
from tests.fuzz.train import Trace
from tests.harness.ranks import Ended, RankFailure, try_ranks

TIME_LIMIT_S = 60.0
EQUAL, REFUSED, FAILED = "equal", "refused", "failed"


@dataclasses.dataclass(frozen=True)
class Verdict:
    kind: str
    text: str = ""


class Mismatch(Exception):
    """The ranks did not compute what one process computes."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """A difference may be `absolute` + `relative` * the largest value of the tensor."""

    absolute: float
    relative: float
    loss: float

    @classmethod
    def of(cls, case: Case, want: Trace) -> Tolerance:
        if case.dtype == "bf16":  # a weight may be rounded to the other side, and the gradients with it
            weights, losses = _of_rounding(case, want)
            return cls(max(0.02, 2 * weights), 2.0**-7, max(0.05, 2 * losses))
        if case.dtype == "fp32" or case.row.has("typed"):
            return cls(2e-5, 1e-5, 1e-4)
        return cls(1e-10, 1e-10, 1e-10)


def _of_rounding(case: Case, want: Trace) -> tuple[float, float]:
    """Return by how much rounding to bf16 takes the reference itself: weights, and losses relative. A rate that is too
    high for the model lets every difference grow.
    """
    exact = train_reference(dataclasses.replace(case, dtype="fp32"))
    weights = [
        float((value.double() - exact.weights[step][name].double()).abs().max())
        for step, after in want.weights.items()
        for name, value in after.items()
        if value.is_floating_point() and value.numel()
    ]
    losses = [abs(loss - exact.losses[at]) / max(abs(loss), 1e-3) for at, loss in want.losses.items()]
    return max(weights), max(losses)


def judge(case: Case, time_limit_s: float = TIME_LIMIT_S) -> Verdict:
    """All of it: the reference, the ranks of each phase, the comparison. Does not raise."""
    try:
        want = train_reference(case)
        _check_moved(case, want)
        tolerance = Tolerance.of(case, want)
    except Exception as error:
        return Verdict(FAILED, f"the reference failed: {type(error).__name__}: {error}")
    folder = tempfile.mkdtemp(prefix="hf-zero-fuzz-")
    try:
        for index, phase in enumerate(case.phases):
            ended = try_ranks((train_phase, (case, index, folder), {}), phase.world, timeout=time_limit_s)
            verdict = _errors(case, ended)
            if verdict is not None:
                return verdict
            _compare_phase(case, index, want, tolerance, ended.outcomes)
    except Mismatch as error:
        return Verdict(FAILED, f"mismatch: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Verdict(EQUAL)


def _check_moved(case: Case, want: Trace) -> None:
    """A reference that stays where it is says nothing."""
    last = want.weights[case.steps]
    if not any(not torch.equal(value, last[name]) for name, value in want.weights[0].items()):
        raise Mismatch("no weight of the reference moved")
    if not all(bool(value.isfinite().all()) for value in last.values()):
        raise Mismatch("weights of the reference are not finite")


# ---------------------------------------------------------------- errors
def _errors(case: Case, ended: Ended) -> Verdict | None:
    """None if every rank returned."""
    if ended.hang:
        return Verdict(FAILED, f"hang: {ended.hang}{ended.logs}")
    failures = [outcome for outcome in ended.outcomes if isinstance(outcome, RankFailure)]
    if not failures:
        return None
    expected = expected_errors(case)
    right = [one for one in failures if one.kind in expected and expected[one.kind] in one.message.lower()]
    # A rank that waits for one that has raised already says that it is gone.
    told = [one for one in failures if one.kind == "DivergenceError" and "has stopped" in one.message]
    if right and len(failures) == len(ended.outcomes) and all(one in right or one in told for one in failures):
        return Verdict(REFUSED, f"{right[0].kind}: {right[0].message}")
    said = f"errors on {len(failures)} of {len(ended.outcomes)} ranks"
    parts = [f"---- rank {failure.rank}: {failure.kind}\n{failure.traceback}" for failure in failures]
    return Verdict(FAILED, "\n".join([said, *parts]) + ended.logs)


# ---------------------------------------------------------------- numbers
def _compare_phase(case: Case, index: int, want: Trace, tolerance: Tolerance, got: list[Any]) -> None:
    first = sum(phase.steps for phase in case.phases[:index])
    last = first + case.phases[index].steps
    for rank, trace in enumerate(got):
        for (step, micro, _), loss in trace.losses.items():
            where = f"rank {rank}: loss of step {step}, micro-batch {micro}"
            _check_number(where, loss, want.losses[step, micro, rank], tolerance.loss)
        if case.dtype != "bf16":
            for step, norm in trace.norms.items():
                _check_number(f"rank {rank}: norm of step {step}", norm, want.norms[step], tolerance.loss)
        if len(trace.losses) != case.phases[index].steps * case.accumulation or last not in trace.weights:
            raise Mismatch(f"rank {rank} returned {len(trace.losses)} losses, weights of {sorted(trace.weights)}")
        for step, weights in trace.weights.items():
            _check_weights(f"rank {rank}: after {step} steps", weights, want.weights[step], tolerance)
            _check_equal(f"rank {rank}: after {step} steps", weights, got[0].weights[step], want.weights[step])
        if index + 1 == len(case.phases):
            _check_weights(f"rank {rank}: buffers", trace.buffers[rank], want.buffers[rank], tolerance)


def _check_number(where: str, got: float | None, want: float | None, relative: float) -> None:
    assert want is not None
    if got is None or not math.isfinite(got) or abs(got - want) > relative * max(abs(want), 1e-3):
        raise Mismatch(f"{where}: {got!r}, want {want!r}")


def _check_weights(
    where: str, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: Tolerance
) -> None:
    for name, expected in want.items():
        if name not in got or (got[name].shape, got[name].dtype) != (expected.shape, expected.dtype):
            shown = (got[name].shape, got[name].dtype) if name in got else "nothing"
            raise Mismatch(f"{where}: {name} is {shown}, want {expected.shape}, {expected.dtype}")
        if not expected.numel():
            continue
        if not expected.is_floating_point():
            if not torch.equal(got[name], expected):
                raise Mismatch(f"{where}: {name} is {got[name]}, want {expected}")
            continue
        off = float((got[name].double() - expected.double()).abs().max())
        limit = tolerance.absolute + tolerance.relative * float(expected.abs().max())
        if not off <= limit:
            raise Mismatch(f"{where}: {name} is off by {off:.3g} > {limit:.3g}")


def _check_equal(
    where: str, got: dict[str, torch.Tensor], first: dict[str, torch.Tensor], names: dict[str, torch.Tensor]
) -> None:
    """Weights are the same bits on all ranks."""
    for name in names:
        if not torch.equal(got[name], first[name]):
            raise Mismatch(f"{where}: {name} is not what rank 0 has")
