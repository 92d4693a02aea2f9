"""`initialize` puts ZeRO under a plain PyTorch loop; `shard` spreads a second model beside it."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from hf_zero.config import ResolvedConfig, ZeroConfig
from hf_zero.config.resolved import DEFAULT
from hf_zero.distributed.processes import init_distributed, join_processes, wrong_on_all
from hf_zero.distributed.rank_groups import group_of_mesh
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.loaders import share_loader
from hf_zero.engine.replace import engines_inside, replace_engines
from hf_zero.engine.script_arguments import adopt_local_rank, config_of
from hf_zero.engine.sharded_init import open_construction
from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.registry import optimizer_of
from hf_zero.optim.schedules.build_schedule import choose_scheduler
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.sharding.model_params import check_parameters

logger = logging.getLogger(__name__)

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
    distributed_port: int | None = None,
    mpu: Any = None,
    mesh_param: Any = None,
    mesh: DeviceMesh | None = None,
) -> tuple[ZeroEngine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    """Train `model` with ZeRO; the signature is deepspeed.initialize's. All ranks must call.

    Args:
        args: What `add_config_arguments` and the parser made: a `zero`, `zero_config` or `deepspeed_config` path in
            the place of `config`, and a `local_rank`, which is set to this process's.
        model: Built alike on all ranks, or loaded in shards. An engine that it has is replaced: the weights
            stay as they are, to the last digit of the masters; optimizer state and gradients are the new engine's.
        optimizer: A torch optimizer over the model's parameters, or a function that makes one from them; None builds
            the one of the configuration's optimizer block over `model_parameters` (or all trainable parameters). With
            neither, the engine is for inference: it keeps no gradients and no master weights.
        training_data: A map-style dataset, for a DataLoader with this rank's share of it in micro-batches.
        lr_scheduler: A scheduler, or a function that makes one from the optimizer; None builds the one of the
            configuration's scheduler block. `engine.step()` steps it once for each step of the optimizer.
        config: A path, a dict, a JSON string or a ZeroConfig. `config_params` is DeepSpeed's older name for it.
        collate_fn: Makes a batch of samples, as a DataLoader's does.
        dist_init_required: False: the process group must exist already. None: it is made where it does not, for one
            process too, as `init_distributed` does with `distributed_port`.
        mesh: As FSDP2 takes it, with all ranks in order: (shards) or (replicas, shards). It sets `sharding_group`.

    Returns:
        (engine, optimizer, dataloader, lr_scheduler); what was not asked for is None.
    Raises:
        ConfigError: Everything that is wrong with the configuration, at once; or there is none, or there are two.
    """
    model = _check_arguments(model, mpu, mesh_param, mesh)
    loaded = _sharded_by(mesh, config_of(args, config, config_params))
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    adopt_local_rank(args)
    world_size = _ranks_with_data(model, loaded)
    trains = optimizer is not None or loaded.get("optimizer") is not None
    brought = {"client_optimizer": optimizer is not None, "client_scheduler": lr_scheduler is not None or not trains}
    brought["makes_loader"] = training_data is not None
    with wrong_on_all("initialize"):
        resolved = loaded.resolve(model=model, world_size=world_size, **brought)
        made = _make_optimizer(optimizer, resolved.optimizer, model, model_parameters)
    engine = _make_engine(model, resolved, train=made is not None, replace=True)
    sharded = engine.attach_optimizer(made) if made is not None else None
    _warn_of_no_clipping(engine, resolved)
    engine.lr_scheduler = choose_scheduler(lr_scheduler, resolved.scheduler, made)
    loader = None if training_data is None else _loader_of(engine, training_data, collate_fn)
    return engine, sharded, loader, engine.lr_scheduler


def _loader_of(
    engine: ZeroEngine, data: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None
) -> DataLoader[Any]:
    loader = share_loader(data, engine.comm, engine.config, shuffle=engine.shuffles, collate_fn=collate_fn)
    if _staged(engine.module) is not None:
        engine.set_dataloader(loader)
    return loader


def _check_arguments(model: nn.Module | None, mpu: Any, mesh_param: Any, mesh: DeviceMesh | None) -> nn.Module:
    """Return the model itself; raise ConfigError for what `initialize` cannot take."""
    if model is None:
        raise ConfigError("initialize needs a model: hf_zero.initialize(model=..., optimizer=..., config=...)")
    if mpu is not None:
        raise ConfigError("initialize(mpu=...): model parallelism beside hf_zero is not supported")
    if mesh_param is not None:
        raise ConfigError("initialize(mesh_param=...): sequence parallelism beside hf_zero is not supported")
    if mesh is not None and _staged(model) is not None:
        raise ConfigError("initialize(mesh=...): the stages of a pipeline place their ranks themselves; leave it out")
    check_parameters(model := model.module if isinstance(model, ZeroEngine) else model)
    return model


def _sharded_by(mesh: DeviceMesh | None, config: ZeroConfig) -> ZeroConfig:
    return config if mesh is None else config.sharded_in(group_of_mesh(mesh, dist.get_world_size()))


ModelT = TypeVar("ModelT", bound=nn.Module)


def shard(
    model: ModelT, config: ZeroConfig | Mapping[str, Any] | str | Path | None = None, *, train: bool = False
) -> ModelT:
    """Shard a second model over the ranks: a reference, a teacher, a reward model. All ranks must call.

    It has an engine of its own, with its own stage and offload, beside that of the model in training. The model is
    changed in place and returned: call it as before, on all ranks in the same order.

    Args:
        config: A path, a dict, a JSON string or a ZeroConfig; None means stage 3. Its keys of training do not
            count where `train` is false.
        train: False freezes all parameters, so that there are neither gradients nor masters. True leaves them alone;
            engine_of(model).attach_optimizer(optimizer) then trains it.
    Raises:
        ConfigError: Everything that is wrong with the configuration, at once.
        StateError: The model has an engine already.
    """
    if not train:
        model.requires_grad_(False)
    loaded = config_of(None, {"zero_optimization": {"stage": 3}} if config is None else config)
    world_size = join_processes()
    with wrong_on_all("shard"):
        resolved = loaded.resolve(model=model, world_size=world_size, client_optimizer=True, client_scheduler=True)
    _make_engine(model, resolved, train=train)
    return model


class _Staged(Protocol):
    """A model in stages, of which each rank has one, that names the class of its engine: a PipelineModule."""

    engine_class: str  # "module:name" of the subclass of ZeroEngine that trains it

    def ranks_with_data(self, config: ZeroConfig) -> int: ...


def _staged(model: Any) -> _Staged | None:
    return model if hasattr(type(model), "engine_class") else None


def _ranks_with_data(model: nn.Module, loaded: ZeroConfig) -> int:
    """Return how many ranks have batches of their own: all, or those of a stage. Splits the layers of a pipeline."""
    staged = _staged(model)
    if staged is None:
        return dist.get_world_size()
    return staged.ranks_with_data(loaded)


def _make_engine(model: nn.Module, resolved: ResolvedConfig, *, train: bool, replace: bool = False) -> ZeroEngine:
    staged = _staged(model)
    if staged is not None:
        engine: ZeroEngine = pkgutil.resolve_name(staged.engine_class)(model, resolved, train=train)
        return engine
    construction = open_construction()
    if construction is not None:
        construction.settle(model)
    return new_engine(model, resolved, train=train, replace=replace)


def new_engine(
    model: nn.Module,
    config: ResolvedConfig,
    *,
    managed: bool = False,
    train: bool = True,
    device: torch.device | None = None,
    replace: bool = False,
) -> ZeroEngine:
    """Make an engine for `model`, unsharded or with models inside that were loaded in shards. All ranks must call.

    Args:
        managed, train: See ZeroEngine.
        device: See ZeroEngine; for a model that is not sharded.
        replace: Engines that train are replaced too, with their optimizers.
    Raises:
        StateError: Something in the model trains under another engine already, and `replace` is false.
    """
    inside = engines_inside(model)
    if not inside:
        return ZeroEngine(model, config, managed=managed, train=train, device=device)
    if any(engine.trains for engine in inside) and not replace:
        raise StateError("this model already has a hf_zero engine; call engine.teardown() before making another")
    return replace_engines(model, inside, config, managed=managed, train=train, drop_optimizers=replace)


def _warn_of_no_clipping(engine: ZeroEngine, resolved: ResolvedConfig) -> None:
    if engine.optimizer is not None and engine.run_comm.rank == 0 and resolved.origins["gradient_clipping"] == DEFAULT:
        logger.warning("gradient_clipping is not set: gradients are not clipped (DeepSpeed 0.19.3 and later: 1.0)")


def _make_optimizer(
    optimizer: OptimizerLike | None,
    block: Mapping[str, Any] | None,
    model: nn.Module,
    parameters: Iterable[Any] | None,
) -> torch.optim.Optimizer | None:
    if optimizer is not None and block is not None:
        logger.warning("the optimizer block (%s) is not used: initialize was given an optimizer", block["type"])
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    own = (param for _, param in model.named_parameters() if param.requires_grad)
    chosen = list(own if parameters is None else parameters)
    if _staged(model) is not None and not chosen:  # all layers of this stage are frozen
        chosen = [{"params": []}]
    if optimizer is not None:
        return optimizer(chosen)
    if block is None:
        return None
    kind, arguments = optimizer_of(block, model)
    made: torch.optim.Optimizer = kind(chosen, **arguments)
    return made
