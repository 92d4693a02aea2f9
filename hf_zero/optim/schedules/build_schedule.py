"""The schedule of a run: the script's own, or the one that a `scheduler` block names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hf_zero import optim
from hf_zero.config.schema import show
from hf_zero.errors import ConfigError
from hf_zero.optim.schedule_types import PARAMS
from hf_zero.optim.schedules.base import Schedule, own_rates

logger = logging.getLogger(__name__)


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
                "%s.warmup_max_lr is not given, so WarmupDecayLR takes its default, 0.001, instead of the "
                "optimizer's %s.",
                PARAMS,
                show(rates[0] if len(set(rates)) == 1 else rates),
            )
    made: Schedule = getattr(optim, kind)(optimizer, **params)
    return made


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
