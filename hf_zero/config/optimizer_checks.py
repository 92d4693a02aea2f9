"""Conditions between the optimizer block and the rest of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.optimizers import NOT_TAKEN, OTHER_OPTIMIZERS
from hf_zero.config.parse import look_up
from hf_zero.config.problems import Problems

# Types whose offloaded states are updated by native code.
NATIVE = ("Adam", "AdamW")
_PARAMS = "optimizer.params"
# What torch's Adam has and Adam without bias correction has not.
_NOT_UNCORRECTED = ("torch_adam", "amsgrad", "maximize", "capturable", "differentiable")
_OFFLOAD = "zero_optimization.offload_optimizer.device"


def optimizer_problems(values: Mapping[str, Any], problems: Problems) -> None:
    """Add the problems of an optimizer block that show only when its type is known."""
    kind = look_up(values, "optimizer.type")
    if kind in ("Adam", "AdamW") and look_up(values, f"{_PARAMS}.bias_correction") is False:
        for name in _NOT_UNCORRECTED:
            if look_up(values, f"{_PARAMS}.{name}") is True:
                problems.add(
                    f"{_PARAMS}.{name}", True, "it does not go with bias_correction = false", "Remove one of them."
                )
    if kind == "Lamb":
        _check_lamb(values, problems)
    if kind not in (None, *NATIVE, *OTHER_OPTIMIZERS, "Lamb", "OneBitAdam") and look_up(values, _OFFLOAD) == "nvme":
        problems.add(
            "optimizer.type",
            kind,
            f'it does not go with {_OFFLOAD} = "nvme": what is on disk is updated by native code, which is Adam\'s',
            'Use "AdamW", or offload to "cpu".',
        )
    stage = look_up(values, "zero_optimization.stage")
    if kind == "OneBitAdam" and stage not in (None, 0):
        problems.add(
            "optimizer.type",
            kind,
            f"it does not go with ZeRO (zero_optimization.stage = {stage}): it compresses momenta of whole parameters",
            'Set the stage to 0, or use "AdamW".',
        )
    if kind == "OneBitAdam" and look_up(values, "gradient_allreduce_op") == "sum":
        problems.add(
            "gradient_allreduce_op",
            "sum",
            "OneBitAdam exchanges means of momenta",
            'Set it to "mean", or use "AdamW".',
        )
    if kind in ("Lamb", "OneBitAdam") and look_up(values, f"{_PARAMS}.amsgrad") is True:
        problems.add(f"{_PARAMS}.amsgrad", True, f"{kind} does not have it", "Remove it.")
    if kind == "OneBitAdam" and look_up(values, f"{_PARAMS}.eps_inside_sqrt") is True:
        problems.add(f"{_PARAMS}.eps_inside_sqrt", True, "OneBitAdam adds eps to the square root", "Remove it.")


def runs_in_torch(values: Mapping[str, Any]) -> bool:
    """Whether the optimizer block names a type that only torch updates, wherever its states are."""
    kind = look_up(values, "optimizer.type")
    return kind is not None and kind not in NATIVE


def optimizer_notices(given: Mapping[str, Any]) -> list[str]:
    """What the user should know about an optimizer block that is obeyed."""
    kind = look_up(given, "optimizer.type")
    lines = [
        f"{_PARAMS}.{name} = true has no effect: {kind} has one way to run"
        for name in sorted(NOT_TAKEN.get(kind or "", ()))
        if look_up(given, f"{_PARAMS}.{name}") is True
    ]
    if runs_in_torch(given) and look_up(given, _OFFLOAD) == "cpu":
        lines.append(f"optimizer.type = {kind} has no native update: torch runs it on the host")
    return lines


def _check_lamb(values: Mapping[str, Any], problems: Problems) -> None:
    device = look_up(values, _OFFLOAD)
    if device not in (None, "none"):
        problems.add(
            "optimizer.type",
            "Lamb",
            f'Lamb does not go with {_OFFLOAD} = "{device}": its update needs norms over all ranks',
            'Remove offload_optimizer, or use "AdamW".',
        )
