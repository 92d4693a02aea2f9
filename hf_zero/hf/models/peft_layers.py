"""PEFT's work on the layers of a model under hf_zero: adapters that are made from weights, and merged into them.

[Note: Layer by layer]
PEFT goes from layer to layer when it makes adapters, and when it merges them. The units of the layer at hand are
unsharded meanwhile, and what was written to them is kept: every rank does the same work, and rank 0's result counts,
as for adapters that are initialised at random. Some tuners ask transformers whether DeepSpeed's stage 3 is on, and
gather then (`gather_params_ctx`). Others read weights without asking, so here the layer is unsharded for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers.utils import is_peft_available

from hf_zero.access.full import units_by_engine
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.engine.replace import engine_for_part
from hf_zero.errors import StateError
from hf_zero.hf.models.peft import PLAIN_INITIALISATIONS
from hf_zero.hf.patching import Patches, PatchPoint, instead
from hf_zero.hf.versions import check_versions
from hf_zero.sharding.unit import ShardUnit

# The engines for which PEFT's methods are ours.
_ENGINES: weakref.WeakSet[ZeroEngine] = weakref.WeakSet()
_PATCHES = Patches()


def install_peft(engine: ZeroEngine) -> None:
    """Let PEFT work on the model of `engine`, until the engine leaves it."""
    if not is_peft_available():
        return
    check_versions("peft")
    _PATCHES.open(_patch_points())
    _ENGINES.add(engine)
    engine.on_uninstall(functools.partial(_leave, engine))


def _leave(engine: ZeroEngine) -> None:
    _ENGINES.discard(engine)
    if not _ENGINES:
        _PATCHES.close()


class _Layers:
    """Unshards the units of one layer at a time. All ranks must call, alike."""

    def __init__(self) -> None:
        self._units: list[ShardUnit] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Layers:
        return self

    def __exit__(self, *error: Any) -> None:
        self._units = []
        self._stack.__exit__(*error)

    def use(self, modules: Iterable[nn.Module]) -> None:
        """Unshard all of `modules`, until others are used."""
        found = units_by_engine(param for module in modules for param in module.parameters())
        units = [unit for _, mine in found for unit in mine]
        if all(unit in self._units for unit in units):
            return
        self.__exit__(None, None, None)
        for engine, mine in found:
            engine.require_all_ranks("work of PEFT on a layer")
            self._stack.enter_context(engine.weights.edited(mine, 0, alike=True))
        self._units = units


_OPEN: ContextVar[_Layers | None] = ContextVar("hf_zero.hf.models.peft_layers", default=None)


@contextlib.contextmanager
def _layers() -> Iterator[_Layers]:
    """See [Note: Layer by layer]. What runs inside another one goes on with its layer."""
    if (outer := _OPEN.get()) is not None:
        yield outer
        return
    with _Layers() as layers:
        token = _OPEN.set(layers)
        try:
            yield layers
        finally:
            _OPEN.reset(token)


def _inject_adapter(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for BaseTuner's `inject_adapter`."""
    create = tuner._create_and_replace

    def create_unsharded(config: Any, adapter: str, target: nn.Module, *more: Any, **named: Any) -> Any:
        if not _needs_shapes_only(config):
            layers.use([target])
        return create(config, adapter, target, *more, **named)

    with _layers() as layers, instead(tuner, "_create_and_replace", create_unsharded):
        return original(tuner, *args, **kwargs)


def _needs_shapes_only(config: Any) -> bool:
    """Whether adapters are made without the values of weights: plain LoRA, by far the most frequent."""
    from peft import LoraConfig

    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    if type(config) is not LoraConfig or not variants:  # PEFT 0.18 does not say which they are
        return False
    return config.init_lora_weights in PLAIN_INITIALISATIONS and not any(getattr(config, name) for name in variants)


def _work_on_layers(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for BaseTuner's `merge_adapter` and `unmerge_adapter`."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    with _layers() as layers, contextlib.ExitStack() as stack:
        for module in [module for module in tuner.modules() if isinstance(module, BaseTunerLayer)]:
            for name in ("merge", "unmerge"):
                unsharded = functools.partial(_on_layer, layers, module, getattr(module, name))
                stack.enter_context(instead(module, name, unsharded))
        return original(tuner, *args, **kwargs)


def _on_layer(layers: _Layers, module: nn.Module, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    layers.use([module])
    return work(*args, **kwargs)


def _unload(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for BaseTuner's `merge_and_unload` and `unload`: the engine goes on with the base model alone."""
    model = _work_on_layers(original, tuner, *args, **kwargs)
    for engine, _ in units_by_engine(model.parameters()):
        if engine.is_sharded and tuner in (engine.module, getattr(engine.module, "base_model", None)):
            engine_for_part(engine, model)
    return model


def _update_tokens(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for TrainableTokensLayer's `update_layer`, which copies rows of the embeddings."""
    with _layers() as layers:
        layers.use([layer.get_base_layer()])
        return original(layer, *args, **kwargs)


def _decompose_together(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for FrodModel's `_init_frod_projections`, which decomposes the weights of all layers together."""
    with _layers() as layers:
        layers.use([tuner.model])
        return original(tuner, *args, **kwargs)


def _set_up_prompts(original: Callable[..., Any], model: Any, adapter_name: str) -> Any:
    """Stand in for PeftModel's `_setup_prompt_encoder`, which may start prompts from embeddings of tokens."""
    with _layers() as layers:
        layers.use([model.base_model.get_input_embeddings()])
        return original(model, adapter_name)


def _load_adapter(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for PeftModel's `load_adapter`: what it loads may lie in shards, as embeddings beside an adapter."""
    load = model.load_state_dict

    def load_unsharded(state: Mapping[str, Any], *more: Any, **named: Any) -> Any:
        layers.use(model.get_submodule(path) for path in {name.rpartition(".")[0] for name in state})
        return load(state, *more, **named)

    with _layers() as layers, instead(model, "load_state_dict", load_unsharded):
        return original(model, *args, **kwargs)


def _call(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for BaseTuner's `forward`, which calls the forward of its model without the hooks of an engine."""
    engine = engine_of(tuner.model)
    return original(tuner, *args, **kwargs) if engine is None else tuner.model(*args, **kwargs)


def _regularise(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for AdaLoraModel's `forward`, which looks for its factors in a loop over the model's parameters.

    Only a read from the module unshards a parameter: see [Note: Reads outside of a forward] in outside_access.py.
    """
    model = tuner.model
    named = model.named_parameters

    def read_factors() -> Iterator[tuple[str, nn.Parameter]]:
        for path, param in named():
            owner, _, name = path.rpartition(".")
            is_factor = "lora_A" in path or "lora_B" in path
            yield path, getattr(model.get_submodule(owner), name) if is_factor else param

    with instead(model, "named_parameters", read_factors):
        return original(tuner, *args, **kwargs)


def _refuse_without_gradients(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for AdaLoraModel's `update_and_allocate`, which reads gradients and masks parameters."""
    for engine, _ in units_by_engine(tuner.model.parameters()):
        raise StateError(
            f"rank {engine.rank}: AdaLoRA's update_and_allocate reads param.grad of every factor after the step, and "
            "hf_zero keeps no gradients there.\nTrain AdaLoRA with a fixed rank (do not call it), or use LoRA with "
            "rank_pattern."
        )
    return original(tuner, *args, **kwargs)


def _project_in_place(original: Callable[..., Any], prompts: Any, indices: Any) -> Any:
    """Stand in for CPTEmbedding's `forward`, which gives its weight other memory: no update would reach it."""
    weight = prompts.delta_embedding.weight
    values = weight.data
    if torch.is_grad_enabled():
        with torch.no_grad():
            weight.copy_(prompts.get_projection())
        with instead(prompts, "get_projection", lambda: values):
            return original(prompts, indices)
    try:
        return original(prompts, indices)
    finally:
        weight.data = values  # who only reads changes nothing


def _patch_points() -> list[PatchPoint]:
    """Return the patch points in which PEFT reads and writes weights."""
    from peft import PeftModel, tuners
    from peft.tuners.adalora import AdaLoraModel
    from peft.tuners.cpt import CPTEmbedding
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTuner

    points = [
        PatchPoint(BaseTuner, "forward", (), _call),
        PatchPoint(BaseTuner, "inject_adapter", ("model", "adapter_name"), _inject_adapter),
        PatchPoint(BaseTuner, "merge_adapter", (), _work_on_layers),
        PatchPoint(BaseTuner, "unmerge_adapter", (), _work_on_layers),
        PatchPoint(BaseTuner, "merge_and_unload", (), _unload),
        PatchPoint(BaseTuner, "unload", (), _unload),
        PatchPoint(TrainableTokensLayer, "update_layer", ("adapter_name",), _update_tokens),
        PatchPoint(PeftModel, "_setup_prompt_encoder", ("adapter_name",), _set_up_prompts),
        PatchPoint(PeftModel, "load_adapter", (), _load_adapter),
        PatchPoint(AdaLoraModel, "forward", (), _regularise),
        PatchPoint(AdaLoraModel, "update_and_allocate", ("global_step",), _refuse_without_gradients),
        PatchPoint(CPTEmbedding, "forward", ("indices",), _project_in_place),
    ]
    if frod := getattr(tuners, "FrodModel", None):  # not in PEFT 0.18
        points.append(PatchPoint(frod, "_init_frod_projections", (), _decompose_together))
    return points
