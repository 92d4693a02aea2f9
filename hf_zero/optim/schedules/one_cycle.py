"""DeepSpeed's `OneCycle`: rates go up and down once, momenta the other way, then both decay."""

from __future__ import annotations

import logging
import math

from torch.optim import Optimizer

from hf_zero.optim.schedules.base import PerGroup, Rates, Schedule, per_group

logger = logging.getLogger(__name__)

# OneCycle sets the second of Adam's betas to this, whatever the optimizer has.
CYCLE_BETA2 = 0.99


class OneCycle(Schedule):
    """The rate goes from `cycle_min_lr` up to `cycle_max_lr` and down, then decays; Adam's first beta the other way.

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
        self.first_step_size, self.second_step_size = cycle_first_step_size, cycle_second_step_size
        if self.second_step_size is None:
            self.second_step_size = self.first_step_size
        self.first_stair_count, self.second_stair_count = cycle_first_stair_count, cycle_second_stair_count
        if self.second_stair_count is None:
            self.second_stair_count = self.first_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            logger.warning(
                "OneCycle leaves the momentum of %s alone: it has no betas. Set cycle_momentum to false to say so.",
                type(optimizer).__name__,
            )
        self.min_moms, self.max_moms = per_group(optimizer, cycle_min_mom), per_group(optimizer, cycle_max_mom)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> PerGroup:
        ends = zip(self.min_lrs, self.max_lrs, strict=True)
        if iteration < self.total_size:
            height = self._height(iteration)
            return [lowest + (highest - lowest) * height for lowest, highest in ends]
        return [lowest / self._growth(iteration, self.decay_lr_rate) for lowest, _ in ends]

    def momenta(self, iteration: int) -> PerGroup:
        """The first beta of each param group at an iteration."""
        ends = zip(self.min_moms, self.max_moms, strict=True)
        if iteration < self.total_size:
            height = self._height(iteration)
            return [highest - (highest - lowest) * height for lowest, highest in ends]
        return [highest * self._growth(iteration, self.decay_mom_rate) for _, highest in ends]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param group by the cycle; None where they are left alone."""
        if not self.cycle_momentum:
            return None
        return [(beta1, CYCLE_BETA2) for beta1 in self.momenta(self.last_batch_iteration)]

    @property
    def total_size(self) -> int:
        """The number of iterations of the cycle; decay begins after them."""
        return self.first_step_size + (self.second_step_size or 0)

    def _height(self, iteration: int) -> float:
        """The height of the cycle: 0 at the bottom, 1 at the top."""
        place = (iteration + 1) % self.total_size
        rises = place <= self.first_step_size
        way, size = (place, self.first_step_size) if rises else (self.total_size - place, self.second_step_size or 0)
        stairs = self.first_stair_count if rises else (self.second_stair_count or 0)
        return math.floor(way * stairs / size) / stairs if stairs > 0 else way / size

    def _growth(self, iteration: int, rate: float) -> float:
        """The factor that decay divides rates by, and multiplies momenta with, after the cycle."""
        if self.decay_step_size == 0:
            return 1.0
        return 1 + rate * (iteration - self.total_size + 1) / self.decay_step_size

    def _go_to(self, iteration: int) -> None:
        super()._go_to(iteration)
        if self.cycle_momentum:
            beta1s = self.min_moms if iteration < 0 else self.momenta(iteration)
            for group, beta1 in zip(self.optimizer.param_groups, beta1s, strict=False):
                group["betas"] = (beta1, CYCLE_BETA2)
