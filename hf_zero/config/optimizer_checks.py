"""Conditions between the optimizer block and the rest of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.parse import look_up
from hf_zero.config.problems import Problems

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
    if kind == "Muon" and look_up(values, f"{_PARAMS}.per_head_muon") is True:
        problems.add(f"{_PARAMS}.per_head_muon", True, "not supported yet", "Remove it: Muon takes whole matrices.")
    stage = look_up(values, "zero_optimization.stage")
    if kind == "OneBitAdam" and stage not in (None, 0):
        problems.add(
            "optimizer.type",
            kind,
            f"it does not go with ZeRO (zero_optimization.stage = {stage}): it compresses momenta of whole parameters",
            'Set the stage to 0, or use "AdamW".',
        )
    if kind in ("Lamb", "OneBitAdam") and look_up(values, f"{_PARAMS}.amsgrad") is True:
        problems.add(f"{_PARAMS}.amsgrad", True, f"{kind} does not have it", "Remove it.")
    if kind == "OneBitAdam" and look_up(values, f"{_PARAMS}.eps_inside_sqrt") is True:
        problems.add(f"{_PARAMS}.eps_inside_sqrt", True, "OneBitAdam adds eps to the square root", "Remove it.")


def _check_lamb(values: Mapping[str, Any], problems: Problems) -> None:
    device = look_up(values, _OFFLOAD)
    if device not in (None, "none"):
        problems.add(
            "optimizer.type",
            "Lamb",
            f'Lamb does not go with {_OFFLOAD} = "{device}": its update needs norms over all ranks',
            'Remove offload_optimizer, or use "AdamW".',
        )
