"""A machine whose accelerators torch cannot use: training on its CPU without a word is not what was asked for."""

from __future__ import annotations

import torch

from hf_zero.native.device_files import are_hidden, device_file


def unusable_accelerator() -> str | None:
    """Return what is wrong where torch is built for an accelerator that is there and cannot use it; None elsewhere.

    A driver older than torch's CUDA is such a case: torch.accelerator.is_available() warns then, and says False.
    """
    kind = torch.accelerator.current_accelerator()  # that torch is built for
    if kind is None or torch.accelerator.is_available() or are_hidden(kind.type):
        return None
    file = device_file(kind.type)
    reason = None if file is None else _refusal(kind)
    if reason is None:
        return None
    return (
        f"torch is built for {kind.type} devices, this machine has one ({file}), and torch cannot use it: {reason}.\n"
        "Install a driver and a torch that fit together (https://pytorch.org lists the builds), or compute on the CPU "
        "with ACCELERATE_USE_CPU=true, TrainingArguments(use_cpu=True) or Accelerator(cpu=True)."
    )


def _refusal(kind: torch.device) -> str | None:
    """The first sentence of the error that torch raises at the first use."""
    try:
        torch.empty(1, device=kind)
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return None
