"""`initialize` puts ZeRO under a plain PyTorch loop; `shard` spreads a second model beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from hf_zero.config import ResolvedConfig, ZeroConfig
from hf_zero.engine import ZeroEngine
from hf_zero.errors import ConfigError
from hf_zero.optim.blocks import optimizer_of
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.processes import join_processes
from hf_zero.renewal import new_engine

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    config: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dist_init_required: bool | None = None,
    mpu: Any = None,
) -> tuple[ZeroEngine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    """Train `model` with ZeRO; the signature is deepspeed.initialize's. All ranks must call.

    Args:
        args: Something with a `zero_config`, `zero` or `deepspeed_config` path, used where `config` is None.
        model: Whole, built alike on all ranks, or loaded in shards.
        optimizer: A torch optimizer over the model's parameters, or a function that makes one from them; None builds
            the one of the configuration's optimizer block over `model_parameters` (or all trainable parameters). With
            neither, the engine is for inference: it keeps no gradients and no master weights.
        training_data: A map-style dataset, for a DataLoader with this rank's share of it in micro-batches.
        lr_scheduler: A torch scheduler, or a function that makes one from the optimizer; stepped by `engine.step()`.
        config: A path, a dict, a JSON string or a ZeroConfig. `config_params` is DeepSpeed's older name for it.

    Returns:
        (engine, optimizer, dataloader, lr_scheduler); what was not asked for is None.
    Raises:
        ConfigError: Everything that is wrong with the configuration, at once.
    """
    if model is None:
        raise ConfigError("initialize needs a model: hf_zero.initialize(model=..., optimizer=..., config=...)")
    if mpu is not None:
        raise ConfigError("initialize(mpu=...): model parallelism beside hf_zero is not supported")
    loaded = _load_config(args, config if config is not None else config_params)
    world_size = join_processes()
    resolved = loaded.resolve(model=model, world_size=world_size, client_optimizer=optimizer is not None)
    made = _make_optimizer(optimizer, resolved.optimizer, model, model_parameters)
    engine = _make_engine(model, resolved, train=made is not None)
    sharded = engine.attach_optimizer(made) if made is not None else None
    if lr_scheduler is not None:
        is_factory = callable(lr_scheduler) and not hasattr(lr_scheduler, "step")
        engine.lr_scheduler = lr_scheduler(made) if is_factory else lr_scheduler
    loader = None
    if training_data is not None:
        sampler: DistributedSampler[Any] = DistributedSampler(training_data, engine.world_size, engine.rank)
        loader = DataLoader(
            training_data,
            batch_size=resolved.train_micro_batch_size_per_gpu,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=resolved.dataloader_drop_last,
        )
    return engine, sharded, loader, engine.lr_scheduler


ModelT = TypeVar("ModelT", bound=nn.Module)


def shard(
    model: ModelT, config: ZeroConfig | Mapping[str, Any] | str | Path | None = None, *, train: bool = False
) -> ModelT:
    """Spread a second model over the ranks: a reference, a teacher, a reward model. All ranks must call.

    It has an engine of its own, with its own stage and offload, beside that of the model in training. The model is
    changed in place and returned: call it as before, on all ranks in the same order.

    Args:
        config: A path, a dict, a JSON string or a ZeroConfig; None means stage 3. What it says of training does not
            count where `train` is false.
        train: False freezes all parameters, so that there are neither gradients nor masters. True leaves them alone;
            engine_of(model).attach_optimizer(optimizer) then trains it.
    Raises:
        ConfigError: Everything that is wrong with the configuration, at once.
        StateError: The model has an engine already.
    """
    if not train:
        model.requires_grad_(False)
    loaded = _load_config(None, {"zero_optimization": {"stage": 3}} if config is None else config)
    world_size = join_processes()
    _make_engine(model, loaded.resolve(model=model, world_size=world_size, client_optimizer=True), train=train)
    return model


def _make_engine(model: nn.Module, resolved: ResolvedConfig, *, train: bool) -> ZeroEngine:
    engine = new_engine(model, resolved, train=train)
    if engine.is_sharded and hasattr(model, "save_pretrained"):  # a model of transformers or PEFT
        from hf_zero.hf.install import install_on_model

        install_on_model(engine)
    return engine


def _load_config(args: Any, config: Any) -> ZeroConfig:
    if isinstance(config, ZeroConfig):
        return config
    if config is None:
        for name in ("zero_config", "zero", "deepspeed_config"):
            config = config or getattr(args, name, None)
    if config is None:
        raise ConfigError(
            "initialize needs a configuration: config= as a path, a dict or a JSON string "
            '(the smallest one is {"zero_optimization": {"stage": 3}})'
        )
    return ZeroConfig.load(config, defer=True)


def _make_optimizer(
    optimizer: OptimizerLike | None,
    block: Mapping[str, Any] | None,
    model: nn.Module,
    parameters: Iterable[Any] | None,
) -> torch.optim.Optimizer | None:
    if isinstance(optimizer, torch.optim.Optimizer):
        if block is not None:
            raise ConfigError("both an optimizer and an optimizer block in the configuration: remove one of them")
        return optimizer
    chosen = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if optimizer is not None:
        return optimizer(chosen)
    if block is None:
        return None
    kind, arguments = optimizer_of(block, model)
    made: torch.optim.Optimizer = kind(chosen, **arguments)
    return made
