"""DeepSpeed's learning-rate schedules as torch schedulers: LRRangeTest, OneCycle and the three warm-ups.

Values are those of DeepSpeed 0.19, under its names and with its defaults.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hf_zero.config.problems import show
from hf_zero.config.schedules import DEFAULT_WARMUP_STEPS, PARAMS
from hf_zero.errors import ConfigError
from hf_zero.optim.schedules.base import LOG, PerGroup, Rates, Schedule, own_rates, per_group, warmth

logger = logging.getLogger(__name__)

# OneCycle sets the second of Adam's betas to this, whatever the optimizer has.
CYCLE_BETA2 = 0.99


class LRRangeTest(Schedule):
    """The rate grows from `lr_range_test_min_lr` in proportion to the steps: min * (1 + rate * steps / size).

    With `lr_range_test_staircase` it grows every `lr_range_test_step_size` steps. (Smith, arXiv:1803.09820)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._check(locals())
        self.min_lrs = per_group(optimizer, lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> PerGroup:
        intervals = (iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [lowest * (1 + self.step_rate * intervals) for lowest in self.min_lrs]


class OneCycle(Schedule):
    """From `cycle_min_lr` up to `cycle_max_lr` and down again, then decay; Adam's first beta goes the other way.

    After the cycle the rate is min / (1 + decay_lr_rate * steps / decay_step_size), and beta1 is
    max * (1 + decay_mom_rate * steps / decay_step_size); a `decay_step_size` of 0 means no decay. Stair counts move
    both in so many stairs per half. As with DeepSpeed, beta1 is `cycle_min_mom` before the first step and beta2
    becomes 0.99; an optimizer without betas keeps its momentum, which a warning says. (Smith, arXiv:1803.09820)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates | None = None,
        cycle_max_lr: Rates | None = None,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self._check(locals())
        self.min_lrs, self.max_lrs = per_group(optimizer, cycle_min_lr), per_group(optimizer, cycle_max_lr)
        self.first, self.second = cycle_first_step_size, cycle_second_step_size
        if self.second is None:
            self.second = self.first
        self.first_stairs, self.second_stairs = cycle_first_stair_count, cycle_second_stair_count
        if self.second_stairs is None:
            self.second_stairs = self.first_stairs
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycles_betas = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycles_betas:
            logger.warning(
                "OneCycle leaves the momentum of %s alone: it has no betas. Set cycle_momentum to false to say so.",
                type(optimizer).__name__,
            )
        self.min_moms, self.max_moms = per_group(optimizer, cycle_min_mom), per_group(optimizer, cycle_max_mom)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> PerGroup:
        ends = zip(self.min_lrs, self.max_lrs, strict=True)
        if iteration < self._length:
            height = self._height(iteration)
            return [lowest + (highest - lowest) * height for lowest, highest in ends]
        return [lowest / self._growth(iteration, self.decay_lr_rate) for lowest, _ in ends]

    def momenta(self, iteration: int) -> PerGroup:
        """Beta1 of each param group at an iteration."""
        ends = zip(self.min_moms, self.max_moms, strict=True)
        if iteration < 0:
            return list(self.min_moms)
        if iteration < self._length:
            height = self._height(iteration)
            return [highest - (highest - lowest) * height for lowest, highest in ends]
        return [highest * self._growth(iteration, self.decay_mom_rate) for _, highest in ends]

    @property
    def _length(self) -> int:
        return self.first + (self.second or 0)

    def _height(self, iteration: int) -> float:
        """Where between its ends the cycle is: 0 at the bottom, 1 at the top."""
        place = (iteration + 1) % self._length
        rises = place <= self.first
        way, size = (place, self.first) if rises else (self._length - place, self.second or 0)
        stairs = self.first_stairs if rises else (self.second_stairs or 0)
        return math.floor(way * stairs / size) / stairs if stairs > 0 else way / size

    def _growth(self, iteration: int, rate: float) -> float:
        """What decay divides rates by, and multiplies momenta with, after the cycle."""
        if self.decay_step_size == 0:
            return 1.0
        return 1 + rate * (iteration - self._length + 1) / self.decay_step_size

    def _go_to(self, iteration: int) -> None:
        super()._go_to(iteration)
        if self.cycles_betas:
            for group, beta1 in zip(self.optimizer.param_groups, self.momenta(iteration), strict=False):
                group["betas"] = (beta1, CYCLE_BETA2)


def _warmup_steps(given: int | None) -> int:
    return DEFAULT_WARMUP_STEPS if given is None else given


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then constant.

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
        """How far from the lowest rate to the highest."""
        if iteration < self.warmup_num_steps:
            return warmth(iteration, self.warmup_num_steps, self.warmup_type)
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

    def ratio(self, iteration: int) -> float:
        """What the optimizer's own rates are multiplied with."""
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            share = warmth(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * share
        done = (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        height = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * height)


SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_schedule(block: Mapping[str, Any], optimizer: Optimizer) -> Schedule:
    """The schedule that a `scheduler` block names, over `optimizer`.

    Raises:
        ConfigError: A parameter is missing, contradicts another, or does not fit the optimizer's param groups.
    """
    kind, params = block["type"], dict(block.get("params", {}))
    if kind == "WarmupDecayLR" and "warmup_max_lr" not in params:
        rates = [float(rate) for rate in own_rates(optimizer)]
        if any(rate != 0.001 for rate in rates):
            logger.warning(
                "%s.warmup_max_lr is not given, so WarmupDecayLR takes its default, 0.001, in place of the "
                "optimizer's %s.",
                PARAMS,
                show(rates[0] if len(set(rates)) == 1 else rates),
            )
    return SCHEDULES[kind](optimizer, **params)


def choose_scheduler(client: Any, block: Mapping[str, Any] | None, optimizer: Optimizer | None) -> Any:
    """The scheduler for `optimizer`: the caller's object, or what the caller's function makes, else the block's.

    As with DeepSpeed the caller's goes before the block, which a warning says. None where there is neither, and for
    inference, which has no optimizer. Raises ConfigError for what is no scheduler, and for one without an optimizer.
    """
    if optimizer is None:
        if client is not None:
            raise ConfigError("there is an lr_scheduler but no optimizer: pass one, or add an optimizer block")
        return None
    if client is None:
        return None if block is None else build_schedule(block, optimizer)
    if block is not None:
        logger.warning("the scheduler block (%s) is not used: the script brings its own lr_scheduler", block["type"])
    makes_one = isinstance(client, type) or (callable(client) and not hasattr(client, "step"))
    scheduler = client(optimizer) if makes_one else client
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"lr_scheduler = {client!r}: expected an object with a method step, or a function of the optimizer that "
            f"makes one; this is a {type(scheduler).__name__}.\nPass a torch scheduler, or "
            "lr_scheduler=lambda optimizer: ..."
        )
    return scheduler
