"""Optimizers written a second time, from their formulas, over whole tensors of one process."""

from __future__ import annotations

import math
from typing import Any

import torch

State = dict[str, dict[str, Any]]


def lion(
    params: dict[str, torch.Tensor], grads: dict[str, torch.Tensor], state: State, step: int, **options: Any
) -> None:
    """Chen et al. 2023, algorithm 2."""
    lr, (beta1, beta2), decay = options["lr"], options["betas"], options["weight_decay"]
    for name, grad in grads.items():
        momentum = state.setdefault(name, {}).get("m", torch.zeros_like(grad))
        params[name] -= lr * (torch.sign(beta1 * momentum + (1 - beta1) * grad) + decay * params[name])
        state[name]["m"] = beta2 * momentum + (1 - beta2) * grad


def lamb(
    params: dict[str, torch.Tensor], grads: dict[str, torch.Tensor], state: State, step: int, **options: Any
) -> None:
    """DeepSpeed's form of LAMB (csrc/lamb/fused_lamb_cuda_kernel.cu); the trust ratios of all steps are kept."""
    lr, (beta1, beta2), eps = options["lr"], options["betas"], options["eps"]
    for name, grad in grads.items():
        own = state.setdefault(name, {"m": torch.zeros_like(grad), "v": torch.zeros_like(grad), "t": 0, "ratios": []})
        own["t"] += 1
        own["m"] = beta1 * own["m"] + (1 - beta1) * grad
        own["v"] = beta2 * own["v"] + (1 - beta2) * grad**2
        root = torch.sqrt(own["v"] + eps) if options.get("eps_inside_sqrt") else torch.sqrt(own["v"]) + eps
        update = own["m"] / root + options["weight_decay"] * params[name]
        size, length = float(params[name].norm()), float(update.norm())
        ratio = 1.0
        if size and length:
            ratio = min(max(size / length, options.get("min_coeff", 0.01)), options.get("max_coeff", 10.0))
        own["ratios"].append(ratio)
        if options.get("bias_correction", True):
            rate = lr * math.sqrt(1 - beta2 ** own["t"]) / (1 - beta1 ** own["t"])
        else:
            rate = lr
        params[name] -= rate * ratio * update


def uncorrected_adam(
    params: dict[str, torch.Tensor], grads: dict[str, torch.Tensor], state: State, step: int, **options: Any
) -> None:
    """Kingma and Ba 2014 without the correction; decoupled decay as Loshchilov and Hutter 2017."""
    lr, (beta1, beta2), decay = options["lr"], options["betas"], options["weight_decay"]
    for name, grad in grads.items():
        own = state.setdefault(name, {"m": torch.zeros_like(grad), "v": torch.zeros_like(grad)})
        if not options.get("adam_w_mode", True):
            grad = grad + decay * params[name]
        else:
            params[name] -= lr * decay * params[name]
        own["m"] = beta1 * own["m"] + (1 - beta1) * grad
        own["v"] = beta2 * own["v"] + (1 - beta2) * grad**2
        params[name] -= lr * own["m"] / (own["v"].sqrt() + options["eps"])


FORMULAS = {"Lion": lion, "Lamb": lamb, "Adam": uncorrected_adam}
