"""DeepSpeed's warm-ups: `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR`, with its values, names and defaults."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from hf_zero.optim.schedule_types import DEFAULT_WARMUP_STEPS
from hf_zero.optim.schedules.base import PerGroup, Rates, Schedule, own_rates, per_group

LOG, LINEAR = "log", "linear"


def _warmup_steps(given: int | None) -> int:
    return DEFAULT_WARMUP_STEPS if given is None else given


class WarmupLR(Schedule):
    """The rate goes from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then stays.

    Args:
        warmup_num_steps: Less than 2 counts as 2, so the first step has the lowest rate. None takes the default,
            1000; so do the two schedules below.
        warmup_max_lr: None takes the rates that the optimizer has.
        warmup_type: "log", min + (max - min) * log(i + 1) / log(steps), which is the default, or "linear", i / steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int | None = DEFAULT_WARMUP_STEPS,
        warmup_type: str = LOG,
        last_batch_iteration: int = -1,
    ) -> None:
        warmup_num_steps = _warmup_steps(warmup_num_steps)
        self._check(locals())
        self._set(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def _set(self, optimizer: Optimizer, lowest: Rates, highest: Rates | None, steps: int, kind: str) -> None:
        self.min_lrs = per_group(optimizer, lowest)
        self.max_lrs = own_rates(optimizer) if highest is None else per_group(optimizer, highest)
        self.warmup_num_steps, self.warmup_type = max(2, steps), kind

    def rates(self, iteration: int) -> PerGroup:
        ends = zip(self.min_lrs, self.max_lrs, strict=True)
        share = 0.0 if iteration < 0 else self.share(iteration)
        return [lowest + (highest - lowest) * share for lowest, highest in ends]

    def share(self, iteration: int) -> float:
        """The share of the way from the lowest rate to the highest."""
        if iteration < self.warmup_num_steps:
            return _warmth(iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then down to `warmup_min_lr` on a straight line that ends at `total_num_steps`.

    `warmup_max_lr` is 0.001 where it is not given, whatever the optimizer has.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int | None = DEFAULT_WARMUP_STEPS,
        warmup_type: str = LOG,
        last_batch_iteration: int = -1,
    ) -> None:
        warmup_num_steps = _warmup_steps(warmup_num_steps)
        self._check(locals())
        self.total_num_steps = total_num_steps or 0
        self._set(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        Schedule.__init__(self, optimizer, last_batch_iteration)

    def share(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super().share(iteration)
        left = (self.total_num_steps - iteration) / max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, left)


class WarmupCosineLR(Schedule):
    """Multiplies the optimizer's own rates: from `warmup_min_ratio` up to 1, then half a cosine to `cos_min_ratio`.

    Before the first step the rate is 0, as with DeepSpeed, whatever `warmup_min_ratio` says.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int | None = DEFAULT_WARMUP_STEPS,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = LOG,
        last_batch_iteration: int = -1,
    ) -> None:
        warmup_num_steps = _warmup_steps(warmup_num_steps)
        self._check(locals())
        self.total_num_steps = total_num_steps or 0
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        self.max_lrs = own_rates(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> PerGroup:
        ratio = self.ratio(iteration)
        return [highest * ratio for highest in self.max_lrs]

    def get_lr_ratio(self) -> float:
        """Return the factor of the optimizer's own rates now."""
        return self.ratio(self.last_batch_iteration)

    def ratio(self, iteration: int) -> float:
        """The factor of the optimizer's own rates."""
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            share = _warmth(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * share
        done = (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        height = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * height)


def _warmth(iteration: int, steps: int, kind: str) -> float:
    """The share of a warm-up that is done at `iteration`, which is before its end: 0 at the first iteration."""
    return iteration / steps if kind == LINEAR else math.log(iteration + 1) / math.log(steps)
