"""fp16, bf16, amp and torch_autocast as one decision: types of parameters and compute, and how losses are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.conditions import DYNAMIC_SCALE, HAS_HYSTERESIS, HYSTERESIS
from hf_zero.config.schema import count, flag, key, look_up, real, values_of

# A loss in fp32 times more than this is infinite.
MAX_POWER = 127
MAX_SCALE = 2.0**MAX_POWER
MIN_SCALE = 2.0**-24  # less loses the gradients that it should keep

# torch.amp.GradScaler's, which torch_autocast and amp O1 stand for: no hysteresis, no lower bound to speak of.
_TORCH_WINDOW = 2000


@dataclass(frozen=True)
class LossScaling:
    """fp16: how losses are scaled. Names and rules are DeepSpeed's; see optim/loss_scaler.py."""

    static: float = key(real(0.0, high=MAX_SCALE, auto=True), "loss_scale")  # 0 is dynamic
    initial_power: int = key(count(16, high=MAX_POWER, auto=True), "initial_scale_power", when=DYNAMIC_SCALE)
    window: int = key(count(1000, low=1, auto=True), "loss_scale_window", when=DYNAMIC_SCALE)
    hysteresis: int = key(count(2, low=1, auto=True), when=(DYNAMIC_SCALE, HYSTERESIS))
    consecutive_hysteresis: bool = key(flag(False, auto=True), when=(DYNAMIC_SCALE, HYSTERESIS, HAS_HYSTERESIS))
    min_scale: float = key(count(1, high=MAX_SCALE, auto=True), "min_loss_scale", when=DYNAMIC_SCALE)

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_scale", float(self.min_scale))  # the key is a whole number

    @classmethod
    def of_torch(cls, initial_power: int = 16, window: int = _TORCH_WINDOW) -> LossScaling:
        """As torch.amp.GradScaler with these values."""
        return cls(initial_power=initial_power, window=window, hysteresis=1, min_scale=MIN_SCALE)


@dataclass(frozen=True)
class Precision:
    dtype: str | None = None  # of parameters: "bfloat16", "float16", or None: the model keeps its dtypes
    autocast: str | None = None  # the forward runs under torch.autocast with this dtype
    scaling: LossScaling | None = None  # None: losses are not scaled
    skip_nonfinite: bool = False  # a step whose gradient is not finite is left out on all ranks


def precision_of(values: Mapping[str, Any]) -> Precision:
    """What resolved values ask for; cross_checks.py says what cannot be asked for together."""
    autocast = None
    if look_up(values, "torch_autocast.enabled"):
        autocast = look_up(values, "torch_autocast.dtype") or "bfloat16"
    if look_up(values, "fp16.enabled"):
        scaling = LossScaling(**values_of(LossScaling, values["fp16"]))
        return Precision("float16", autocast, scaling, skip_nonfinite=True)
    if look_up(values, "bf16.enabled"):
        return Precision("bfloat16", autocast, skip_nonfinite=look_up(values, "bf16.check_grad_overflow") is True)
    level = _amp_level(values)
    if level in ("O1", "O2", "O3"):
        fixed = look_up(values, "amp.loss_scale")
        if fixed is None and level == "O3":
            fixed = 1.0  # as apex
        scaling = LossScaling.of_torch() if fixed in (None, "dynamic") else LossScaling(static=float(fixed))
        if level == "O1":
            return Precision(None, "float16", scaling, skip_nonfinite=True)
        return Precision("float16", None, scaling, skip_nonfinite=True)
    scaled = autocast == "float16"
    return Precision(None, autocast, LossScaling.of_torch() if scaled else None, skip_nonfinite=scaled)


def _amp_level(values: Mapping[str, Any]) -> str | None:
    """amp.opt_level where amp is on; None where it is off."""
    return (look_up(values, "amp.opt_level") or "O1") if look_up(values, "amp.enabled") is True else None
