"""The base of schedules: how they count, set rates, save their state and check their parameters.

A schedule counts optimizer steps as DeepSpeed does: it stands at iteration -1 when it is made, and every `step()`,
which comes after the optimizer's, goes one further. So the first two steps of a warm-up use the same rate, and a curve
lags one step behind the one of transformers that has the same formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hf_zero.config.typed_block import Fault
from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.schedule_types import PARAMS, TYPES, faults, value_faults

Rates = float | Sequence[float]
# One number per param group; a group whose rate is a tensor (capturable) has tensors here too.
PerGroup = list[Any]


class Schedule(LRScheduler):
    """A learning-rate schedule. `state_dict` holds the iteration alone, so a schedule may be changed at a resume.

    Args:
        optimizer: A torch optimizer, sharded or not.
        last_batch_iteration: The iteration to go on from; -1 is the beginning.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        super().__init__(optimizer)  # makes the first step: to iteration -1
        if last_batch_iteration >= 0:
            self._go_to(last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """The iteration that the groups' rates are of: -1 before the first step, then the number of steps less one."""
        return int(self.last_epoch) - 1

    def rates(self, iteration: int) -> PerGroup:
        """The rate of each param group at an iteration."""
        raise NotImplementedError

    def get_lr(self) -> PerGroup:
        return self.rates(self.last_batch_iteration)

    def step(self, batch_iteration: int | None = None) -> None:
        """Set the rates of the next iteration, or of `batch_iteration`. Once after every step of the optimizer."""
        self._step_count += 1
        self._go_to(self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration)

    def _go_to(self, iteration: int) -> None:
        self.last_epoch = iteration + 1
        for group, rate in zip(self.optimizer.param_groups, self.rates(iteration), strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = rate
        self._last_lr = [
            group["lr"].clone() if isinstance(group["lr"], torch.Tensor) else group["lr"]
            for group in self.optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at the saved iteration, DeepSpeed's own states included; sets the rates.

        Raises:
            StateError: The state is of a scheduler of another kind.
        """
        iteration = state_dict.get("last_batch_iteration")
        if not isinstance(iteration, int) or "last_epoch" in state_dict:
            raise StateError(
                f"{type(self).__name__} cannot go on from the state of another scheduler, which has "
                f"{', '.join(map(str, sorted(state_dict)))}: expected last_batch_iteration alone.\n"
                "Resume with the scheduler that the checkpoint was written with."
            )
        self._step_count = iteration + 2  # the first is that of the constructor
        self._go_to(iteration)

    def _check(self, arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError for parameters that cannot be right, each with key, value, what was expected, remedy.

        Args:
            arguments: All of a constructor's: its `locals()` at the start.
        """
        kind = next(one.__name__ for one in type(self).__mro__ if one.__name__ in TYPES)
        other = ("self", "__class__", "optimizer", "last_batch_iteration")
        given = {name: value for name, value in arguments.items() if name not in other and value is not None}
        found = list(value_faults(kind, given)) or list(faults(kind, given))
        groups = len(arguments["optimizer"].param_groups)
        for name, value in given.items():
            if isinstance(value, list | tuple) and len(value) != groups:
                wrong = f"expected a number, or {groups} numbers, one for each param group of the optimizer"
                found.append(Fault(name, value, wrong, "Give one number for all groups, or as many as there are."))
        if found:
            noun = "1 mistake" if len(found) == 1 else f"{len(found)} mistakes"
            listed = "\n".join(f"{number}. {PARAMS}.{fault}" for number, fault in enumerate(found, start=1))
            raise ConfigError(f"{noun} in the parameters of {kind}:\n{listed}")


def per_group(optimizer: Optimizer, value: Any) -> PerGroup:
    """`value` once for each param group; a list of that length as it is."""
    return list(value) if isinstance(value, list | tuple) else [value] * len(optimizer.param_groups)


def own_rates(optimizer: Optimizer) -> PerGroup:
    """The rates that the optimizer was made with, also where another scheduler has changed them since."""
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
