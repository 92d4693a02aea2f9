"""The decision whether a step is applied, and the loss scale that follows. Rules, values and texts are DeepSpeed's.

Under ZeRO (stages 1-3) a dynamic scale is halved by an overflow once the hysteresis is used up, and doubled after a
number of steps without one; at stage 0 DeepSpeed's optimizer for fp16 has no hysteresis and no end at the minimum.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from hf_zero.config.resolved import LossScaling, Precision
from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from hf_zero.runtime.loss_scale import LossScale

logger = logging.getLogger(__name__)

_FACTOR = 2.0
_MOST_NAMES = 5


class LossScaler:
    """The factor of losses. A step that overflows is left out."""

    dynamic: bool

    def __init__(self, scale: float) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The factor of losses now, by DeepSpeed's other name for it."""
        return self.cur_scale

    @property
    def is_exhausted(self) -> bool:
        """Whether one more overflow could not lower the scale."""
        return False

    def update(self, overflow: bool) -> list[str]:
        """Take the outcome of a step in; returns what is to be logged."""
        if not overflow:
            return []
        return ["OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated."]

    def state_dict(self) -> dict[str, Any]:
        return {"cur_scale": self.cur_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scale is the configuration's, not the checkpoint's."""


class StaticScaler(LossScaler):
    """One scale for ever."""

    dynamic = False


class PlainScaler(LossScaler):
    """Dynamic, as at stage 0: every overflow halves the scale, down to the minimum."""

    dynamic = True

    def __init__(self, rules: LossScaling) -> None:
        super().__init__(2.0**rules.initial_power)
        self._rules = rules
        self.scale_window, self.min_scale = rules.window, rules.min_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1

    def update(self, overflow: bool) -> list[str]:
        before, lines = self.cur_scale, []
        if overflow:
            self.cur_scale = max(before / _FACTOR, self.min_scale)
            self.last_overflow_iter = self.cur_iter
            lines = [
                f"Grad overflow on iteration {self.cur_iter}",
                f"Reducing dynamic loss scale from {before} to {self.cur_scale}",
                "[Rank 0] Overflow detected. Skipping step. Attempted loss scale: "
                f"{before}, reducing to {self.cur_scale}",
            ]
        elif self._is_stable():
            self.cur_scale *= _FACTOR
            lines = [
                f"No Grad overflow for {self.scale_window} iterations",
                f"Increasing dynamic loss scale from {before} to {self.cur_scale}",
            ]
        self.cur_iter += 1
        return lines

    def _is_stable(self) -> bool:
        clean = self.cur_iter - self.last_overflow_iter - 1
        return clean > 0 and clean % self.scale_window == 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "cur_iter" not in state:  # of a run without a dynamic scale: this one starts where it starts
            return
        for name in self.state_dict():
            if name in state:
                setattr(self, name, state[name])


class HysteresisScaler(PlainScaler):
    """Dynamic, as under ZeRO: the first overflows use up the hysteresis, the next ones halve the scale."""

    def __init__(self, rules: LossScaling) -> None:
        super().__init__(rules)
        self.cur_hysteresis = rules.hysteresis

    @property
    def is_exhausted(self) -> bool:
        return self._halves and self.cur_scale <= self.min_scale

    @property
    def _halves(self) -> bool:
        return self._rules.hysteresis == 1 or self.cur_hysteresis == 1

    def update(self, overflow: bool) -> list[str]:
        lines = self._after_overflow() if overflow else self._after_clean_step()
        self.cur_iter += 1
        return lines

    def _after_overflow(self) -> list[str]:
        self.last_overflow_iter = self.cur_iter
        start = f"OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {_short(self.cur_scale)}, "
        if self._halves:
            self.cur_scale = max(self.cur_scale / _FACTOR, self.min_scale)
            return [f"{start}reducing to {_short(self.cur_scale)}"]
        self.cur_hysteresis -= 1
        left = self.cur_hysteresis
        return [f"{start}but hysteresis is {left + 1}. Reducing hysteresis to {left}"]

    def _after_clean_step(self) -> list[str]:
        lines = []
        if self._rules.consecutive_hysteresis:
            if self.cur_hysteresis != self._rules.hysteresis:
                lines.append(f"Consecutive hysteresis is enabled. Restoring hysteresis to {self._rules.hysteresis}")
            self.cur_hysteresis = self._rules.hysteresis
        if self._is_stable():
            self.cur_hysteresis = self._rules.hysteresis
            self.cur_scale *= _FACTOR
        return lines

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "cur_hysteresis": self.cur_hysteresis}


def _short(scale: float) -> str:
    return str(int(scale)) if scale >= 1 else str(scale)


def make_scaler(rules: LossScaling | None, *, stage: int) -> LossScaler:
    """The scaler for `rules`; without any, a scale of 1 that stays."""
    if rules is None:
        return StaticScaler(1.0)
    if rules.static > 0:
        return StaticScaler(rules.static)
    return HysteresisScaler(rules) if stage else PlainScaler(rules)


class StepGuard:
    """Leaves out, on all ranks, a step whose gradient is not finite, where the precision asks for that.

    Args:
        scale: Where backward reads the loss scale.
    """

    def __init__(self, precision: Precision, stage: int, scale: LossScale) -> None:
        self.skips = precision.skip_nonfinite
        self.scaler = make_scaler(precision.scaling, stage=stage)
        self._scale = scale
        self.scales = scale.is_used = precision.scaling is not None
        self._publish()
        self.overflow = False  # in the last step

    def accepts(self, norm: float) -> bool:
        """Whether a gradient of this norm can be applied."""
        return not self.skips or math.isfinite(norm)

    def admits(self, norm: float, comm: Comm) -> bool:
        """Whether the step with this gradient norm, equal on all ranks, is applied. All ranks must call.

        Raises:
            StateError: On all ranks: the loss scale is at its minimum and gradients are still not finite.
        """
        self.overflow = not self.accepts(norm)
        if self.overflow and self.scaler.is_exhausted:
            raise StateError(self._exhausted(comm))
        lines = self.scaler.update(self.overflow)
        self._publish()
        if comm.rank == 0:
            for line in lines:
                logger.log(logging.WARNING if self.overflow else logging.INFO, line)
        return not self.overflow

    def _publish(self) -> None:
        self._scale.value = self.scaler.cur_scale
        # Looking at every gradient costs time: only where the next overflow is the last.
        self._scale.suspects = [] if self.scaler.is_exhausted else None

    def _exhausted(self, comm: Comm) -> str:
        names = list(dict.fromkeys(self._scale.suspects or ()))
        found = comm.all_gather_object(names, "non-finite gradients")
        where = [f"on rank {rank}: {', '.join(names[:_MOST_NAMES])}" for rank, names in enumerate(found) if names]
        return (
            "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n"
            f"Gradients that are not finite, last layers first, {'; '.join(where) or 'after their reduce only'}.\n"
            'Where the device has bfloat16, use "bf16": {"enabled": true}, which needs no loss scaling; else look for '
            "what overflows in the forward of these layers."
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written, by whatever kind of scaler."""
        self.scaler.load_state_dict(state)
        self._publish()
