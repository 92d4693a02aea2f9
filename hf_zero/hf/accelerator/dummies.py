"""accelerate's DummyOptim and DummyScheduler, which stand for what the configuration names: the real ones are built.

The rules for "auto" are accelerate's own (Accelerator._prepare_deepspeed): the learning rate is the dummy's, the
length of the schedule is DummyScheduler's over the number of processes, and a value in the file goes before a dummy's.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler  # from accelerate.utils only beside DeepSpeed
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hf_zero.config import ResolvedConfig, ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.hf.accelerator.optimizer import ZeroAcceleratedOptimizer
from hf_zero.optim.registry import optimizer_of
from hf_zero.optim.schedules.base import Schedule
from hf_zero.optim.schedules.build_schedule import choose_scheduler

logger = logging.getLogger(__name__)

_PARAMS = "scheduler.params"


class DummyReplacement:
    """Builds the optimizers and schedulers that the dummies of one Accelerator stand for, and steps the schedulers.

    Args:
        arguments_of: The values of an Accelerator for keys that TrainingArguments would give.
    """

    def __init__(
        self, config: ZeroConfig, accelerator: Accelerator, arguments_of: Callable[[Accelerator], Any]
    ) -> None:
        self._config = config
        self._accelerator = accelerator
        self._arguments_of = arguments_of
        self._optimizers: dict[DummyOptim, torch.optim.Optimizer] = {}
        self._schedulers: list[Any] = []  # real ones, which go one step for each step of the optimizer

    def prepare(self, objects: Sequence[Any], stock: Callable[[Sequence[Any]], Any]) -> Any:
        """One call of accelerator.prepare: `stock` for `objects`, each dummy replaced by the real thing.

        As under DeepSpeed an optimizer that comes without a scheduler gets the block's, and steps it itself.
        Raises:
            ConfigError: There is nothing to build a dummy from, or script and configuration contradict each other.
        """
        if any(isinstance(one, DummyOptim) for one in objects) and any(
            isinstance(one, LRScheduler) for one in objects
        ):
            raise ConfigError(
                "accelerator.prepare got a DummyOptim and a scheduler that is not a DummyScheduler: it belongs to "
                "another optimizer.\nUse DummyScheduler(optimizer, lr_scheduler_callable=...)."
            )
        left_out = self._is_left_out(objects)
        real = [self._optimizer_for(one, objects) if isinstance(one, DummyOptim) else one for one in objects]
        real = [self._scheduler_for(one) if isinstance(one, DummyScheduler) else one for one in real]
        prepared = stock(real)
        results = [self._finish(one, left_out) for one in (prepared if isinstance(prepared, tuple) else (prepared,))]
        return tuple(results) if isinstance(prepared, tuple) else results[0]

    def _finish(self, one: Any, left_out: bool) -> Any:
        if left_out and isinstance(one, ZeroAcceleratedOptimizer) and one.schedule is None:
            one.schedule = self._accelerator.prepare_scheduler(self._built(DummyScheduler(one)))
        # accelerate prepares torch's schedulers only, and a script's function may make another kind.
        raw = any(one is scheduler for scheduler in self._schedulers)
        return self._accelerator.prepare_scheduler(one) if raw else one

    def _is_left_out(self, objects: Sequence[Any]) -> bool:
        """Whether there is a scheduler block, and this call prepares an optimizer without a scheduler."""
        fresh = [one for one in objects if isinstance(one, torch.optim.Optimizer | DummyOptim)]
        return (
            self._config.get("scheduler") is not None
            and any(not isinstance(one, AcceleratedOptimizer) for one in fresh)
            and not any(isinstance(one, LRScheduler | DummyScheduler | AcceleratedScheduler) for one in objects)
        )

    def wrap(self, scheduler: Any) -> AcceleratedScheduler | None:
        """accelerate's wrapper that goes one step per step of its optimizer; None for a scheduler of the script's own.

        accelerate steps those once for each process, which is not how DeepSpeed's schedules count.
        Raises:
            ConfigError: It is the script's own, and the configuration has a scheduler block.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            return None
        ours = any(scheduler is one for one in self._schedulers)
        if not ours and self._config.get("scheduler") is not None:
            raise ConfigError(
                f"accelerator.prepare got a {type(scheduler).__name__}, and the configuration has a scheduler block "
                f"({self._config.get('scheduler.type')}): expected one of them.\n"
                "Remove the block, or make an accelerate.utils.DummyScheduler in the script."
            )
        if not ours and not isinstance(scheduler, Schedule):
            return None
        inner = getattr(scheduler, "optimizer", None)
        known = self._accelerator._optimizers
        wrapped = AcceleratedScheduler(
            scheduler, [one for one in known if _inner(one) is inner] or known, split_batches=True
        )
        self._accelerator._schedulers.append(wrapped)
        return wrapped

    def _optimizer_for(self, dummy: DummyOptim, objects: Sequence[Any]) -> torch.optim.Optimizer:
        if dummy in self._optimizers:
            return self._optimizers[dummy]
        values = {"optimizer.params.lr": dummy.lr, "optimizer.params.weight_decay": dummy.weight_decay}
        block = self._resolve(values, client_scheduler=True).optimizer
        if block is None:
            more = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
            unknown = sorted(set(more) - set(inspect.signature(torch.optim.AdamW).parameters))
            if unknown:
                raise ConfigError(
                    f"DummyOptim has {', '.join(unknown)}, and without an optimizer block it stands for AdamW, which "
                    "has no such parameter.\nAdd an optimizer block, or remove them."
                )
            logger.info("DummyOptim without an optimizer block: AdamW with the learning rate %g", dummy.lr)
            block = {"type": "AdamW", "params": more}
        params = list(dummy.params)
        kind, arguments = optimizer_of(block, self._model_of(params, objects))
        real: torch.optim.Optimizer = kind(params, **arguments)
        self._optimizers[dummy] = real
        return real

    def _model_of(self, params: Sequence[Any], objects: Sequence[Any]) -> nn.Module:
        """The model that parameters, or groups of them, belong to; an empty one if it is not there."""
        wanted = {id(param) for group in params for param in _members(group)}
        models = [one for one in (*objects, *self._accelerator._models) if isinstance(one, nn.Module)]
        return next((one for one in models if wanted & {id(param) for param in one.parameters()}), nn.Module())

    def _scheduler_for(self, dummy: DummyScheduler) -> Any:
        optimizer = dummy.optimizer
        schedule = getattr(optimizer, "schedule", None)
        if schedule is not None:  # the optimizer was prepared alone, in an earlier call
            optimizer.schedule = None
            if dummy.lr_scheduler_callable is None:
                return schedule
            self._accelerator._schedulers.remove(schedule)
        return self._built(dummy)

    def _built(self, dummy: DummyScheduler) -> Any:
        if dummy.lr_scheduler_callable is None and self._config.get("scheduler") is None:
            raise ConfigError(
                "there is nothing to build the DummyScheduler from: the configuration has no scheduler block.\n"
                "Add one, or make DummyScheduler(optimizer, lr_scheduler_callable=...)."
            )
        optimizer = self._real(dummy.optimizer)
        block = None
        if dummy.lr_scheduler_callable is None:
            self._check_length(dummy)
            block = self._resolve(self._values(dummy, optimizer), client_optimizer=True).scheduler
        scheduler = choose_scheduler(dummy.lr_scheduler_callable, block, optimizer)
        self._schedulers.append(scheduler)
        return scheduler

    def _resolve(self, values: dict[str, Any], **brought: bool) -> ResolvedConfig:
        """Resolve the configuration with `values` instead of "auto"."""
        arguments, world_size = self._arguments_of(self._accelerator), self._accelerator.num_processes
        return self._config.filled_in(values).resolve(arguments, None, world_size, **brought)

    def _real(self, optimizer: Any) -> torch.optim.Optimizer:
        """The torch optimizer that a DummyScheduler was made for."""
        inner = self._optimizers.get(optimizer, _inner(optimizer))
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigError(
                f"the DummyScheduler's optimizer is a {type(optimizer).__name__} that was not prepared.\n"
                "Prepare both in one call: accelerator.prepare(model, optimizer, loader, scheduler)."
            )
        return inner

    def _values(self, dummy: DummyScheduler, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        highest = dummy.optimizer.lr if isinstance(dummy.optimizer, DummyOptim) else optimizer.defaults["lr"]
        values = {
            f"{_PARAMS}.warmup_max_lr": float(highest),
            f"{_PARAMS}.warmup_num_steps": dummy.warmup_num_steps,
        }
        if dummy.total_num_steps is not None:
            shares = 1 if self._accelerator.split_batches else self._accelerator.num_processes
            values[f"{_PARAMS}.total_num_steps"] = math.ceil(dummy.total_num_steps / shares)
        return values

    def _check_length(self, dummy: DummyScheduler) -> None:
        if dummy.total_num_steps is None and self._config.get(f"{_PARAMS}.total_num_steps") == "auto":
            raise ConfigError(
                f'{_PARAMS}.total_num_steps = "auto": it takes its value from DummyScheduler, which has none here.\n'
                "Make DummyScheduler(optimizer, total_num_steps=...), prepared with the optimizer in one call, or "
                "write the number."
            )


def _inner(optimizer: Any) -> Any:
    """The script's optimizer under what `prepare` made of it."""
    return optimizer.optimizer.optimizer if isinstance(optimizer, ZeroAcceleratedOptimizer) else optimizer


def _members(group: Any) -> Sequence[Any]:
    """The parameters of what stands in an optimizer's list: one, or a group of them."""
    if not isinstance(group, dict):
        return [group]
    return [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
