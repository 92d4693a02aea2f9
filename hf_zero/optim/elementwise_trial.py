"""Tries an optimizer class that hf_zero does not know: whether ranges of elements get the updates of full parameters.

Two small parameters are trained in full, and as the ranges that two ranks would have, by new optimizers of the class
with the settings of the given one, but for the rate, which a warm-up may have set to 0. Gradients have no component
along the parameter in the first step, rows of very different sizes in all of them, and more elements than a block of
8-bit states has. An update that uses a row, a norm or a block gives other values then.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

_SHAPES = ((96, 64), (70,))
_CUTS = (2900, 33)  # elements of each parameter that the first rank has
_STEPS = 4
_RATE = 0.01
DIFFERS = "a trial of it on a few elements gave ranges of them other updates than the whole"


def why_not_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> str | None:
    """Return why `optimizer` is not taken for one that treats every element by itself, None where the trial shows it.

    The same on all ranks; no communication. The optimizer and its parameters are left alone.
    """
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            for group in optimizer.param_groups:
                full = _train(optimizer, group, [(0, math.prod(shape)) for shape in _SHAPES], device, flat=False)
                cut = (
                    [(0, at) for at in _CUTS],
                    [(at, math.prod(shape)) for at, shape in zip(_CUTS, _SHAPES, strict=True)],
                )
                parts = [_train(optimizer, group, ranges, device, flat=True) for ranges in cut]
                for whole, *ranges in zip(full, *parts, strict=True):
                    largest = whole.abs().max().item()
                    if not 0 < largest < math.inf:
                        return "a trial of it on a few elements did not move them"
                    if not torch.allclose(torch.cat(ranges), whole, rtol=1e-4, atol=1e-5 * largest):
                        return DIFFERS
    except Exception as error:  # of the class
        return f"a trial of it on a few elements failed ({type(error).__name__}: {str(error)[:200]})"
    return None


def _train(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    ranges: list[tuple[int, int]],
    device: torch.device,
    *,
    flat: bool,
) -> list[torch.Tensor]:
    """Return by how much some steps move these ranges of the parameters, 1-D."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    params = []
    for value, (start, end), shape in zip(values, ranges, _SHAPES, strict=True):
        mine = value.reshape(-1)[start:end].to(device, copy=True)
        params.append(torch.nn.Parameter(mine if flat else mine.view(shape)))
    own = {key: value for key, value in group.items() if key != "params"}
    if own.get("lr") is not None:
        own["lr"] = _RATE
    trial = type(optimizer)([{**own, "params": params}], **_arguments(optimizer))
    if hasattr(trial, "train"):  # it has other weights for evaluation
        trial.train()
    for step in range(_STEPS):
        for param, value, (start, end) in zip(params, values, ranges, strict=True):
            grad = torch.randn(value.shape, generator=generator) * torch.logspace(-3, 1, len(value)).view(
                -1, *[1] * (value.dim() - 1)
            )
            if step == 0:
                grad -= value * (grad * value).sum(-1, keepdim=True) / (value * value).sum(-1, keepdim=True)
            param.grad = grad.reshape(-1)[start:end].to(device).view(param.shape)
        trial.step()
    ends = [param.detach().reshape(-1).cpu() for param in params]
    starts = [value.reshape(-1)[start:end] for value, (start, end) in zip(values, ranges, strict=True)]
    return [end - start for end, start in zip(ends, starts, strict=True)]


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the arguments of its class that the optimizer shows: among its defaults, attributes, or `args`."""
    shown: dict[str, Any] = {**vars(optimizer), **optimizer.defaults}
    for value in vars(optimizer).values():
        if isinstance(value, argparse.Namespace) or type(value).__name__ == "MockArgs":  # bitsandbytes
            shown = {**vars(value), **shown}
    names = list(inspect.signature(type(optimizer)).parameters)[1:]
    return {name: shown[name] for name in names if name in shown}
