"""DeepSpeed's `LRRangeTest`: a rate that grows with the steps, to find the largest one that trains."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from hf_zero.optim.schedules.base import PerGroup, Rates, Schedule, per_group


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
