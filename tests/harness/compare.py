"""A training run must come near to the one-process reference, and the comparison must say something."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.harness.reference import Case, Trace


def assert_not_vacuous(case: Case, want: Trace) -> None:
    assert all(map(math.isfinite, want.losses + want.norms))
    assert len(set(want.losses)) == case.steps, "the losses do not change"
    assert all(norm > case.clip for norm in want.norms), f"clipping has no effect: {want.norms}"
    first, last = want.params[0], want.params[-1]
    model = case.build()
    for name, param in model.named_parameters():
        moved = not torch.equal(first[name], last[name])
        if must_stay(case, name, param):
            assert not moved, f"{name} moved"
        elif not name.endswith("key.bias"):  # no true gradient: SGD may leave it where it is
            assert moved, f"{name} did not move"


def must_stay(case: Case, name: str, param: nn.Parameter) -> bool:
    """Whether training must leave a parameter alone, to the bit: frozen, or without gradient on every rank."""
    variant = case.model.split("+")
    without = "unused" in variant or ("unused_somewhere" in variant and case.world == 1)
    return not param.requires_grad or (without and (name.startswith("extra.") or name.endswith(".gain")))


def assert_stays(case: Case, got: Trace, label: str) -> None:
    """Raise where a parameter that must stay does not, to the bit."""
    for name, param in case.build().named_parameters():
        if must_stay(case, name, param):
            for params in got.params:
                assert torch.equal(params[name], got.params[0][name]), f"{label}: {name} moved"


def assert_same_exact(case: Case, want: Trace, got: Trace, label: str) -> None:
    """fp64: equal up to the order of summation.

    The floor `lr` is there for parameters whose true gradient is zero (key biases): Adam turns their rounding errors,
    around 1e-17, into steps of lr * 1e-17 / eps = lr * 1e-9.
    """
    for step in range(case.steps):
        _assert_near(f"{label}: loss {step}", want.losses[step], got.losses[step], 1e-9)
        _assert_near(f"{label}: norm {step}", want.norms[step], got.norms[step], 1e-9)
        assert got.params[step + 1].keys() >= want.params[step + 1].keys()
        for name, expected in want.params[step + 1].items():
            difference = (got.params[step + 1][name] - expected).abs().max()
            limit = 1e-9 * max(float(expected.abs().max()), case.lr)
            assert difference <= limit, f"{label}: {name} after step {step}: off by {difference:.3g} > {limit:.3g}"


def assert_same_single(case: Case, want: Trace, got: Trace, label: str) -> None:
    """fp32 against the fp64 reference; see `single_bounds`."""
    bounds = single_bounds(case, want)
    for step in range(case.steps):
        _assert_near(f"{label}: loss {step}", want.losses[step], got.losses[step], 1e-5)
        _assert_near(f"{label}: norm {step}", want.norms[step], got.norms[step], 1e-5)
        for name, expected in want.params[step + 1].items():
            excess = (got.params[step + 1][name].double() - expected).abs() / bounds[step][name]
            assert excess.max() <= 1, f"{label}: {name} after step {step}: {excess.max():.3g} x the bound"


# A gradient in fp32 differs from the fp64 one by at most this many roundings of the largest gradient in the model: the
# sums behind it have up to a few hundred terms, and the weights it was computed from differ a little themselves. 17
# were seen, at stage 0: processors sum in different orders.
GRADIENT_ROUNDINGS = 24
UNIT_ROUNDOFF = 2.0**-24


def single_bounds(case: Case, want: Trace) -> list[dict[str, torch.Tensor]]:
    """Return the most by which an fp32 run may differ from the fp64 reference, by step, parameter and element.

    [Note: Bound of the fp32 comparison]
    Let every gradient of a step be off by at most d = GRADIENT_ROUNDINGS * u * max|g|, u = 2**-24, the maximum over
    the model: where a gradient is small because large terms cancel, their rounding stays.

    AdamW moves an element by lr * m / D with D = sqrt(v) + eps (both bias-corrected: m = sum w_i g_i, sum w_i = 1, and
    v = sum q_i g_i**2, sum q_i = 1). To first order |d(m/D)| <= sum_i (w_i / D + |m| q_i |g_i| / (sqrt(v) D**2)) d.
    With |m| <= c sqrt(v), q_i |g_i| <= sqrt(q_i) sqrt(v) and sum_i sqrt(q_i) <= sqrt(t) that is (1 + c sqrt(t)) d / D
    at the most, where c = max |m| / sqrt(v) <= sqrt(sum w_i**2 / q_i) < 1.1 for t <= 5. And it is 2 c at the most,
    however small the gradient: where the true gradient is about zero the step is the sign of a rounding error. So
    after step t the bound is the sum over steps s <= t of lr * min(2 c, (1 + c sqrt(s)) max(d_1..d_s) / D_s).

    SGD with momentum 0.9: the buffer is off by sum_i 0.9**(s - i) d_i.

    To both comes the rounding of the parameter itself, 2 u |p| per step: the update, and the decay.
    """
    c = 1.1
    moved = {name: torch.zeros_like(value) for name, value in want.params[0].items()}
    momentum, largest = 0.0, 0.0
    bounds = []
    for step in range(case.steps):
        d = GRADIENT_ROUNDINGS * UNIT_ROUNDOFF * want.max_grad[step]
        largest, momentum = max(largest, d), 0.9 * momentum + d
        for name, scale in want.scale_v[step].items():
            change = torch.full_like(scale, momentum)
            if case.optimizer == "adamw":
                change = ((1 + c * math.sqrt(step + 1)) * largest / scale).clamp(max=2 * c)
            moved[name] = moved[name] + case.lr * change + 2 * UNIT_ROUNDOFF * want.params[step + 1][name].abs()
        # The floor covers parameters that do not move: they were rounded to fp32 before training.
        bounds.append({name: value + UNIT_ROUNDOFF * want.params[0][name].abs() for name, value in moved.items()})
    return bounds


def _assert_near(label: str, want: float, got: float, relative: float) -> None:
    assert abs(got - want) <= relative * abs(want), f"{label}: {got!r}, want {want!r}"
