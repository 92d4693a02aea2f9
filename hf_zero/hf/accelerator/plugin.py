"""The Accelerate plugin: makes an Accelerator prepare, clip, save and load through the engine.

accelerate has no place for a foreign plugin, so the Accelerator object is given another class: the one it had, with
`ZeroAcceleratorMixin` in front. No DistributedDataParallel is ever built; models stay the objects they are.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_compiled_module
from torch import nn

from hf_zero.config import ResolvedConfig, ZeroConfig
from hf_zero.config.parse import EXAMPLE
from hf_zero.config.problems import raise_all
from hf_zero.config.resolved import FILE, LossScaling
from hf_zero.distributed.processes import wrong_on_all
from hf_zero.distributed.rank_groups import group_of_mesh
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.engine.initialize import new_engine
from hf_zero.errors import ConfigError, StateError
from hf_zero.hf.accelerator.dummies import DummyReplacement
from hf_zero.hf.accelerator.optimizer import ZeroAcceleratedOptimizer
from hf_zero.hf.accelerator.plain_loop import arguments_of, batch_of_loaders, scaling_of, take_accumulation
from hf_zero.hf.accelerator.save_state import AcceleratorState
from hf_zero.hf.conflicts import accelerator_conflicts, check_world_size, model_conflicts, warn_of_missed_sharding
from hf_zero.hf.patching import ACTIVATION, PatchPoint

logger = logging.getLogger(__name__)


class ZeroPlugin:
    """A ZeRO configuration for one Accelerator.

    Args:
        config: Path of a JSON file, a dict, a JSON string, or a ZeroConfig.
        args: The TrainingArguments of the Trainer that owns the Accelerator; None in a plain accelerate loop.
    Raises:
        ConfigError: The configuration is wrong; every problem is named.
    """

    def __init__(
        self, config: ZeroConfig | str | Path | Mapping[str, Any] | None = None, *, args: Any = None, **others: Any
    ) -> None:
        if others or config is None:
            given = f"got {', '.join(others)}" if others else "got none"
            raise ConfigError(
                f"ZeroPlugin takes one configuration in DeepSpeed's schema, and no key by itself: {given}.\n"
                f"Write ZeroPlugin({EXAMPLE}), or ZeroPlugin(FILE)."
            )
        self.config = ZeroConfig.load(config)
        self._args = args
        self._scaling: LossScaling | None = None  # of accelerate's autocast in fp16
        self._per_device_batch: int | None = None
        self.dummies: DummyReplacement | None = None

    def take_batch_size(self, per_device: int) -> None:
        """Let "auto" and the batch numbers follow this many samples per rank from now on (auto_find_batch_size)."""
        self._per_device_batch = per_device

    def take_loaders(self, accelerator: Accelerator, prepared: Iterable[Any]) -> None:
        """Take the batch size that the file leaves open from the loaders among `prepared`, outside of a Trainer."""
        if self._args is None:
            per_device = batch_of_loaders(accelerator, self.config, prepared)
            self._per_device_batch = self._per_device_batch if per_device is None else per_device

    @wrong_on_all("attach")
    def attach(self, accelerator: Accelerator) -> Accelerator:
        """Put `accelerator` under ZeRO, in place, before it prepares anything. Returns it.

        Raises:
            ConfigError: It already belongs to DeepSpeed, FSDP, tensor parallelism or another engine, or counts
                fewer processes than were started.
            StateError: It has prepared a model or optimizer already.
        """
        if accelerator._models or accelerator._optimizers:
            raise StateError(
                "ZeroPlugin.attach came after accelerator.prepare: what was prepared before would not be under ZeRO.\n"
                "Attach right after Accelerator(...) is made."
            )
        check_world_size(accelerator.num_processes, "Accelerator")
        raise_all(self.config.source, accelerator_conflicts(accelerator, self.config))
        if (mesh := accelerator.torch_device_mesh) is not None:
            self.config = self.config.sharded_in(group_of_mesh(mesh, accelerator.num_processes))
        if self._args is None:
            take_accumulation(accelerator, self.config)
        resolved = self.resolve(accelerator)
        if not isinstance(accelerator, ZeroAcceleratorMixin):
            accelerator.__class__ = _zero_class(type(accelerator))  # type: ignore[arg-type]  # a class is hashable
        accelerator.zero_plugin = self
        # Trainer builds the scheduler itself.
        self.dummies = None if self._args is not None else DummyReplacement(self.config, accelerator, self._arguments)
        if resolved.dtype is not None or resolved.precision.autocast is not None:
            # The engine casts, parameters or operations, so accelerate's autocast must not act as well.
            accelerator.native_amp = False
        elif accelerator.scaler is not None:
            self._scaling = scaling_of(accelerator.scaler)
        # It would see the gradients of one rank only; the engine's own makes all ranks skip the same steps.
        accelerator.scaler = None
        return accelerator

    def resolve(
        self, accelerator: Accelerator, model: nn.Module | None = None, num_training_steps: int | None = None
    ) -> ResolvedConfig:
        """The configuration with every "auto" filled in; without `model` those that follow from its size stay open.

        So do the scheduler's, without `num_training_steps`.
        """
        resolved = self.config.resolve(
            self._arguments(accelerator),
            model,
            accelerator.num_processes,
            num_training_steps=num_training_steps,
            client_optimizer=self._args is None,
            client_scheduler=num_training_steps is None,
        )
        if self._scaling is None:
            return resolved
        precision = dataclasses.replace(resolved.precision, scaling=self._scaling, skip_nonfinite=True)
        return dataclasses.replace(resolved, precision=precision)

    def _arguments(self, accelerator: Accelerator) -> Any:
        """Return the source of "auto" values: the Trainer's arguments, or the Accelerator in their place."""
        if self._args is None:
            return arguments_of(accelerator, self._per_device_batch)
        args = copy.copy(self._args)
        if self._per_device_batch is not None:
            args.per_device_train_batch_size = self._per_device_batch
        return args

    def create_engine(self, accelerator: Accelerator, model: nn.Module, *, train: bool) -> ZeroEngine | None:
        """Build the engine of `model`, which may have been loaded in shards. All ranks must call.

        None: without training, a model whose parameters stay unsharded and are not cast needs no engine.
        """
        with wrong_on_all("model"):
            resolved = self.resolve(accelerator, model)
            trains = train and any(param.requires_grad for param in model.parameters())
            if not trains and not resolved.shards_parameters and resolved.dtype is None:
                return None
            raise_all(self.config.source, model_conflicts(model, shards_parameters=resolved.shards_parameters))
        if resolved.shards_parameters and accelerator.num_processes > 1 and accelerator.is_main_process:
            warn_of_missed_sharding(model)
        # Trainer and accelerate scale the loss for accumulation, and ZeroAcceleratedOptimizer sees to clipping.
        return new_engine(
            model,
            resolved,
            managed=True,
            device=accelerator.device,
            # Masters keep what a cast to 16 bits drops, so a model that is evaluated first has them from the start.
            train=train or resolved.dtype is not None,
        )

    def wrap_optimizer(self, engine: ZeroEngine, optimizer: torch.optim.Optimizer) -> ZeroAcceleratedOptimizer:
        """Point `optimizer` at the shards, once, and put accelerate's gating around it."""
        attached = engine.optimizer
        if attached is None or attached.optimizer is not optimizer:
            attached = engine.attach_optimizer(optimizer)
        resolved, block = engine.config, engine.config.optimizer
        if block is not None and block["type"] != type(optimizer).__name__:
            logger.warning("the optimizer block is not used: the script made its own %s", type(optimizer).__name__)
        clipping = 0.0 if self._args is not None else resolved.gradient_clipping  # Trainer clips by itself
        is_fixed = resolved.origins.get("gradient_clipping") == FILE
        return ZeroAcceleratedOptimizer(attached, engine, clipping=clipping, clipping_is_fixed=is_fixed)


class ZeroAcceleratorMixin(AcceleratorState):
    """Replaces the methods of an Accelerator that differ under ZeRO. It stands in front of the Accelerator's class."""

    zero_plugin: ZeroPlugin

    # ---------------------------------------------------------------- prepare
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does, but models first, so that an optimizer is pointed at the shards of its model.

        A DummyOptim or DummyScheduler becomes what the configuration names (see dummies.py).
        """
        self.zero_plugin.take_loaders(self, args)
        prepare = functools.partial(self._prepare, device_placement=device_placement)
        dummies = self.zero_plugin.dummies
        return prepare(args) if dummies is None else dummies.prepare(args, prepare)

    def _prepare(self, args: Sequence[Any], device_placement: list[bool] | None) -> Any:
        order = sorted(range(len(args)), key=lambda index: not isinstance(args[index], nn.Module))
        if device_placement is not None and len(device_placement) == len(args):
            device_placement = [device_placement[index] for index in order]
        prepared = super().prepare(*(args[index] for index in order), device_placement=device_placement)
        if len(args) < 2:
            return prepared
        by_place = dict(zip(order, prepared, strict=True))
        return tuple(by_place[index] for index in range(len(args)))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Put `model` under its engine, in place. All ranks must call."""
        plain: Any = model._orig_mod if is_compiled_module(model) else model
        engine = engine_of(plain)
        if engine is None or not (engine.trains or evaluation_mode):
            engine = self.zero_plugin.create_engine(self, plain, train=not evaluation_mode) or engine
        if engine is not None:
            device_placement = False  # the engine has placed it
        # accelerate's part: autocast and torch.compile. evaluation_mode keeps it from wrapping the model.
        prepared: nn.Module = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Point `optimizer` at the shards of the prepared model that it was built for."""
        if isinstance(optimizer, ZeroAcceleratedOptimizer):
            prepared = optimizer
            if engine_of(prepared.engine.module) is not prepared.engine:
                raise StateError(
                    "this optimizer belongs to an engine that was torn down: its state was in shards that are no more."
                    "\nMake a new optimizer for the model, or a new Trainer; to go on where it was, load a checkpoint."
                )
        else:
            engine = self._engine_for(optimizer)
            if engine is None:
                raise StateError(
                    "accelerator.prepare got an optimizer whose parameters belong to no prepared model.\n"
                    "Prepare the model before it, or both in one call: model, optimizer = accelerator.prepare(model, "
                    "optimizer). An optimizer over several models needs to be split, one for each."
                )
            prepared = self.zero_plugin.wrap_optimizer(engine, optimizer)
        if not any(known is prepared for known in self._optimizers):
            self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare as accelerate does, but let DeepSpeed's schedules go one step for each step of the optimizer."""
        dummies = self.zero_plugin.dummies
        wrapped = dummies.wrap(scheduler) if dummies is not None else None
        return super().prepare_scheduler(scheduler) if wrapped is None else wrapped

    def _engine_for(self, optimizer: torch.optim.Optimizer) -> ZeroEngine | None:
        """The engine that `optimizer` is attached to, or that of the model to which all its parameters belong."""
        engines = self._engines()
        for engine in engines:
            if engine.optimizer is not None and engine.optimizer.optimizer is optimizer:
                return engine
        wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
        holding = (engine for engine in engines if wanted <= {id(param) for param in engine.module.parameters()})
        return next(holding, None) if wanted else None

    # ---------------------------------------------------------------- training
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward as accelerate does, with the loss scaled for fp16.

        Where several engines scale, each does so where the gradient enters its model.
        """
        engines = self._engines()
        scaling = [engine.loss_scale for engine in engines if engine.loss_scale.is_used]
        with contextlib.ExitStack() as stack:
            for engine in engines:
                stack.enter_context(engine.reports.backward())
            if len(scaling) == 1:
                loss = stack.enter_context(scaling[0].scaled(loss))
            super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing to do: what is in shards is free of the loss scale."""

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        engine = engine_of(model)
        if engine is None:
            stock: contextlib.AbstractContextManager[None] = super().no_sync(model)
            return stock
        return engine.no_sync()

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip by the norm over all ranks' shards; returns it. All ranks must call.

        Between accumulation steps nothing is clipped, and the last step's norm is returned.
        Raises:
            ConfigError: Another norm than the 2-norm, or the configuration fixes another `gradient_clipping`.
            StateError: `parameters` are a part of a model's trainable parameters, or of several models.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = {id(param) for param in given}
        touched = [e for e in self._engines() if any(id(param) in ids for param in e.module.parameters())]
        if not touched:
            norm: torch.Tensor = super().clip_grad_norm_(given, max_norm, norm_type)
            return norm
        trainable = {id(param) for param in touched[0].module.parameters() if param.requires_grad}
        if len(touched) > 1 or not trainable <= ids:
            raise StateError(
                "clip_grad_norm_ was called for a part of a model's parameters, or for several models at once: their "
                "gradients are in shards, and the norm is one per model.\n"
                "Call accelerator.clip_grad_norm_(model.parameters(), max_norm) for each model."
            )
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ has norm_type {norm_type}; on shards only the 2-norm is available.")
        if not self.sync_gradients:
            last = touched[0].get_global_grad_norm()
            return torch.full((), 0.0 if last is None else last, device=self.device)
        for optimizer in self._optimizers:
            if isinstance(optimizer, ZeroAcceleratedOptimizer) and optimizer.engine is touched[0]:
                clipped: torch.Tensor = optimizer.clip_grad_norm_(float(max_norm))
                return clipped
        return touched[0].clip_grad_norm_(float(max_norm))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise StateError(
            "clip_grad_value_ cannot be used: gradients are in shards, not in parameter.grad.\n"
            "Use accelerator.clip_grad_norm_(model.parameters(), max_norm)."
        )

    def free_memory(self, *objects: Any) -> Any:
        """Drop what accelerate refers to, and gradients. A model keeps its engine for as long as it lives."""
        for engine in self._engines():
            engine.zero_grad()
        return super().free_memory(*objects)


@functools.cache
def _zero_class(base: type) -> type:
    return type(f"Zero{base.__name__}", (ZeroAcceleratorMixin, base), {})


def accelerator_patch_points() -> list[PatchPoint]:
    """The one method of accelerate that `enable` acts through."""
    parameters = ("device_placement", "split_batches", "mixed_precision")
    return [PatchPoint(Accelerator, "__init__", parameters, _init)]


def _init(original: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    config = ACTIVATION.accelerator_config
    if config is not None:
        ZeroPlugin(config).attach(self)
