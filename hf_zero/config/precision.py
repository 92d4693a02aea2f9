"""fp16, bf16, amp and torch_autocast as one decision: types of parameters and compute, and how losses are scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.parse import look_up
from hf_zero.config.problems import Problems

# torch.amp.GradScaler's, which torch_autocast and amp O1 stand for: no hysteresis, no lower bound to speak of.
_TORCH_WINDOW = 2000


@dataclass(frozen=True)
class LossScaling:
    """How losses are scaled in fp16. Names and rules are DeepSpeed's; see optim/loss_scaler.py."""

    static: float = 0.0  # fp16.loss_scale; 0 is dynamic
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0

    @classmethod
    def of_torch(cls, initial_power: int = 16, window: int = _TORCH_WINDOW) -> LossScaling:
        """As torch.amp.GradScaler with these values."""
        return cls(initial_power=initial_power, window=window, hysteresis=1, min_scale=2.0**-24)


@dataclass(frozen=True)
class Precision:
    dtype: str | None = None  # of parameters: "bfloat16", "float16", or None: the model keeps its dtypes
    autocast: str | None = None  # the forward runs under torch.autocast with this dtype
    scaling: LossScaling | None = None  # None: losses are not scaled
    skip_nonfinite: bool = False  # a step whose gradient is not finite is left out on all ranks


def precision_of(values: Mapping[str, Any]) -> Precision:
    """What resolved values ask for; `precision_problems` says what cannot be asked for together."""
    autocast = None
    if look_up(values, "torch_autocast.enabled"):
        autocast = look_up(values, "torch_autocast.dtype") or "bfloat16"
    if look_up(values, "fp16.enabled"):
        return Precision("float16", autocast, _scaling(values["fp16"]), skip_nonfinite=True)
    if look_up(values, "bf16.enabled"):
        return Precision("bfloat16", autocast, skip_nonfinite=look_up(values, "bf16.check_grad_overflow") is True)
    level = _amp_level(values)
    if level in ("O1", "O2", "O3"):
        fixed = look_up(values, "amp.loss_scale")
        scaling = LossScaling.of_torch() if fixed in (None, "dynamic") else LossScaling(static=float(fixed))
        if level == "O1":
            return Precision(None, "float16", scaling, skip_nonfinite=True)
        return Precision("float16", None, scaling, skip_nonfinite=True)
    scaled = autocast == "float16"
    return Precision(None, autocast, LossScaling.of_torch() if scaled else None, skip_nonfinite=scaled)


def _is_scale(value: Any) -> bool:
    """Apex takes a number, as a text too, or "dynamic"."""
    if value is None or value == "dynamic":
        return True
    try:
        return not isinstance(value, bool) and math.isfinite(float(value)) and float(value) > 0
    except (TypeError, ValueError):
        return False


def _scaling(block: Mapping[str, Any]) -> LossScaling:
    return LossScaling(
        static=block["loss_scale"],
        initial_power=block["initial_scale_power"],
        window=block["loss_scale_window"],
        hysteresis=block["hysteresis"],
        consecutive_hysteresis=block["consecutive_hysteresis"],
        min_scale=float(block["min_loss_scale"]),
    )


def _amp_level(values: Mapping[str, Any]) -> str | None:
    """amp.opt_level where amp is on; None where it is off."""
    return (look_up(values, "amp.opt_level") or "O1") if look_up(values, "amp.enabled") is True else None


def precision_problems(values: Mapping[str, Any], problems: Problems) -> None:
    """Add what cannot be asked for together, and loss scales that lead nowhere."""
    types = {"fp16.enabled": "float16", "bf16.enabled": "bfloat16", "amp.enabled": "amp"}
    on = {path: kind for path, kind in types.items() if look_up(values, path) is True}
    if look_up(values, "torch_autocast.enabled") is True:
        on["torch_autocast.enabled"] = look_up(values, "torch_autocast.dtype") or "bfloat16"
    if len(set(on.values())) > 1:
        first, *others = on
        problems.add(
            first,
            True,
            f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'} true as well, and there is one 16-bit type "
            "at a time",
            'Set one of them only; fp16 and bf16 may both be "auto": then fp16=True or bf16=True decides.',
        )
    stage = look_up(values, "zero_optimization.stage")
    if "amp.enabled" in on and stage:
        problems.add(
            "amp.enabled",
            True,
            f"amp goes with stage 0 only, as with DeepSpeed, but the stage is {stage}",
            'Use "torch_autocast": {"enabled": true, "dtype": "fp16"}, which computes the same at every stage.',
        )
    scale = look_up(values, "amp.loss_scale")
    if not _is_scale(scale):
        problems.add("amp.loss_scale", scale, 'expected a number above 0 or "dynamic"', 'Write "dynamic".')
    if look_up(values, "torch_autocast.enabled") is True:
        dtype = look_up(values, "torch_autocast.dtype")
        if dtype == "float32":
            problems.add("torch_autocast.dtype", "fp32", "it is no 16-bit type", 'Write "bf16" or "fp16".')
    if look_up(values, "fp16.enabled") is True and not look_up(values, "fp16.loss_scale"):
        _check_dynamic(values["fp16"], problems)


def _check_dynamic(block: Mapping[str, Any], problems: Problems) -> None:
    least, power = block["min_loss_scale"], block["initial_scale_power"]
    if least == 0:
        problems.add(
            "fp16.min_loss_scale", 0, "a dynamic loss scale needs a lower bound above 0", "Write 1, the default."
        )
    elif least > 2**power:
        problems.add(
            "fp16.min_loss_scale",
            least,
            f"it is above the first loss scale, 2 ** initial_scale_power = {2**power}",
            "Lower it, or raise fp16.initial_scale_power.",
        )
